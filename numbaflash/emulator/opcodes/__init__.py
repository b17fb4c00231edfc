"""One file per family of instructions; importing them fills `registry.OPCODES`.

A family is added by writing its file and naming it here. A builder ``(d, instruction)`` gets its operands
from the `decode.Decoder` once (``d.source`` and ``d.target`` are live views of registers) and returns the
closure that runs:

* ``step(active)`` computes for all lanes and writes with ``where=active.where``; ``active.lanes`` are the
  indices of those that execute (None: all). `memory.Access` turns an address operand into checked flat byte
  indices.
* with ``control=True``, ``control(machine, active, following)`` returns the next pc for all active lanes, or
  None after it has set ``machine.pc`` and ``machine.state`` itself: branches, barriers and waits.

What an asynchronous unit remembers lives in ``machine.parts``; ``machine.batch_hooks`` reset it for each
batch of blocks, and ``machine.progress_hooks`` are asked to deliver something when no lane can run.
"""
from . import async_copy, atomic, barrier, bits, control, convert, data_movement, floating, half  # noqa: F401
from . import grid_barrier, integer, loadstore, matrix, mbarrier, predicate, system, warp  # noqa: F401
