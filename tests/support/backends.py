"""The backends that can run here, and how much work a test may give to each."""

from typing import NamedTuple


class Backend(NamedTuple):
    """A backend under test.

    Attributes
    ----------
    name : str
        What ``backend=`` is given.
    rows : int
        Queries and keys per sequence in tests that have a choice.
    work : int
        Multiplications, batch * heads * queries * keys * (D + Dv), in tests that have a choice.
    examples : float
        Share of the usual number of hypothesis examples.
    dims : tuple of int
        Head dimensions to draw from; empty: any. Each has kernels of its own where kernels are compiled by width.
    precision : str
        Of products of float32.
    """

    name: str
    rows: int = 300
    work: int = 20_000_000
    examples: float = 1.0
    dims: tuple[int, ...] = ()
    precision: str = "ieee"


BACKENDS = [Backend("cpu"), Backend("emulator", rows=70, work=300_000, examples=0.3, dims=(3, 17, 31))]
"""The emulator compiles kernels by class of head dimension, for seconds each: these are of one class."""
