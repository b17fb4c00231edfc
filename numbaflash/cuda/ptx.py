"""Every PTX instruction our CUDA kernels use, as functions that a kernel calls.

This is the only file with inline assembly: nothing else in the package knows a mnemonic.  An instruction
is one row::

    ldmatrix_x4 = op(LDMATRIX, "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {d}, [{address}];",
                     WARP, arch="sm_75", d=Written("r", 4), address=SHARED)

The text is PTX with the operands by name; literal braces are doubled.  An operand is a scalar (`B32`, `F32`,
`SHARED`, ...), an `IMMEDIATE`, or a fragment: consecutive registers of a `cuda.local.array`.  A fragment
takes two arguments, array and index i, and means elements ``[size * i, size * (i + 1))``, so kernels hold
no tuples of registers::

    ptx.ldmatrix_x4(a, 0, address)                  # a[0:4]
    ptx.mma_m16n8k16_bf16(acc, j, a, 0, b, j)       # acc[4j:4j+4] += a[0:4] @ b[2j:2j+2]

Integers are signed (`int32`, shared addresses too; `int64` for global addresses): Numba makes
uint32 + uint32 a uint64 and uint64 + int64 a float64, while signed arithmetic stays integer and is truncated
at the call.  A uint64 pointer parameter is taken through ``int64(pointer)`` once.  Only bit patterns (packed
16-bit pairs) are `uint32`.

Everything inlines, and compiles without a GPU.  `INSTRUCTIONS` maps names to rows, for tests.  The sections
named are those of NVIDIA's "Parallel Thread Execution ISA", by title: its numbers change with the version.
"""
from llvmlite import ir
from numba import cuda, types
from numba.core.typing import signature
from numba.cuda.extending import intrinsic

from numbaflash.cuda.assembly import (
    B16, B32, F32, F64, GLOBAL, IMMEDIATE, MEMORY, PLACED, PREDICATE, PTX_TYPE, PURE, S32, S64, SHARED,
    WARP, WARP_PURE, Instruction, Read, Updated, Written, name_rows, op,
)

# --- plain memory ---------------------------------------------------------------------------------

LD = "Data Movement and Conversion Instructions: ld"
LD_NC = "Data Movement and Conversion Instructions: ld.global.nc"
ST = "Data Movement and Conversion Instructions: st"


def _load(section, space, kind, width=1):
    """``d = ld(address)``, or ``ld(array, i, address)`` for `width` aligned registers at once."""
    effect = PLACED if space == "global.nc" else MEMORY
    address = SHARED if space == "shared" else GLOBAL
    ptx_type = PTX_TYPE[kind.letter]
    if width == 1:
        return op(section, f"ld.{space}.{ptx_type} {{d}}, [{{address}}];", effect, kind, address=address)
    return op(section, f"ld.{space}.v{width}.{ptx_type} {{d}}, [{{address}}];", effect,
              d=Written(kind.letter, width), address=address)


def _store(space, kind, width=1):
    """``st(address, value)``, or ``st(address, array, i)`` for `width` registers at once."""
    address = SHARED if space == "shared" else GLOBAL
    vector = "" if width == 1 else f".v{width}"
    return op(ST, f"st.{space}{vector}.{PTX_TYPE[kind.letter]} [{{address}}], {{value}};",
              address=address, value=kind if width == 1 else Read(kind.letter, width))


ld_global_b16, ld_global_b32 = _load(LD, "global", B16), _load(LD, "global", B32)
ld_global_f32, ld_global_f64 = _load(LD, "global", F32), _load(LD, "global", F64)
ld_global_v2_b32, ld_global_v4_b32 = _load(LD, "global", B32, 2), _load(LD, "global", B32, 4)
ld_global_v2_f32, ld_global_v4_f32 = _load(LD, "global", F32, 2), _load(LD, "global", F32, 4)
ld_global_v2_f64 = _load(LD, "global", F64, 2)

ld_global_nc_b16, ld_global_nc_b32 = _load(LD_NC, "global.nc", B16), _load(LD_NC, "global.nc", B32)
ld_global_nc_f32, ld_global_nc_f64 = _load(LD_NC, "global.nc", F32), _load(LD_NC, "global.nc", F64)
ld_global_nc_v2_b32 = _load(LD_NC, "global.nc", B32, 2)
ld_global_nc_v4_b32 = _load(LD_NC, "global.nc", B32, 4)
ld_global_nc_v2_f32 = _load(LD_NC, "global.nc", F32, 2)
ld_global_nc_v4_f32 = _load(LD_NC, "global.nc", F32, 4)
ld_global_nc_v2_f64 = _load(LD_NC, "global.nc", F64, 2)
ld_global_nc_s32, ld_global_nc_s64 = _load(LD_NC, "global.nc", S32), _load(LD_NC, "global.nc", S64)
ld_global_nc_u8 = op(LD_NC, "ld.global.nc.u8 {d}, [{address}];", PLACED, S32, address=GLOBAL)

st_global_b16, st_global_b32 = _store("global", B16), _store("global", B32)
st_global_f32, st_global_f64 = _store("global", F32), _store("global", F64)
st_global_v2_b32, st_global_v4_b32 = _store("global", B32, 2), _store("global", B32, 4)
st_global_v2_f32, st_global_v4_f32 = _store("global", F32, 2), _store("global", F32, 4)
st_global_v2_f64 = _store("global", F64, 2)

ld_shared_b16, ld_shared_b32 = _load(LD, "shared", B16), _load(LD, "shared", B32)
ld_shared_f32, ld_shared_f64 = _load(LD, "shared", F32), _load(LD, "shared", F64)
ld_shared_v2_b32, ld_shared_v4_b32 = _load(LD, "shared", B32, 2), _load(LD, "shared", B32, 4)
ld_shared_v2_f32, ld_shared_v4_f32 = _load(LD, "shared", F32, 2), _load(LD, "shared", F32, 4)
ld_shared_v2_f64 = _load(LD, "shared", F64, 2)

st_shared_b16, st_shared_b32 = _store("shared", B16), _store("shared", B32)
st_shared_f32, st_shared_f64 = _store("shared", F32), _store("shared", F64)
st_shared_v2_b32, st_shared_v4_b32 = _store("shared", B32, 2), _store("shared", B32, 4)
st_shared_v2_f32, st_shared_v4_f32 = _store("shared", F32, 2), _store("shared", F32, 4)
st_shared_v2_f64 = _store("shared", F64, 2)


@intrinsic
def global_address(context, array):
    """Address of the first element of an array in global memory, an int64.

    PTX ISA: State Spaces, Types, and Variables: Global State Space.
    """
    def codegen(context, builder, sig, values):
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        return builder.ptrtoint(data, ir.IntType(64))
    return signature(types.int64, array), codegen


@intrinsic
def shared_address(context, array):
    """Address of a `cuda.shared.array` inside the shared window, an int32.

    PTX ISA: State Spaces, Types, and Variables: Shared State Space.
    """
    def codegen(context, builder, sig, values):
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        if data.type.addrspace != 3:
            data = builder.addrspacecast(data, ir.IntType(8).as_pointer(3))
        return builder.ptrtoint(data, ir.IntType(32))
    return signature(types.int32, array), codegen


@cuda.jit(device=True, inline="always")
def dynamic_shared_address():
    """Address of the dynamic shared memory of the launch, an int32 and a multiple of 1024.

    PTX ISA: State Spaces, Types, and Variables: Shared State Space.
    """
    return shared_address(cuda.shared.array(0, types.uint8, alignment=1024))


# --- asynchronous copies from global to shared memory ---------------------------------------------

CP_ASYNC = "Data Movement and Conversion Instructions: cp.async"
CP_ASYNC_COMMIT = "Data Movement and Conversion Instructions: cp.async.commit_group"
CP_ASYNC_WAIT = "Data Movement and Conversion Instructions: cp.async.wait_group / cp.async.wait_all"


def _copy(cache, size, zfill=False):
    text = f"cp.async.{cache}.shared.global [{{destination}}], [{{source}}], {size}"
    if zfill:
        return op(CP_ASYNC, text + ", {bytes};", arch="sm_80", destination=SHARED, source=GLOBAL, bytes=S32,
                  doc="Copies the first `bytes` bytes and writes zeros behind them.")
    return op(CP_ASYNC, text + ";", arch="sm_80", destination=SHARED, source=GLOBAL)


cp_async_4, cp_async_8, cp_async_16 = _copy("ca", 4), _copy("ca", 8), _copy("cg", 16)
cp_async_4_zfill, cp_async_8_zfill = _copy("ca", 4, zfill=True), _copy("ca", 8, zfill=True)
cp_async_16_zfill = _copy("cg", 16, zfill=True)
cp_async_commit_group = op(CP_ASYNC_COMMIT, "cp.async.commit_group;", arch="sm_80")
cp_async_wait_group = op(CP_ASYNC_WAIT, "cp.async.wait_group {pending};", arch="sm_80", pending=IMMEDIATE,
                         doc="Until at most `pending` of this thread's newest groups are under way.")
cp_async_wait_all = op(CP_ASYNC_WAIT, "cp.async.wait_all;", arch="sm_80")
cp_async_mbarrier_arrive_noinc = op(
    "Parallel Synchronization and Communication Instructions: cp.async.mbarrier.arrive",
    "cp.async.mbarrier.arrive.noinc.shared.b64 [{barrier}];", arch="sm_80", barrier=SHARED,
    doc="Arrives when all earlier cp.async of this thread are complete.")

# --- matrix loads, stores and products ------------------------------------------------------------

LDMATRIX = "Warp-level matrix load instruction: ldmatrix"
STMATRIX = "Warp-level matrix store instruction: stmatrix"
MMA = "Multiply-and-Accumulate Instruction: mma"


def _ldmatrix(count, trans=""):
    return op(LDMATRIX, f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{d}}, [{{address}}];", WARP,
              doc="Lane 8 m + r names row r of the 8x8 matrix m; matrix m arrives in register m.",
              d=Written("r", count), address=SHARED)


def _stmatrix(count, trans=""):
    return op(STMATRIX, f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [{{address}}], {{value}};",
              WARP, arch="sm_90", address=SHARED, value=Read("r", count),
              doc="Lane 8 m + r names row r of the 8x8 matrix m, which leaves from register m.")


ldmatrix_x1, ldmatrix_x2, ldmatrix_x4 = _ldmatrix(1), _ldmatrix(2), _ldmatrix(4)
ldmatrix_x1_trans, ldmatrix_x2_trans = _ldmatrix(1, ".trans"), _ldmatrix(2, ".trans")
ldmatrix_x4_trans = _ldmatrix(4, ".trans")
stmatrix_x1, stmatrix_x2, stmatrix_x4 = _stmatrix(1), _stmatrix(2), _stmatrix(4)
stmatrix_x1_trans, stmatrix_x2_trans = _stmatrix(1, ".trans"), _stmatrix(2, ".trans")
stmatrix_x4_trans = _stmatrix(4, ".trans")


def _mma(shape, element, a, b, arch, accumulator="f32"):
    """``acc[fragment acc_index] += a[fragment a_index] @ b[fragment b_index]``; sizes in 32-bit registers."""
    letter, operand, size = ("f", "r", 4) if accumulator == "f32" else ("d", "d", 2)
    return op(MMA, f"mma.sync.aligned.{shape}.row.col.{accumulator}.{element}.{element}.{accumulator} "
              "{acc}, {a}, {b}, {acc_in};", WARP_PURE, arch=arch,
              acc=Updated(letter, size), a=Read(operand, a), b=Read(operand, b))


mma_m16n8k8_f16 = _mma("m16n8k8", "f16", 2, 1, "sm_75")
mma_m16n8k16_f16 = _mma("m16n8k16", "f16", 4, 2, "sm_80")
mma_m16n8k16_bf16 = _mma("m16n8k16", "bf16", 4, 2, "sm_80")
mma_m16n8k8_tf32 = _mma("m16n8k8", "tf32", 4, 2, "sm_80")
mma_m8n8k4_f64 = _mma("m8n8k4", "f64", 1, 1, "sm_80", "f64")

# wgmma and the bulk tensor copies (TMA) belong here.

# --- barriers and warps ---------------------------------------------------------------------------

BAR = "Parallel Synchronization and Communication Instructions: bar, barrier"
SHFL = "Data Movement and Conversion Instructions: shfl.sync"
VOTE = "Parallel Synchronization and Communication Instructions: vote.sync"

bar_sync = op(BAR, "bar.sync {barrier}, {threads};", WARP, barrier=S32, threads=S32,
              doc="Waits for `threads` threads (whole warps) at barrier 0..15.")
bar_arrive = op(BAR, "bar.arrive {barrier}, {threads};", WARP, barrier=S32, threads=S32,
                doc="Counts this warp in without waiting.")
bar_warp_sync = op("Parallel Synchronization and Communication Instructions: bar.warp.sync",
                   "bar.warp.sync {mask};", WARP, mask=B32)


def _shuffle(mode, kind, clamp):
    return op(SHFL, f"shfl.sync.{mode}.b32 {{d}}, {{value}}, {{lane}}, {clamp}, -1;", WARP_PURE, kind,
              value=kind, lane=S32, doc="All 32 lanes take part.")


shfl_bfly_b32, shfl_bfly_f32 = _shuffle("bfly", B32, 31), _shuffle("bfly", F32, 31)
shfl_idx_b32, shfl_idx_f32 = _shuffle("idx", B32, 31), _shuffle("idx", F32, 31)
shfl_up_b32, shfl_up_f32 = _shuffle("up", B32, 0), _shuffle("up", F32, 0)
shfl_down_b32, shfl_down_f32 = _shuffle("down", B32, 31), _shuffle("down", F32, 31)


def _vote(mode):
    return op(VOTE, f"{{{{ .reg .pred p; setp.ne.b32 p, {{predicate}}, 0; vote.sync.{mode}.pred p, p, -1; "
              "selp.b32 {d}, 1, 0, p; }}", WARP_PURE, PREDICATE, predicate=PREDICATE)


vote_all, vote_any, vote_uni = _vote("all"), _vote("any"), _vote("uni")
vote_ballot = op(VOTE, "{{ .reg .pred p; setp.ne.b32 p, {predicate}, 0; vote.sync.ballot.b32 {d}, p, -1; }}",
                 WARP_PURE, B32, predicate=PREDICATE)

# --- arithmetic -----------------------------------------------------------------------------------

FLOAT = "Floating Point Instructions"


def _unary(name):
    return op(f"{FLOAT}: {name.partition('.')[0]}", f"{name}.f32 {{d}}, {{x}};", PURE, F32, x=F32)


def _binary(name, kind, arch="sm_75"):
    text = f"{name}.{PTX_TYPE[kind.letter]} {{d}}, {{x}}, {{y}};"
    return op(f"{FLOAT}: {name.partition('.')[0]}", text, PURE, kind, arch, x=kind, y=kind)


def _fma(kind):
    return op(f"{FLOAT}: fma", f"fma.rn.{PTX_TYPE[kind.letter]} {{d}}, {{x}}, {{y}}, {{z}};", PURE, kind,
              x=kind, y=kind, z=kind)


ex2_approx, ex2_approx_ftz = _unary("ex2.approx"), _unary("ex2.approx.ftz")
lg2_approx, lg2_approx_ftz = _unary("lg2.approx"), _unary("lg2.approx.ftz")
rcp_approx, rcp_approx_ftz = _unary("rcp.approx"), _unary("rcp.approx.ftz")
tanh_approx = _unary("tanh.approx")
max_f32, min_f32 = _binary("max", F32), _binary("min", F32)
max_f64, min_f64 = _binary("max", F64), _binary("min", F64)
max_nan_f32, min_nan_f32 = _binary("max.NaN", F32, "sm_80"), _binary("min.NaN", F32, "sm_80")
fma_f32, fma_f64 = _fma(F32), _fma(F64)

# --- conversions ----------------------------------------------------------------------------------

CVT = "Data Movement and Conversion Instructions: cvt"


def _pair(element):
    """Two float32 to one register: the first argument in the low half."""
    return op(CVT, f"cvt.rn.{element}x2.f32 {{d}}, {{high}}, {{low}};", PURE, B32, "sm_80", low=F32, high=F32)


def _half(element, which):
    """float32 of the low or high half of a register."""
    return op(CVT, "{{ .reg .b16 low, high; mov.b32 {{low, high}}, {bits}; "
              f"cvt.f32.{element} {{d}}, {which}; }}}}", PURE, F32, bits=B32)


cvt_f16x2, cvt_bf16x2 = _pair("f16"), _pair("bf16")
cvt_f16 = op(CVT, "cvt.rn.f16.f32 {d}, {x};", PURE, B16, x=F32)
cvt_bf16 = op(CVT, "cvt.rn.bf16.f32 {d}, {x};", PURE, B16, "sm_80", x=F32)
f16_to_f32 = op(CVT, "cvt.f32.f16 {d}, {bits};", PURE, F32, bits=B16)
f16_low, f16_high = _half("f16", "low"), _half("f16", "high")
bf16_low = op("Logic and Shift Instructions: shl", "shl.b32 {d}, {bits}, 16;", PURE, F32, bits=B32,
              doc="bfloat16 is the upper half of a float32.")
bf16_high = op("Logic and Shift Instructions: and", "and.b32 {d}, {bits}, 0xffff0000;", PURE, F32, bits=B32)
cvt_rna_tf32 = op(CVT, "cvt.rna.tf32.f32 {d}, {x};", PURE, B32, "sm_80", x=F32)
float_bits = op("Data Movement and Conversion Instructions: mov", "mov.b32 {d}, {x};", PURE, B32, x=F32)
bits_float = op("Data Movement and Conversion Instructions: mov", "mov.b32 {d}, {bits};", PURE, F32, bits=B32)

# --- bits -----------------------------------------------------------------------------------------

prmt = op("Data Movement and Conversion Instructions: prmt", "prmt.b32 {d}, {x}, {y}, {selector};", PURE, B32,
          x=B32, y=B32, selector=B32, doc="Byte i of the result is byte (selector >> 4 i) & 7 of y:x.")
lop3 = op("Logic and Shift Instructions: lop3", "lop3.b32 {d}, {x}, {y}, {z}, {table};", PURE, B32,
          x=B32, y=B32, z=B32, table=IMMEDIATE, doc="`table` is the function of x=0xF0, y=0xCC, z=0xAA.")

# --- atomics --------------------------------------------------------------------------------------

RED = "Parallel Synchronization and Communication Instructions: red"
ATOM = "Parallel Synchronization and Communication Instructions: atom"


def _red(space, kind, width=1, arch="sm_75"):
    vector = "" if width == 1 else f".v{width}"
    address = SHARED if space == "shared" else GLOBAL
    return op(RED, f"red.{space}.add{vector}.{PTX_TYPE[kind.letter]} [{{address}}], {{value}};", arch=arch,
              address=address, value=kind if width == 1 else Read(kind.letter, width))


def _atom(operation, ptx_type, kind):
    return op(ATOM, f"atom.global.{operation}.{ptx_type} {{d}}, [{{address}}], {{value}};", MEMORY, kind,
              address=GLOBAL, value=kind, doc="Returns the value before.")


red_global_add_f32, red_global_add_f64 = _red("global", F32), _red("global", F64)
red_global_add_v2_f32 = _red("global", F32, 2, "sm_90")
red_global_add_v4_f32 = _red("global", F32, 4, "sm_90")
red_shared_add_f32 = _red("shared", F32)
atom_global_add_f32, atom_global_add_f64 = _atom("add", "f32", F32), _atom("add", "f64", F64)
atom_global_add_s32 = _atom("add", "s32", S32)
atom_global_add_acq_rel_s32 = op(
    ATOM, "atom.acq_rel.gpu.global.add.s32 {d}, [{address}], {value};", MEMORY, S32,
    address=GLOBAL, value=S32, doc="Returns the value before; orders the accesses around it.")

# --- mbarriers and fences -------------------------------------------------------------------------

SYNC = "Parallel Synchronization and Communication Instructions"
MBARRIER = f"{SYNC}: mbarrier"
FENCE = f"{SYNC}: membar / fence"
MBARRIER_WAIT = f"{SYNC}: mbarrier.test_wait / mbarrier.try_wait"

mbarrier_init = op(f"{MBARRIER}.init", "mbarrier.init.shared.b64 [{barrier}], {arrivals};", arch="sm_80",
                   barrier=SHARED, arrivals=S32)
mbarrier_inval = op(f"{MBARRIER}.inval", "mbarrier.inval.shared.b64 [{barrier}];", arch="sm_80",
                    barrier=SHARED)
mbarrier_arrive = op(f"{MBARRIER}.arrive", "mbarrier.arrive.shared.b64 _, [{barrier}];", arch="sm_80",
                     barrier=SHARED)
mbarrier_arrive_expect_tx = op(
    f"{MBARRIER}.arrive", "mbarrier.arrive.expect_tx.shared.b64 _, [{barrier}], {bytes};", arch="sm_90",
    barrier=SHARED, bytes=S32)


def _mbarrier_test(instruction, arch):
    text = f"{{{{ .reg .pred p; {instruction} p, [{{barrier}}], {{parity}}; selp.b32 {{d}}, 1, 0, p; }}}}"
    return op(MBARRIER_WAIT, text, MEMORY, PREDICATE, arch, barrier=SHARED, parity=S32,
              doc="True once the phase of the given parity is complete.")


def _mbarrier_wait(instruction, arch):
    text = f"{{{{ .reg .pred p; WAIT: {instruction} p, [{{barrier}}], {{parity}}; @!p bra WAIT; }}}}"
    return op(MBARRIER_WAIT, text, arch=arch, barrier=SHARED, parity=S32,
              doc="Returns when the phase of the given parity is complete.")


mbarrier_test_wait_parity = _mbarrier_test("mbarrier.test_wait.parity.shared.b64", "sm_80")
mbarrier_try_wait_parity = _mbarrier_test("mbarrier.try_wait.parity.shared.b64", "sm_90")
mbarrier_spin_parity = _mbarrier_wait("mbarrier.test_wait.parity.shared.b64", "sm_80")
mbarrier_wait_parity = _mbarrier_wait("mbarrier.try_wait.parity.shared.b64", "sm_90")

fence_acq_rel_cta = op(FENCE, "fence.acq_rel.cta;")
fence_acq_rel_gpu = op(FENCE, "fence.acq_rel.gpu;")
fence_proxy_async = op(FENCE, "fence.proxy.async;", arch="sm_90")
fence_proxy_async_shared = op(FENCE, "fence.proxy.async.shared::cta;", arch="sm_90")
fence_mbarrier_init = op(FENCE, "fence.mbarrier_init.release.cluster;", arch="sm_90")
fence_proxy_tensormap_acquire = op(FENCE, "fence.proxy.tensormap::generic.acquire.gpu [{map}], 128;",
                                   arch="sm_90", map=GLOBAL)

# --- registers, launches and special registers ----------------------------------------------------

SETMAXNREG = "Miscellaneous Instructions: setmaxnreg"
GRIDDEPCONTROL = f"{SYNC}: griddepcontrol"

setmaxnreg_inc = op(SETMAXNREG, "setmaxnreg.inc.sync.aligned.u32 {registers};", WARP, arch="sm_90a",
                    registers=IMMEDIATE, doc="Needs launch bounds, else ptxas ignores it.")
setmaxnreg_dec = op(SETMAXNREG, "setmaxnreg.dec.sync.aligned.u32 {registers};", WARP, arch="sm_90a",
                    registers=IMMEDIATE, doc="Needs launch bounds, else ptxas ignores it.")
griddepcontrol_wait = op(GRIDDEPCONTROL, "griddepcontrol.wait;", arch="sm_90")
griddepcontrol_launch_dependents = op(GRIDDEPCONTROL, "griddepcontrol.launch_dependents;", arch="sm_90")

thread_index = op("Special Registers: %tid", "mov.u32 {d}, %tid.x;", PLACED, S32,
                  doc="Read again at each call: what derives from it occupies no register through a loop.")


def _anew(kind):
    return op("Data Movement and Conversion Instructions: mov", f"mov.{PTX_TYPE[kind.letter]} {{d}}, {{x}};", PLACED,
              kind, x=kind, doc="The same value, unknown to LLVM: nothing that derives from it leaves a loop.")


anew_s32, anew_s64 = _anew(S32), _anew(S64)
block_index = op("Special Registers: %ctaid", "mov.u32 {d}, %ctaid.x;", PLACED, S32,
                 doc="Read again at each call, as thread_index.")
lane_id = op("Special Registers: %laneid", "mov.u32 {d}, %laneid;", PURE, S32)
warp_id = op("Special Registers: %warpid", "mov.u32 {d}, %warpid;", PLACED, S32,
             doc="Where the warp runs, and it may move; its number in the block is thread_index() >> 5.")

INSTRUCTIONS: dict[str, Instruction] = name_rows(globals())
