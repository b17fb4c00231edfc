"""Warps that produce and warps that consume, through a ring of buffers in shared memory."""
import numpy as np
from emulator_kernels.case import Case
from numba import cuda, float32, float64, int32, types

from numbaflash.cuda import ptx

WIDTH = 64                      # producers, consumers, and elements of a stage
STAGES = 2
FULL, EMPTY = 0, 8 * STAGES     # byte offsets of the mbarriers
BUFFER = 16 * STAGES
STAGE_BYTES = 4 * WIDTH
RING_WORDS = (BUFFER + STAGES * STAGE_BYTES) // 8


def make_mbarrier_pipeline(wait, asynchronous=False):
    """sums[t] = sum over rounds of x[round, WIDTH - 1 - t], rounds handed over by mbarriers."""
    @cuda.jit
    def pipeline(x, sums, rounds):
        base = ptx.shared_address(cuda.shared.array(RING_WORDS, float64))
        t = int32(cuda.threadIdx.x)
        if t == 0:
            for stage in range(STAGES):
                ptx.mbarrier_init(base + FULL + 8 * stage, WIDTH)
                ptx.mbarrier_init(base + EMPTY + 8 * stage, WIDTH)
        cuda.syncthreads()
        stage, phase = int32(0), int32(0)
        if t < WIDTH:
            for i in range(rounds):
                slot = base + BUFFER + stage * STAGE_BYTES + 4 * t
                wait(base + EMPTY + 8 * stage, phase ^ 1)       # a fresh ring is empty
                if asynchronous:
                    ptx.cp_async_4(slot, ptx.global_address(x) + STAGE_BYTES * i + 4 * t)
                    ptx.cp_async_mbarrier_arrive_noinc(base + FULL + 8 * stage)
                else:
                    ptx.st_shared_f32(slot, x[i, t])
                    ptx.mbarrier_arrive(base + FULL + 8 * stage)
                stage = int32(stage + 1)
                if stage == STAGES:
                    stage, phase = int32(0), int32(phase ^ 1)
            for _ in range(STAGES):                 # the ring is used again, once nobody reads it
                wait(base + EMPTY + 8 * stage, phase ^ 1)
                ptx.st_shared_f32(base + BUFFER + stage * STAGE_BYTES + 4 * t, float32(0))
                stage = int32(stage + 1)
                if stage == STAGES:
                    stage, phase = int32(0), int32(phase ^ 1)
        else:
            total = float32(0)
            mirrored = 2 * WIDTH - 1 - t
            for _ in range(rounds):
                wait(base + FULL + 8 * stage, phase)
                total += ptx.ld_shared_f32(base + BUFFER + stage * STAGE_BYTES + 4 * mirrored)
                ptx.mbarrier_arrive(base + EMPTY + 8 * stage)
                stage = int32(stage + 1)
                if stage == STAGES:
                    stage, phase = int32(0), int32(phase ^ 1)
            sums[t - WIDTH] = total

    return pipeline


@cuda.jit
def named_barrier_pipeline(x, sums, rounds):
    """The same with one buffer and two named barriers: 1 is full, 2 is empty."""
    base = ptx.shared_address(cuda.shared.array(WIDTH, float32))
    t = int32(cuda.threadIdx.x)
    if t < WIDTH:
        for i in range(rounds):
            if i > 0:
                ptx.bar_sync(2, 2 * WIDTH)
            ptx.st_shared_f32(base + 4 * t, x[i, t])
            ptx.bar_arrive(1, 2 * WIDTH)
    else:
        total = float32(0)
        for i in range(rounds):
            ptx.bar_sync(1, 2 * WIDTH)
            total += ptx.ld_shared_f32(base + 4 * (2 * WIDTH - 1 - t))
            if i < rounds - 1:
                ptx.bar_arrive(2, 2 * WIDTH)
        sums[t - WIDTH] = total


def _case(kernel, rng, arch, rounds=11):
    x = rng.standard_normal((rounds, WIDTH)).astype(np.float32)
    sums = np.zeros(WIDTH, np.float32)
    return Case(kernel, (types.float32[:, ::1], types.float32[::1], types.int32), (x, sums, int32(rounds)),
                {1: x.astype(np.float64).sum(axis=0)[::-1]}, 1e-5, grid=1, block=2 * WIDTH, arch=arch)


def mbarrier_pipeline_case(rng):
    return _case(make_mbarrier_pipeline(ptx.mbarrier_wait_parity), rng, "sm_90")


def mbarrier_spin_pipeline_case(rng):
    """Before sm_90 a wait is a loop around a test."""
    return _case(make_mbarrier_pipeline(ptx.mbarrier_spin_parity), rng, "sm_80")


def async_pipeline_case(rng):
    """The copies themselves arrive, when they are complete."""
    return _case(make_mbarrier_pipeline(ptx.mbarrier_wait_parity, asynchronous=True), rng, "sm_90")


def named_barrier_pipeline_case(rng):
    return _case(named_barrier_pipeline, rng, "sm_80")
