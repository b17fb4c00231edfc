"""Plans of CUDA launches, executed one after the other on NumPy arrays."""
from __future__ import annotations

import numpy as np

from .arguments import Address
from .launching import launch_text
from .report import Report


def execute(plan, *, arch: str = "sm_80", **options) -> Report:
    """Run every launch of a `numbaflash.cuda.plan.Plan`.

    Parameters
    ----------
    plan : Plan
        Its arguments refer to NumPy arrays and to the plan's workspaces.
    arch, **options
        As for `launch`.

    Returns
    -------
    Report
        The sum over the launches.

    Raises
    ------
    EmulatorError
        As for `launch`. Workspaces without a ``fill`` count as uninitialized until a launch has written them.
    """
    from numbaflash.cuda.plan import Pointer, Workspace
    memories = {id(w): _Scratch(w) for w in plan.workspaces}

    def resolve(item):
        if isinstance(item, Pointer):
            return resolve_address(item.target, item.byte_offset)
        if isinstance(item, Workspace):
            return resolve_address(item, 0)
        if isinstance(item, tuple):
            values = [resolve(one) for one in item]
            return type(item)(*values) if hasattr(item, "_fields") else tuple(values)
        return item

    def resolve_address(target, offset):
        scratch = memories.get(id(target))
        if scratch is None:
            return Address(target, offset)
        return Address(scratch.array, offset, initialized=scratch.written, name=scratch.name)

    total = None
    for one in plan.launches:
        spec = one.kernel
        text = spec.ptx(arch, lineinfo=True)
        code = getattr(spec.function, "py_func", spec.function).__code__
        arguments = [resolve(item) for item in one.arguments]
        report = launch_text(text, tuple(spec.signature), code.co_varnames[:code.co_argcount], one.grid,
                             one.block, arguments, shared_bytes=one.shared_bytes, **options)
        total = report if total is None else total + report
    if total is None:
        raise ValueError("plan has no launches")
    return total


class _Scratch:
    """A workspace's array; ``written`` tells byte by byte what has been written so far."""

    def __init__(self, workspace):
        self.name = workspace.name
        fill = workspace.fill
        self.array = np.full(workspace.shape, 0 if fill is None else fill, workspace.dtype)
        self.written = np.full(self.array.nbytes, fill is not None)
