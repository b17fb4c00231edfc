"""One file per family of instructions; importing them fills `registry.OPCODES`."""
from . import async_copy, atomic, barrier, bits, control, convert, data_movement, floating, half  # noqa: F401
from . import integer, loadstore, matrix, mbarrier, predicate, system, warp  # noqa: F401
