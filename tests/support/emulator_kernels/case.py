"""One kernel with everything that a test needs to run and to judge it."""
from typing import NamedTuple

import numpy as np
from numba import types

from numbaflash.cuda import compile


def numba_parameters(value: object, kind: types.Type) -> list:
    """The kernel parameters that numba makes of an argument; an array stands for its address."""
    if not isinstance(kind, types.Array):
        return [value]
    return [0, 0, value.size, value.itemsize, value, *value.shape, *value.strides]


class Case(NamedTuple):
    """A launch and what it must give.

    Attributes
    ----------
    kernel, signature, grid, block, shared_bytes, arch, launch_bounds
        Of the launch.
    arguments : tuple
        Arrays (where the signature has an int64, the kernel gets their addresses) and numbers.
    expected : dict
        Position of an output among the arguments -> its values in higher precision.
    tolerance : float
        Largest absolute error.
    """

    kernel: object
    signature: tuple
    arguments: tuple
    expected: dict
    tolerance: float
    grid: "int | tuple"
    block: "int | tuple"
    shared_bytes: int = 0
    arch: str = "sm_80"
    launch_bounds: "int | tuple | None" = None

    def ptx(self, lineinfo: bool = False) -> str:
        """The text that numba makes of the kernel."""
        return compile.compile_ptx(self.kernel, self.signature, self.arch, launch_bounds=self.launch_bounds,
                                   lineinfo=lineinfo)

    def launch(self, emulator, text: "str | None" = None, **options):
        """Run this kernel, or a changed text of it; returns the report and the outputs."""
        values = [value.copy() if isinstance(value, np.ndarray) else value for value in self.arguments]
        arguments = [parameter for value, kind in zip(values, self.signature, strict=True)
                     for parameter in numba_parameters(value, kind)]
        report = emulator.launch(self.ptx() if text is None else text, self.grid, self.block, *arguments,
                                 shared_bytes=self.shared_bytes, arch=self.arch, **options)
        return report, {position: values[position] for position in self.expected}

    def error(self, outputs: dict) -> float:
        """Largest absolute difference from what is expected; inf if anything is not a number."""
        worst = 0.0
        for position, wanted in self.expected.items():
            difference = np.abs(outputs[position].astype(np.float64) - wanted)
            worst = max(worst, np.inf if np.isnan(difference).any() else float(difference.max()))
        return worst
