"""grid.sync() of cooperative groups: all threads of the grid wait for each other."""
from __future__ import annotations

import numpy as np

from ..errors import BarrierError
from ..machine import AT_BARRIER, EXITED, RUNNING
from ..registry import opcode
from .barrier import whole


GUIDE = "CUDA C++ Programming Guide, Cooperative Groups: Grid Synchronization"


@opcode("system.cudaCGGetIntrinsicHandle", section=GUIDE, group="control")
def this_grid(d, i):
    """The grid is the only group there is."""
    return lambda active: None


@opcode("system.cudaCGSynchronize", section=GUIDE, group="synchronisation", control=True)
def grid_sync(d, i):
    """Wait until all threads of all blocks are here; each then knows what the others did before."""
    machine = d.machine
    waiting = np.zeros(machine.lanes, bool)

    def control(machine, active, following):
        whole(machine, active, i)
        lanes = np.arange(machine.lanes) if active.lanes is None else active.lanes
        if machine.batches > 1:
            machine.fail(BarrierError, f"grid.sync() of {machine.grid_blocks} blocks, of which only "
                         f"{machine.blocks} run at a time (resident_blocks)", i, int(lanes[0]))
        gone = machine.real & (machine.state == EXITED)
        if gone.any():
            name = machine.lane_name(int(np.flatnonzero(gone)[0]))
            machine.fail(BarrierError, f"grid.sync() in divergent code: {name} has exited without it", i,
                         int(lanes[0]), len(lanes))
        machine.set_pc(active, following)
        machine.state[lanes] = AT_BARRIER
        waiting[lanes] = True
        if (waiting == machine.real).all():
            machine.state[waiting] = RUNNING
            waiting[:] = False
            machine.clocks.barrier_blocks()
            machine.order.everyone_knows(machine.clocks.time - 1)
        return None

    return control
