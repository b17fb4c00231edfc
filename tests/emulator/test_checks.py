"""Planted faults of every kind are found, with a message that says where; the correct twin of each raises
nothing."""
import numpy as np
import pytest
from numba import cuda, float32, int32, uint32

from numbaflash import emulator
from numbaflash.emulator import (BarrierError, Checks, DeadlockError, MemoryFault, RaceError, TrapError,
                                 UninitializedRead, UnknownInstruction)

HEADER = ".version 8.0\n.target sm_80\n.address_size 64\n"


def ptx(body, registers="", parameters=".param .u64 out", shared=""):
    """A kernel called k around a few instructions; %rd1 is the address of ``out``, %r1 the thread."""
    return f"""{HEADER}{shared}
.visible .entry k({parameters})
{{
    .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .pred %p<9>; {registers}
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    {body}
    ret;
}}
"""


def run(text, threads=32, size=64, **options):
    out = np.zeros(size, np.int32)
    emulator.launch(text, options.pop("grid", 1), threads, out, **options)
    return out


def test_reading_past_an_array_names_thread_array_and_lines():
    @cuda.jit
    def shift(x, y):
        i = cuda.grid(1)
        y[i] = x[i + 1]

    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    with pytest.raises(MemoryFault) as caught:
        emulator.launch(shift, 2, 32, x, y)
    message = str(caught.value)
    assert "out-of-bounds read of 4 bytes" in message and "just past the end of x (256 bytes)" in message
    assert "block (1, 0, 0) thread (31, 0, 0)" in message and "test_checks.py" in message
    assert "ld.global" in message
    assert caught.value.source[1] == shift.py_func.__code__.co_firstlineno + 3
    assert not y.any(), "a launch that fails leaves the arrays as they were"
    emulator.launch(shift, 1, 32, x, y)
    assert (y[:32] == np.arange(1, 33)).all()


@pytest.mark.parametrize("offset, message", [(256, "just past the end"), (260, "4 bytes past the end"),
                                             (-4, "4 bytes before")])
def test_writing_next_to_an_array_is_found(offset, message):
    text = ptx(f"mov.u32 %r2, 1; st.global.u32 [%rd1 + {offset}], %r2;")
    with pytest.raises(MemoryFault, match=message):
        run(text, 1)
    run(text.replace(str(offset), "8"), 1)


def test_a_wild_address_is_found():
    with pytest.raises(MemoryFault, match="out-of-bounds write"):
        run(ptx("st.global.u32 [%rd2], %r1;"), 1)


def test_a_misaligned_access_is_found():
    with pytest.raises(MemoryFault, match="misaligned write of 8 bytes: .* must be a multiple of 8"):
        run(ptx("st.global.v2.u32 [%rd1 + 4], {%r1, %r1};"), 1)


def test_shared_memory_ends_where_it_ends():
    for size, fault in ((16, True), (32, False)):
        text = ptx(
            "mul.lo.u32 %r2, %r1, 4; mov.u32 %r3, buffer; add.u32 %r2, %r2, %r3; st.shared.u32 [%r2], %r1;",
            shared=f".shared .align 4 .b32 buffer[{size}];")
        if fault:
            with pytest.raises(MemoryFault, match="just past the end of shared buffer .*64 bytes"):
                run(text)
        else:
            run(text)


def test_dynamic_shared_memory_has_the_size_of_the_launch():
    @cuda.jit
    def reverse(x):
        buffer = cuda.shared.array(0, float32)
        i = cuda.threadIdx.x
        buffer[i] = x[i]
        cuda.syncthreads()
        x[i] = buffer[63 - i]

    x = np.arange(64, dtype=np.float32)
    emulator.launch(reverse, 1, 64, x, shared_bytes=256)
    assert (x == np.arange(64)[::-1]).all()
    with pytest.raises(MemoryFault, match="dynamic shared memory"):
        emulator.launch(reverse, 1, 64, x, shared_bytes=252)


def test_reading_shared_memory_nobody_wrote_is_found():
    text = ptx("ld.shared.u32 %r2, [buffer]; st.global.u32 [%rd1], %r2;",
               shared=".shared .align 4 .b32 buffer[8];")
    with pytest.raises(UninitializedRead, match="shared buffer at byte 0 of 32.*nothing has been written"):
        run(text, 1)
    run(text, 1, checks=Checks(initialized=False))


def test_reading_local_memory_nobody_wrote_is_found():
    text = ptx("ld.local.u32 %r2, [frame + 4]; st.global.u32 [%rd1], %r2;", ".local .align 4 .b8 frame[8];")
    with pytest.raises(UninitializedRead, match="local frame at byte 4 of 8"):
        run(text, 1)
    run(text.replace("ld.local", "st.local.u32 [frame + 4], %r1; ld.local"), 1)


def test_reading_an_output_before_writing_it_is_found():
    text = ptx("ld.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, 1; st.global.u32 [%rd1], %r2;")
    out = np.zeros(4, np.int32)
    with pytest.raises(UninitializedRead, match="argument 0 at byte 0 of 16"):
        emulator.launch(text, 1, 1, emulator.uninitialized(out))
    emulator.launch(text, 1, 1, out)
    assert out[0] == 1


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
@pytest.mark.parametrize("piece, whole", [("u8", "u32"), ("u16", "u64"), ("u8", "u16"), ("u32", "v4.u32")])
@pytest.mark.parametrize("space", ["local", "shared", "global"])
def test_one_missing_piece_of_a_larger_read_is_found(space, piece, whole, missing):
    size = int(piece[1:]) // 8
    count = {"u16": 2, "u32": 4, "u64": 4, "v4.u32": 4}[whole]
    missing %= count
    base = "%rd1" if space == "global" else "frame"
    register = {"u16": "%h1", "u32": "%r2", "u64": "%rd2", "v4.u32": "{%r3, %r4, %r5, %r6}"}[whole]
    value = "%h2" if size < 4 else "%r1"
    stores = [f"st.{space}.{piece} [{base} + {n * size}], {value};" for n in range(count)]
    load = f"ld.{space}.{whole} {register}, [{base}];"
    shared = ".shared .align 16 .b8 frame[16];" if space == "shared" else ""
    local = ".local .align 16 .b8 frame[16];" if space == "local" else ""
    registers = f".reg .b16 %h<3>; {local} mov.u16 %h2, 7;"
    out = np.zeros(16, np.uint8)
    text = ptx(" ".join([*stores, load]), registers, shared=shared)
    emulator.launch(text, 1, 1, emulator.uninitialized(out))
    with pytest.raises(UninitializedRead, match="nothing has been written"):
        emulator.launch(text.replace(stores[missing], "", 1), 1, 1, emulator.uninitialized(out))


def exchange(synchronise):
    @cuda.jit
    def kernel(x):
        buffer = cuda.shared.array(64, int32)
        i = cuda.threadIdx.x
        buffer[i] = i
        if synchronise:
            cuda.syncthreads()
        x[i] = buffer[63 - i]
    return kernel


def test_a_missing_barrier_between_warps_is_a_race_and_names_both_accesses():
    x = np.zeros(64, np.int32)
    with pytest.raises(RaceError) as caught:
        emulator.launch(exchange(False), 1, 64, x)
    message = str(caught.value)
    assert "race on shared memory: read of 4 bytes" in message and "written by thread" in message
    assert "no barrier orders" in message and message.count("test_checks.py") == 3
    assert "shared array buffer (test_checks.py:" in message
    assert "st.shared" in message and "ld.shared" in message
    emulator.launch(exchange(True), 1, 64, x)
    assert (x == 63 - np.arange(64)).all()
    emulator.launch(exchange(False), 1, 64, x, checks=Checks(races=False))


def test_a_missing_barrier_before_overwriting_is_a_race():
    @cuda.jit
    def rounds(x, barrier):
        buffer = cuda.shared.array(64, int32)
        i = cuda.threadIdx.x
        for _ in range(3):
            buffer[i] = x[i]
            cuda.syncthreads()
            x[i] = buffer[63 - i]
            if barrier:
                cuda.syncthreads()

    with pytest.raises(RaceError, match="write of 4 bytes.*read by thread"):
        emulator.launch(rounds, 1, 64, np.zeros(64, np.int32), False)
    emulator.launch(rounds, 1, 64, np.zeros(64, np.int32), True)


def test_two_warps_that_write_one_place_race_unless_they_write_the_same():
    text = ptx("{0} st.shared.u32 [buffer], %r2;", shared=".shared .align 4 .b32 buffer[8];")
    with pytest.raises(RaceError, match="written by thread"):
        run(text.replace("{0}", "shr.u32 %r2, %r1, 5;"), 64)
    run(text.replace("{0}", "mov.u32 %r2, 7;"), 64)


def test_lanes_of_a_warp_need_a_warp_barrier():
    @cuda.jit
    def swap(x, barrier):
        buffer = cuda.shared.array(32, int32)
        i = cuda.threadIdx.x
        buffer[i] = x[i]
        if barrier:
            cuda.syncwarp()
        x[i] = buffer[i ^ 1]

    x = np.arange(32, dtype=np.int32)
    with pytest.raises(RaceError, match="no bar.warp.sync orders"):
        emulator.launch(swap, 1, 32, x, False)
    emulator.launch(swap, 1, 32, x, True)
    assert (x == np.arange(32) ^ 1).all()


def test_named_barriers_order_only_those_who_take_part():
    shared = ".shared .align 4 .b32 buffer[256];"
    body = """
    mov.u32 %r3, buffer; shl.b32 %r4, %r1, 2; add.u32 %r5, %r3, %r4;
    shr.u32 %r6, %r1, 6; add.u32 %r6, %r6, 1;
    st.shared.u32 [%r5], %r1;
    bar.sync %r6, 64;
    xor.b32 %r7, %r4, {distance}; add.u32 %r7, %r7, %r3;
    ld.shared.u32 %r2, [%r7]; add.u64 %rd2, %rd1, 0;
    cvt.u64.u32 %rd3, %r4; add.u64 %rd2, %rd1, %rd3; st.global.u32 [%rd2], %r2;"""
    out = run(ptx(body.format(distance=128), shared=shared), 128, 128)
    assert (out == np.arange(128) ^ 32).all()
    with pytest.raises(RaceError):
        run(ptx(body.format(distance=256), shared=shared), 128, 128)


def test_blocks_that_write_what_others_read_race():
    @cuda.jit
    def neighbours(x):
        i = cuda.grid(1)
        x[i] = x[(i + 32) % 64] + 1

    with pytest.raises(RaceError, match="race on global memory.*block .*blocks run in any order"):
        emulator.launch(neighbours, 2, 32, np.zeros(64, np.int32))
    emulator.launch(neighbours, 2, 32, np.zeros(64, np.int32), checks=Checks(global_races=False, races=False))


def test_atomics_do_not_race():
    @cuda.jit
    def count(x):
        cuda.atomic.add(x, 0, 1)

    x = np.zeros(1, np.int32)
    emulator.launch(count, 5, 64, x)
    assert x[0] == 320


def test_a_barrier_that_only_some_lanes_of_a_warp_reach_is_found():
    @cuda.jit
    def half(x):
        i = cuda.threadIdx.x
        if i % 2:
            x[i] = 1
            cuda.syncthreads()
        else:
            x[i] = 2
            cuda.syncthreads()
            x[i] = 3

    with pytest.raises(BarrierError, match="divergent"):
        emulator.launch(half, 1, 32, np.zeros(32, np.int32))


def test_a_barrier_after_lanes_of_the_warp_have_exited_is_found():
    @cuda.jit
    def early(x):
        i = cuda.threadIdx.x
        if i > 20:
            return
        cuda.syncthreads()
        x[i] = 1

    with pytest.raises(BarrierError, match="has exited"):
        emulator.launch(early, 1, 32, np.zeros(32, np.int32))


def test_a_shuffle_without_the_lanes_it_names_is_found():
    @cuda.jit
    def broken(x):
        i = cuda.threadIdx.x
        if i < 16:
            x[i] = cuda.shfl_xor_sync(0xffffffff, x[i], 1)
        else:
            cuda.syncthreads()

    with pytest.raises(BarrierError, match="divergent code"):
        emulator.launch(broken, 1, 32, np.zeros(32, np.int32))


def test_a_deadlock_lists_who_waits_where():
    text = ptx("setp.lt.u32 %p1, %r1, 32; @%p1 bar.sync 1, 64; @!%p1 bar.sync 2, 64;")
    with pytest.raises(DeadlockError) as caught:
        run(text, 64)
    message = str(caught.value)
    assert message.count("32 threads waiting at a barrier") == 2
    assert "bar.sync 1, 64" in message and "bar.sync 2, 64" in message


def test_an_mbarrier_that_never_completes_is_a_deadlock():
    text = ptx("""
    setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared.b64 [gate], {0};
    bar.sync 0;
    mbarrier.arrive.shared.b64 %rd2, [gate];
    WAIT: mbarrier.try_wait.shared.b64 %p2, [gate], %rd2;
    @!%p2 bra WAIT;""", shared=".shared .align 8 .b64 gate;")
    with pytest.raises(DeadlockError, match="32 threads waiting at an mbarrier"):
        run(text.replace("{0}", "33"))
    run(text.replace("{0}", "32"))
    with pytest.raises(BarrierError, match="32 arrivals, but this phase expects only 31"):
        run(text.replace("{0}", "31"))


def test_a_state_that_is_two_phases_old_is_an_error():
    text = ptx("""
    setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared.b64 [gate], 1;
    bar.sync 0;
    @%p1 mbarrier.arrive.shared.b64 %rd2, [gate];
    {again}
    @%p1 mbarrier.test_wait.shared.b64 %p2, [gate], %rd2;""", shared=".shared .align 8 .b64 gate;")
    run(text.replace("{again}", ""))
    with pytest.raises(BarrierError, match="the state of phase 0 tells nothing any more: .* in phase 2"):
        run(text.replace("{again}", "@%p1 mbarrier.arrive.shared.b64 %rd3, [gate];"))


EXCHANGE = ptx("""
    setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared.b64 [gate], 64;
    bar.sync 0;
    mov.u32 %r3, buffer; shl.b32 %r4, %r1, 2; add.u32 %r5, %r3, %r4;
    st.shared.u32 [%r5], %r1;
    mbarrier.arrive.shared.b64 %rd2, [gate];
    WAIT: mbarrier.try_wait.shared.b64 %p2, [gate], %rd2;
    @!%p2 bra WAIT;
    xor.b32 %r6, %r4, 128; add.u32 %r6, %r6, %r3; ld.shared.u32 %r7, [%r6];
    cvt.u64.u32 %rd3, %r4; add.u64 %rd4, %rd1, %rd3; st.global.u32 [%rd4], %r7;""",
               shared=".shared .align 8 .b64 gate; .shared .align 4 .b32 buffer[64];")


def test_an_mbarrier_orders_what_came_before_the_arrival():
    assert (run(EXCHANGE, 64) == np.arange(64) ^ 32).all()
    with pytest.raises(RaceError):
        run(EXCHANGE.replace("WAIT: mbarrier.try_wait.shared.b64 %p2, [gate], %rd2;",
                             "").replace("@!%p2 bra WAIT;", ""), 64)


@pytest.mark.parametrize("relaxed", ["arrive", "try_wait"])
def test_an_mbarrier_orders_nothing_if_one_side_is_relaxed(relaxed):
    text = EXCHANGE.replace(f"mbarrier.{relaxed}.", f"mbarrier.{relaxed}.relaxed.cta.")
    with pytest.raises(RaceError):
        run(text, 64)


COPY = ptx("""
    mov.u32 %r3, buffer; shl.b32 %r4, %r1, 2; add.u32 %r5, %r3, %r4; cvt.u64.u32 %rd2, %r4; add.u64 %rd3,
    %rd1, %rd2; cp.async.ca.shared.global [%r5], [%rd3], 4;
    cp.async.commit_group;
    {wait}
    ld.shared.u32 %r6, [%r5]; add.u32 %r6, %r6, 1; st.global.u32 [%rd3], %r6;""",
           shared=".shared .align 16 .b32 buffer[32];").replace("[out]", "[out]")


def test_asynchronous_copies_must_be_waited_for():
    for wait in ("cp.async.wait_group 0;", "cp.async.wait_all;"):
        assert (run(COPY.replace("{wait}", wait), size=32) == 1).all()
    for wait in ("", "cp.async.wait_group 1;"):
        with pytest.raises(UninitializedRead, match="asynchronous copy has not delivered"):
            run(COPY.replace("{wait}", wait), size=32)
    assert (run(COPY.replace("{wait}", ""), size=32, copies="early") == 1).all()


def test_a_wait_covers_only_the_thread_that_waits():
    body = COPY.replace("ld.shared.u32 %r6, [%r5];", "xor.b32 %r7, %r5, 64; {sync} ld.shared.u32 %r6, [%r7];")
    body = body.replace("{wait}", "cp.async.wait_all;").replace("buffer[32]", "buffer[64]")
    with pytest.raises(RaceError, match="written by thread"):
        run(body.replace("{sync}", ""), size=32)
    run(body.replace("{sync}", "bar.sync 0;"), size=32)


def test_a_trap_is_an_error():
    with pytest.raises(TrapError, match="(?s)trap executed.*thread \\(5, 0, 0\\)"):
        run(ptx("setp.eq.u32 %p1, %r1, 5; @%p1 trap;"))


def test_an_unknown_instruction_is_named():
    with pytest.raises(UnknownInstruction, match="(?s)frobnicate.u32.*PTX line"):
        run(ptx("frobnicate.u32 %r2, %r1;"))
    with pytest.raises(UnknownInstruction, match="add.u7"):
        run(ptx("add.u7 %r2, %r1, 1;"))


def test_no_checks_means_no_errors():
    out = run(ptx("ld.shared.u32 %r2, [buffer]; st.global.u32 [%rd1], %r2;",
                  shared=".shared .align 4 .b32 buffer[8];"), 64, checks=False)
    assert out[0] == 0


@pytest.mark.parametrize("options, error", [
    (dict(checks=3), TypeError), (dict(copies="soon"), ValueError), (dict(shared_bytes=-1), ValueError),
    (dict(entry="other"), ValueError), (dict(names=("a", "b")), ValueError)])
def test_wrong_options_are_named(options, error):
    with pytest.raises(error, match=next(iter(options))):
        run(ptx(""), **options)


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_the_same_result_and_finds_the_same_race(seed):
    x = np.zeros(64, np.int32)
    emulator.launch(exchange(True), 1, 64, x, seed=seed)
    assert (x == 63 - np.arange(64)).all()
    with pytest.raises((RaceError, UninitializedRead)):
        emulator.launch(exchange(False), 1, 64, x, seed=seed)


def test_faults_are_found_with_32_bit_shared_addresses_too():
    @cuda.jit
    def far(x):
        buffer = cuda.shared.array(32, uint32)
        buffer[uint32(cuda.threadIdx.x) + uint32(x[0])] = 1

    emulator.launch(far, 1, 32, np.zeros(1, np.uint32))
    with pytest.raises(MemoryFault, match="shared"):
        emulator.launch(far, 1, 32, np.full(1, 1, np.uint32))


def test_a_barrier_that_whole_warps_skip_is_found():
    @cuda.jit
    def first_warp(x):
        i = cuda.threadIdx.x
        if i < 32:
            x[i] = 1
            cuda.syncthreads()
            x[i] = 2

    with pytest.raises(BarrierError, match="divergent code: .*thread \\(32, 0, 0\\) has exited without it"):
        emulator.launch(first_warp, 1, 64, np.zeros(64, np.int32))
    emulator.launch(first_warp, 1, 32, np.zeros(64, np.int32))


def test_a_barrier_in_a_loop_of_unequal_length_is_found():
    @cuda.jit
    def loop(x):
        i = cuda.threadIdx.x
        for _ in range(i // 32 + 1):
            x[i] += 1
            cuda.syncthreads()

    with pytest.raises(BarrierError, match="has exited without it"):
        emulator.launch(loop, 1, 64, np.zeros(64, np.int32))


ARRIVING_COPY = ptx("""
    setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared.b64 [gate], 32;
    bar.sync 0;
    mov.u32 %r3, buffer; shl.b32 %r4, %r1, 2; add.u32 %r5, %r3, %r4; cvt.u64.u32 %rd2, %r4;
    add.u64 %rd3, %rd1, %rd2; cp.async.ca.shared.global [%r5], [%rd3], 4;
    cp.async.mbarrier.arrive.noinc.shared.b64 [gate];
    {wait}
    ld.shared.u32 %r6, [%r5]; add.u32 %r6, %r6, 1; st.global.u32 [%rd3], %r6;""",
                    shared=".shared .align 8 .b64 gate; .shared .align 16 .b32 buffer[32];")
WAIT_FOR_COPIES = "WAIT: mbarrier.test_wait.parity.shared.b64 %p2, [gate], 0; @!%p2 bra WAIT;"


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("copies", ["late", "early"])
def test_copies_that_arrive_at_an_mbarrier_are_complete_behind_its_wait(copies, seed):
    text = ARRIVING_COPY.replace("{wait}", WAIT_FOR_COPIES)
    assert (run(text, size=32, copies=copies, seed=seed) == 1).all()


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_lanes_of_one_copy_may_arrive_one_after_the_other(seed):
    arrive = "cp.async.mbarrier.arrive.noinc.shared.b64 [gate];"
    text = ARRIVING_COPY.replace("{wait}", WAIT_FOR_COPIES).replace(
        arrive, f"setp.lt.u32 %p3, %r1, 16; @%p3 {arrive} @!%p3 {arrive}")
    assert (run(text, size=32, seed=seed) == 1).all()


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("instead", ["", "bar.sync 0;", "bar.warp.sync -1;", "nanosleep.u32 100;",
                                     "mbarrier.test_wait.parity.shared.b64 %p2, [gate], 1;"])
def test_copies_that_arrive_at_an_mbarrier_may_do_so_as_late_as_its_wait(instead, seed):
    with pytest.raises(UninitializedRead, match="an asynchronous copy has not delivered it"):
        run(ARRIVING_COPY.replace("{wait}", instead), size=32, seed=seed)


def test_what_a_thread_does_after_its_copies_arrive_is_not_ordered_by_them():
    """A wait for copies does not make up for the arrival of the thread itself."""
    text = ARRIVING_COPY.replace("{wait}", "st.shared.u32 [%r5 + 128], 7;" + WAIT_FOR_COPIES).replace(
        "buffer[32]", "buffer[96]").replace("ld.shared.u32 %r6, [%r5]", "xor.b32 %r5, %r4, 128; "
                                            "add.u32 %r5, %r5, %r3; ld.shared.u32 %r6, [%r5 + 128]").replace(
        "gate], 32", "gate], 64")
    with pytest.raises(RaceError):
        run(text, 64, size=96)
