"""Threads that wait for a lock do not keep the one that holds it from going on."""
import numpy as np
import pytest
from numba import cuda

from numbaflash import emulator
from numbaflash.emulator import DeadlockError, RaceError


@cuda.jit
def spin_lock(lock, total, rounds):
    for _ in range(rounds):
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        cuda.threadfence()
        total[0] += cuda.threadIdx.x + 1
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)


@cuda.jit
def ticket_lock(lock, total, rounds):
    for _ in range(rounds):
        mine = cuda.atomic.add(lock, 0, 1)
        while cuda.atomic.add(lock, 1, 0) != mine:
            pass
        cuda.threadfence()
        total[0] += cuda.threadIdx.x + 1
        cuda.threadfence()
        cuda.atomic.add(lock, 1, 1)


@cuda.jit
def one_thread_locks_for_its_block(lock, total, rounds):
    for _ in range(rounds):
        if cuda.threadIdx.x == 0:
            while cuda.atomic.cas(lock, 0, 0, 1) != 0:
                pass
            cuda.threadfence()
        cuda.syncthreads()
        if cuda.threadIdx.x == cuda.blockDim.x - 1:
            total[0] += cuda.blockDim.x * (cuda.blockDim.x + 1) // 2
        cuda.threadfence()
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            cuda.atomic.exch(lock, 0, 0)


HAND_OVER = 100                                 # warp instructions, where one takes 10 to 20 by itself


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("kernel", [spin_lock, ticket_lock])
@pytest.mark.parametrize("grid, block, rounds", [(1, 32, 1), (1, 32, 3), (8, 1, 2), (2, 40, 1)])
def test_handing_over_a_lock_takes_few_instructions(kernel, grid, block, rounds, seed):
    total = np.zeros(1, np.int32)
    report = emulator.launch(kernel, grid, block, np.zeros(2, np.int32), total, rounds, seed=seed)
    assert total[0] == grid * rounds * block * (block + 1) // 2
    assert report.warp_instructions < HAND_OVER * grid * block * rounds


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_eight_blocks_take_turns(seed):
    total = np.zeros(1, np.int32)
    lock = np.zeros(1, np.int32)
    report = emulator.launch(one_thread_locks_for_its_block, 8, 64, lock, total, 2, seed=seed)
    assert total[0] == 8 * 2 * 64 * 65 // 2
    assert report.warp_instructions < 8 * 2 * 4 * HAND_OVER


@pytest.mark.parametrize("seed", [None, 0])
def test_a_lock_without_fences_is_a_race(seed):
    @cuda.jit
    def kernel(lock, total):
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        total[0] += 1
        cuda.atomic.exch(lock, 0, 0)

    with pytest.raises(RaceError):
        emulator.launch(kernel, 2, 1, np.zeros(1, np.int32), np.zeros(1, np.int32), seed=seed)


def test_a_lock_that_nobody_gives_back_is_an_endless_loop():
    @cuda.jit
    def kernel(lock, total):
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        total[0] = cuda.threadIdx.x

    with pytest.raises(DeadlockError, match="(?s)endless loop.*3 threads.*test_locks.py:"):
        emulator.launch(kernel, 1, 4, np.zeros(1, np.int32), np.zeros(1, np.int32))


def test_two_locks_taken_in_opposite_order_are_an_endless_loop():
    @cuda.jit
    def kernel(lock):
        first = cuda.threadIdx.x
        while cuda.atomic.cas(lock, first, 0, 1) != 0:
            pass
        while cuda.atomic.cas(lock, 1 - first, 0, 1) != 0:
            pass

    with pytest.raises(DeadlockError, match="(?s)endless loop.*2 threads.*test_locks.py:"):
        emulator.launch(kernel, 1, 2, np.zeros(2, np.int32))


HEAD = """.version 8.0
.target sm_80
.address_size 64
.shared .align 8 .b64 barrier;
.shared .align 4 .b32 flag;
.visible .entry k(.param .u64 out)
{
    .reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
"""


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("load", ["volatile.shared.u32", "relaxed.cta.shared.u32", "acquire.cta.shared.u32"])
def test_polling_of_a_flag_takes_few_instructions(load, seed):
    text = HEAD + f"""
    @%p1 bra WAIT;
    st.shared.u32 [flag], 0;
    WAIT: bar.sync 0;
    setp.eq.u32 %p2, %r1, 31;
    @%p2 bra SET;
    POLL: ld.{load} %r2, [flag];
    setp.eq.u32 %p3, %r2, 0;
    @%p3 bra POLL;
    bra END;
    SET: st.release.cta.shared.u32 [flag], 7;
    mov.u32 %r2, 8;
    END: mul.wide.u32 %rd2, %r1, 4; add.u64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r2;
    ret;
}}"""
    out = np.zeros(32, np.int32)
    report = emulator.launch(text, 1, 32, out, seed=seed)
    assert out.tolist() == 31 * [7] + [8]
    assert report.warp_instructions < 100


def test_a_thread_that_a_poller_has_let_go_comes_to_its_turn():
    """The poller was alone when it began: the other thread waited for it at an mbarrier."""
    text = HEAD + """
    @%p1 bra BOTH;
    mbarrier.init.shared.b64 [barrier], 1; st.shared.u32 [flag], 0;
    BOTH: bar.sync 0;
    @!%p1 bra LETS_GO;
    WAITS: mbarrier.test_wait.parity.shared.b64 %p2, [barrier], 0;
    @!%p2 bra WAITS;
    st.volatile.shared.u32 [flag], 7;
    ret;
    LETS_GO: mbarrier.arrive.shared.b64 %rd2, [barrier];
    POLL: ld.volatile.shared.u32 %r2, [flag];
    setp.eq.u32 %p3, %r2, 0;
    @%p3 bra POLL;
    st.global.u32 [%rd1], %r2;
    ret;
}"""
    out = np.zeros(1, np.int32)
    emulator.launch(text, 1, 33, out[:1])
    assert out[0] == 7


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_thread_that_asks_an_mbarrier_once_hears_no_while_others_poll(seed):
    """It goes on to set the flag that the others poll, which no phase of the mbarrier waits for."""
    text = HEAD + """
    @%p1 bra BOTH;
    mbarrier.init.shared.b64 [barrier], 1; st.shared.u32 [flag], 0;
    BOTH: bar.sync 0;
    @!%p1 bra ASKS;
    POLL: ld.volatile.shared.u32 %r2, [flag];
    setp.eq.u32 %p3, %r2, 0;
    @%p3 bra POLL;
    ret;
    ASKS: mbarrier.test_wait.parity.shared.b64 %p2, [barrier], 0;
    @%p2 bra END;
    st.volatile.shared.u32 [flag], 7; st.global.u32 [%rd1], 1;
    END: ret;
}"""
    out = np.zeros(1, np.int32)
    emulator.launch(text, 1, 64, out, seed=seed)
    assert out[0] == 1


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_copies_arrive_though_others_poll(seed):
    """Thread 0 waits for its copy and then sets the flag that the others poll."""
    text = HEAD.replace(".shared .align 4 .b32 flag;", ".shared .align 4 .b32 flag, copied;") + """
    @%p1 bra BOTH;
    mbarrier.init.shared.b64 [barrier], 1; st.shared.u32 [flag], 0;
    cp.async.ca.shared.global [copied], [%rd1], 4;
    cp.async.mbarrier.arrive.noinc.shared.b64 [barrier];
    BOTH: bar.sync 0;
    @!%p1 bra ASKS;
    POLL: ld.volatile.shared.u32 %r2, [flag];
    setp.eq.u32 %p3, %r2, 0;
    @%p3 bra POLL;
    ret;
    ASKS: mbarrier.test_wait.parity.shared.b64 %p2, [barrier], 0;
    @!%p2 bra ASKS;
    ld.shared.u32 %r2, [copied]; st.global.u32 [%rd1+4], %r2; st.volatile.shared.u32 [flag], 7;
    ret;
}"""
    out = np.array([5, 0], np.int32)
    report = emulator.launch(text, 1, 64, out, seed=seed)
    assert out.tolist() == [5, 5] and report.warp_instructions < 200 + 10_000 * (seed is not None)


@pytest.mark.parametrize("seed", [None, 0])
def test_lanes_that_add_to_a_histogram_as_often_as_they_like_meet_again_behind_the_loop(seed):
    @cuda.jit
    def kernel(histogram, x):
        i = cuda.threadIdx.x
        for n in range(i):
            cuda.atomic.add(histogram, n, 1)
        value = x[i]
        for _ in range(100):
            value = value * 3 + 1
        x[i] = value

    histogram = np.zeros(32, np.int32)
    report = emulator.launch(kernel, 1, 32, histogram, np.zeros(32, np.int32), seed=seed)
    assert histogram.tolist() == list(range(31, -1, -1))
    assert report.warp_instructions < 32 * 20 + 1000
