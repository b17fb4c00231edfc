"""Every instruction of the table compiles to the mnemonic it stands for, where it is said to exist."""
import functools
import re

import pytest
from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda, float32, float64, types, uint32

from numbaflash.cuda import compile, ptx
from numbaflash.cuda.assembly import FRAGMENTS, OUTPUTS

SIGNATURE = (types.int64, types.int32, types.int32, types.uint32[::1], types.float32[::1], types.float64[::1])
ORDER = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120a"]
CASES = {}


def case(name, mnemonic, body):
    """body(g, s, i, u, f, d): a global and a shared address, an int32, arrays of uint32, float32, float64."""
    CASES[name] = (mnemonic, body)


def device(function):
    return cuda.jit(device=True, inline="always")(function)


ELEMENT = {"b": lambda u, f, d: u[1], "f32": lambda u, f, d: f[1], "f64": lambda u, f, d: d[1]}
ARRAY = {"b": lambda u, f, d: u, "f32": lambda u, f, d: f, "f64": lambda u, f, d: d}


def scalar_load(function, shared):
    if shared:
        return lambda g, s, i, u, f, d: function(s)
    return lambda g, s, i, u, f, d: function(g)


def scalar_store(function, shared, letter):
    choose = device(ELEMENT[letter])
    if shared:
        return lambda g, s, i, u, f, d: function(s, choose(u, f, d))
    return lambda g, s, i, u, f, d: function(g, choose(u, f, d))


def vector_load(function, shared, letter):
    choose = device(ARRAY[letter])
    if shared:
        return lambda g, s, i, u, f, d: function(choose(u, f, d), 1, s)
    return lambda g, s, i, u, f, d: function(choose(u, f, d), 1, g)


def vector_store(function, shared, letter):
    choose = device(ARRAY[letter])
    if shared:
        return lambda g, s, i, u, f, d: function(s, choose(u, f, d), 1)
    return lambda g, s, i, u, f, d: function(g, choose(u, f, d), 1)


WIDTHS = {"b16": (1,), "b32": (1, 2, 4), "f32": (1, 2, 4), "f64": (1, 2)}
for space in ("global", "global_nc", "shared"):
    for element, widths in WIDTHS.items():
        letter = element if element[0] == "f" else "b"
        for width in widths:
            suffix = element if width == 1 else f"v{width}_{element}"
            name, is_shared = f"ld_{space}_{suffix}", space == "shared"
            load = getattr(ptx, name)
            case(name, name.replace("_", "."), scalar_load(load, is_shared) if width == 1 else
                 vector_load(load, is_shared, letter))
            if space != "global_nc":
                name = f"st_{space}_{suffix}"
                store = getattr(ptx, name)
                case(name, name.replace("_", "."), scalar_store(store, is_shared, letter) if width == 1 else
                     vector_store(store, is_shared, letter))

case("ld_global_nc_s32", "ld.global.nc.b32", lambda g, s, i, u, f, d: ptx.ld_global_nc_s32(g))
case("ld_global_nc_s64", "ld.global.nc.b64", lambda g, s, i, u, f, d: ptx.ld_global_nc_s64(g))
case("ld_global_nc_u8", "ld.global.nc.u8", lambda g, s, i, u, f, d: ptx.ld_global_nc_u8(g))

case("cp_async_4", "cp.async.ca.shared.global", lambda g, s, i, u, f, d: ptx.cp_async_4(s, g))
case("cp_async_8", "cp.async.ca.shared.global", lambda g, s, i, u, f, d: ptx.cp_async_8(s, g))
case("cp_async_16", "cp.async.cg.shared.global", lambda g, s, i, u, f, d: ptx.cp_async_16(s, g))
case("cp_async_4_zfill", "cp.async.ca.shared.global", lambda g, s, i, u, f, d: ptx.cp_async_4_zfill(s, g, i))
case("cp_async_8_zfill", "cp.async.ca.shared.global", lambda g, s, i, u, f, d: ptx.cp_async_8_zfill(s, g, i))
case("cp_async_16_zfill", "cp.async.cg.shared.global",
     lambda g, s, i, u, f, d: ptx.cp_async_16_zfill(s, g, i))
case("cp_async_commit_group", "cp.async.commit_group", lambda g, s, i, u, f, d: ptx.cp_async_commit_group())
case("cp_async_wait_group", "cp.async.wait_group", lambda g, s, i, u, f, d: ptx.cp_async_wait_group(1))
case("cp_async_wait_all", "cp.async.wait_all", lambda g, s, i, u, f, d: ptx.cp_async_wait_all())
case("cp_async_mbarrier_arrive_noinc", "cp.async.mbarrier.arrive.noinc.shared.b64",
     lambda g, s, i, u, f, d: ptx.cp_async_mbarrier_arrive_noinc(s))

for count in (1, 2, 4):
    for trans in ("", "_trans"):
        shape = f"sync.aligned.m8n8.x{count}{trans.replace('_', '.')}.shared.b16"
        case(f"ldmatrix_x{count}{trans}", f"ldmatrix.{shape}",
             vector_load(getattr(ptx, f"ldmatrix_x{count}{trans}"), True, "b"))
        case(f"stmatrix_x{count}{trans}", f"stmatrix.{shape}",
             vector_store(getattr(ptx, f"stmatrix_x{count}{trans}"), True, "b"))

MMA = "mma.sync.aligned.{}.row.col.f32.{}.{}.f32"
case("mma_m16n8k8_f16", MMA.format("m16n8k8", "f16", "f16"),
     lambda g, s, i, u, f, d: ptx.mma_m16n8k8_f16(f, 0, u, 0, u, 2))
case("mma_m16n8k16_f16", MMA.format("m16n8k16", "f16", "f16"),
     lambda g, s, i, u, f, d: ptx.mma_m16n8k16_f16(f, 1, u, 0, u, 2))
case("mma_m16n8k16_bf16", MMA.format("m16n8k16", "bf16", "bf16"),
     lambda g, s, i, u, f, d: ptx.mma_m16n8k16_bf16(f, 1, u, 0, u, 2))
case("mma_m16n8k8_tf32", MMA.format("m16n8k8", "tf32", "tf32"),
     lambda g, s, i, u, f, d: ptx.mma_m16n8k8_tf32(f, 0, u, 0, f, 2))
case("mma_m8n8k4_f64", "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64",
     lambda g, s, i, u, f, d: ptx.mma_m8n8k4_f64(d, 0, d, 2, d, 3))

case("bar_sync", "bar.sync", lambda g, s, i, u, f, d: ptx.bar_sync(1, 64))
case("bar_arrive", "bar.arrive", lambda g, s, i, u, f, d: ptx.bar_arrive(1, 64))
case("bar_warp_sync", "bar.warp.sync", lambda g, s, i, u, f, d: ptx.bar_warp_sync(0xffffffff))
for mode in ("bfly", "idx", "up", "down"):
    for element in ("b32", "f32"):
        shuffle = getattr(ptx, f"shfl_{mode}_{element}")
        case(f"shfl_{mode}_{element}", f"shfl.sync.{mode}.b32",
             (lambda shuffle: lambda g, s, i, u, f, d: shuffle(f[2], 1))(shuffle))
case("vote_all", "vote.sync.all.pred", lambda g, s, i, u, f, d: ptx.vote_all(i > 3))
case("vote_any", "vote.sync.any.pred", lambda g, s, i, u, f, d: ptx.vote_any(i > 3))
case("vote_uni", "vote.sync.uni.pred", lambda g, s, i, u, f, d: ptx.vote_uni(i > 3))
case("vote_ballot", "vote.sync.ballot.b32", lambda g, s, i, u, f, d: ptx.vote_ballot(i > 3))

for name in ("ex2_approx", "ex2_approx_ftz", "lg2_approx", "lg2_approx_ftz", "rcp_approx", "rcp_approx_ftz",
             "tanh_approx"):
    case(name, name.replace("_", ".") + ".f32",
         (lambda unary: lambda g, s, i, u, f, d: unary(f[1]))(getattr(ptx, name)))
case("max_f32", "max.f32", lambda g, s, i, u, f, d: ptx.max_f32(f[0], f[1]))
case("min_f32", "min.f32", lambda g, s, i, u, f, d: ptx.min_f32(f[0], f[1]))
case("max_f64", "max.f64", lambda g, s, i, u, f, d: ptx.max_f64(d[0], d[1]))
case("min_f64", "min.f64", lambda g, s, i, u, f, d: ptx.min_f64(d[0], d[1]))
case("max_nan_f32", "max.NaN.f32", lambda g, s, i, u, f, d: ptx.max_nan_f32(f[0], f[1]))
case("min_nan_f32", "min.NaN.f32", lambda g, s, i, u, f, d: ptx.min_nan_f32(f[0], f[1]))
case("fma_f32", "fma.rn.f32", lambda g, s, i, u, f, d: ptx.fma_f32(f[0], f[1], f[2]))
case("fma_f64", "fma.rn.f64", lambda g, s, i, u, f, d: ptx.fma_f64(d[0], d[1], d[2]))

case("cvt_f16x2", "cvt.rn.f16x2.f32", lambda g, s, i, u, f, d: ptx.cvt_f16x2(f[0], f[1]))
case("cvt_bf16x2", "cvt.rn.bf16x2.f32", lambda g, s, i, u, f, d: ptx.cvt_bf16x2(f[0], f[1]))
case("cvt_f16", "cvt.rn.f16.f32", lambda g, s, i, u, f, d: ptx.cvt_f16(f[0]))
case("cvt_bf16", "cvt.rn.bf16.f32", lambda g, s, i, u, f, d: ptx.cvt_bf16(f[0]))
case("f16_to_f32", "cvt.f32.f16", lambda g, s, i, u, f, d: ptx.f16_to_f32(u[0]))
case("f16_low", "cvt.f32.f16", lambda g, s, i, u, f, d: ptx.f16_low(u[0]))
case("f16_high", "cvt.f32.f16", lambda g, s, i, u, f, d: ptx.f16_high(u[0]))
case("bf16_low", "shl.b32", lambda g, s, i, u, f, d: ptx.bf16_low(u[0]))
case("bf16_high", "and.b32", lambda g, s, i, u, f, d: ptx.bf16_high(u[0]))
case("cvt_rna_tf32", "cvt.rna.tf32.f32", lambda g, s, i, u, f, d: ptx.cvt_rna_tf32(f[0]))
case("float_bits", "mov.b32", lambda g, s, i, u, f, d: ptx.float_bits(f[0]))
case("bits_float", "mov.b32", lambda g, s, i, u, f, d: ptx.bits_float(u[0]))
case("prmt", "prmt.b32", lambda g, s, i, u, f, d: ptx.prmt(u[0], u[1], u[2]))
case("lop3", "lop3.b32", lambda g, s, i, u, f, d: ptx.lop3(u[0], u[1], u[2], 0x96))

case("red_global_add_f32", "red.global.add.f32", lambda g, s, i, u, f, d: ptx.red_global_add_f32(g, f[0]))
case("red_global_add_f64", "red.global.add.f64", lambda g, s, i, u, f, d: ptx.red_global_add_f64(g, d[0]))
case("red_global_add_v2_f32", "red.global.add.v2.f32", vector_store(ptx.red_global_add_v2_f32, False, "f32"))
case("red_global_add_v4_f32", "red.global.add.v4.f32", vector_store(ptx.red_global_add_v4_f32, False, "f32"))
case("red_shared_add_f32", "red.shared.add.f32", lambda g, s, i, u, f, d: ptx.red_shared_add_f32(s, f[0]))
case("atom_global_add_f32", "atom.global.add.f32", lambda g, s, i, u, f, d: ptx.atom_global_add_f32(g, f[0]))
case("atom_global_add_f64", "atom.global.add.f64", lambda g, s, i, u, f, d: ptx.atom_global_add_f64(g, d[0]))
case("atom_global_add_s32", "atom.global.add.s32", lambda g, s, i, u, f, d: ptx.atom_global_add_s32(g, i))
case("atom_global_add_acq_rel_s32", "atom.acq_rel.gpu.global.add.s32",
     lambda g, s, i, u, f, d: ptx.atom_global_add_acq_rel_s32(g, i))

case("mbarrier_init", "mbarrier.init.shared.b64", lambda g, s, i, u, f, d: ptx.mbarrier_init(s, i))
case("mbarrier_inval", "mbarrier.inval.shared.b64", lambda g, s, i, u, f, d: ptx.mbarrier_inval(s))
case("mbarrier_arrive", "mbarrier.arrive.shared.b64", lambda g, s, i, u, f, d: ptx.mbarrier_arrive(s))
case("mbarrier_arrive_expect_tx", "mbarrier.arrive.expect_tx.shared.b64",
     lambda g, s, i, u, f, d: ptx.mbarrier_arrive_expect_tx(s, i))
case("mbarrier_test_wait_parity", "mbarrier.test_wait.parity.shared.b64",
     lambda g, s, i, u, f, d: ptx.mbarrier_test_wait_parity(s, i))
case("mbarrier_try_wait_parity", "mbarrier.try_wait.parity.shared.b64",
     lambda g, s, i, u, f, d: ptx.mbarrier_try_wait_parity(s, i))
case("mbarrier_spin_parity", "mbarrier.test_wait.parity.shared.b64",
     lambda g, s, i, u, f, d: ptx.mbarrier_spin_parity(s, i))
case("mbarrier_wait_parity", "mbarrier.try_wait.parity.shared.b64",
     lambda g, s, i, u, f, d: ptx.mbarrier_wait_parity(s, i))
case("fence_acq_rel_cta", "fence.acq_rel.cta", lambda g, s, i, u, f, d: ptx.fence_acq_rel_cta())
case("fence_acq_rel_gpu", "fence.acq_rel.gpu", lambda g, s, i, u, f, d: ptx.fence_acq_rel_gpu())
case("fence_proxy_async", "fence.proxy.async", lambda g, s, i, u, f, d: ptx.fence_proxy_async())
case("fence_proxy_async_shared", "fence.proxy.async.shared::cta",
     lambda g, s, i, u, f, d: ptx.fence_proxy_async_shared())
case("fence_mbarrier_init", "fence.mbarrier_init.release.cluster",
     lambda g, s, i, u, f, d: ptx.fence_mbarrier_init())
case("fence_proxy_tensormap_acquire", "fence.proxy.tensormap::generic.acquire.gpu",
     lambda g, s, i, u, f, d: ptx.fence_proxy_tensormap_acquire(g))

case("setmaxnreg_inc", "setmaxnreg.inc.sync.aligned.u32", lambda g, s, i, u, f, d: ptx.setmaxnreg_inc(240))
case("setmaxnreg_dec", "setmaxnreg.dec.sync.aligned.u32", lambda g, s, i, u, f, d: ptx.setmaxnreg_dec(80))
case("griddepcontrol_wait", "griddepcontrol.wait", lambda g, s, i, u, f, d: ptx.griddepcontrol_wait())
case("griddepcontrol_launch_dependents", "griddepcontrol.launch_dependents",
     lambda g, s, i, u, f, d: ptx.griddepcontrol_launch_dependents())
case("thread_index", "mov.u32", lambda g, s, i, u, f, d: ptx.thread_index())
case("block_index", "mov.u32", lambda g, s, i, u, f, d: ptx.block_index())
case("anew_s32", "mov.b32", lambda g, s, i, u, f, d: ptx.anew_s32(i))
case("anew_s64", "mov.b64", lambda g, s, i, u, f, d: ptx.anew_s64(g))
case("lane_id", "mov.u32", lambda g, s, i, u, f, d: ptx.lane_id())
case("warp_id", "mov.u32", lambda g, s, i, u, f, d: ptx.warp_id())


def make_kernel(name):
    """A kernel around one call, whose operands come from outside and whose results go there."""
    body, row = device(CASES[name][1]), ptx.INSTRUCTIONS[name]
    kinds = row.operands.values()
    if any(isinstance(kind, FRAGMENTS) for kind in kinds):
        return around_registers(body, any(isinstance(kind, OUTPUTS) for kind in kinds))
    gives_value = row.result is not None

    def kernel(g, s, i, u, f, d):
        if gives_value:
            d[0] = body(g, s, i, u, f, d)
        else:
            body(g, s, i, u, f, d)

    return kernel


def around_registers(body, gives_registers):
    def kernel(g, s, i, out_u, out_f, out_d):
        u = cuda.local.array(8, uint32)
        f = cuda.local.array(8, float32)
        d = cuda.local.array(8, float64)
        for k in range(8):
            u[k] = i + k
            f[k] = i + k
            d[k] = i + k
        body(g, s, i, u, f, d)
        if gives_registers:
            for k in range(8):
                out_u[k] = u[k]
                out_f[k] = f[k]
                out_d[k] = d[k]

    return kernel


@functools.lru_cache(maxsize=None)
def ptx_of(name):
    """Compiled once, for the first architecture of the instruction."""
    first = ptx.INSTRUCTIONS[name].arch
    return compile.compile_ptx(make_kernel(name), SIGNATURE, first, launch_bounds=(128, 1))


def assemble(text, arch):
    """The assembler's report on PTX retargeted to another architecture."""
    text = re.sub(r"^\.target .*", f".target {arch}", text, flags=re.M)
    options = LinkerOptions(arch=arch, ptxas_options=["-v"])
    linker = Linker(ObjectCode.from_ptx(text.encode()), options=options)
    linker.link("cubin")
    return compile.parse_resources(linker.get_info_log())


def test_every_instruction_of_the_table_has_a_case():
    assert set(CASES) == set(ptx.INSTRUCTIONS)


@pytest.mark.parametrize("name", ptx.INSTRUCTIONS)
def test_call_is_one_statement_with_the_expected_mnemonic_and_no_local_memory(name):
    mnemonic, _ = CASES[name]
    text = ptx_of(name)
    statements = re.findall(r"// begin inline asm\n(.*?)// end inline asm", text, flags=re.S)
    assert len(statements) == 1
    assert len(re.findall(rf"(?<![\w.]){re.escape(mnemonic)}(?![\w.:])", statements[0])) == 1
    assert ".local" not in text and "call" not in text


@pytest.mark.parametrize("name", ptx.INSTRUCTIONS)
def test_assembler_takes_it_on_its_first_and_on_the_newest_architecture_without_spills(name):
    for arch in (ptx.INSTRUCTIONS[name].arch, "sm_120a"):
        resources = assemble(ptx_of(name), arch)
        assert (resources.stack, resources.spill_stores, resources.spill_loads) == (0, 0, 0)


@pytest.mark.parametrize("name", [n for n, row in ptx.INSTRUCTIONS.items() if row.arch != "sm_75"])
def test_assembler_refuses_it_on_the_architecture_before(name):
    before = ORDER[ORDER.index(ptx.INSTRUCTIONS[name].arch) - 1]
    with pytest.raises(Exception, match="sm_|target"):
        assemble(ptx_of(name), before)


@pytest.mark.parametrize("name", ["setmaxnreg_inc", "setmaxnreg_dec"])
def test_register_budget_changes_survive_the_link(name):
    cubin = compile.compile_cubin(make_kernel(name), SIGNATURE, "sm_90a", launch_bounds=(128, 1))
    assert cubin.resources.warnings == ()           # C7504 or C7508 where the assembler ignores them


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ORDER)
@pytest.mark.parametrize("name", ptx.INSTRUCTIONS)
def test_assembler_takes_it_on_every_architecture_from_its_first_on(name, arch):
    if ORDER.index(arch) < ORDER.index(ptx.INSTRUCTIONS[name].arch):
        pytest.skip("not there yet")
    resources = compile.compile_cubin(make_kernel(name), SIGNATURE, arch, launch_bounds=(128, 1)).resources
    assert resources.spill_stores == resources.stack == 0


@pytest.mark.parametrize("name", ptx.INSTRUCTIONS)
def test_docstring_names_the_call_and_the_section_of_the_isa(name):
    row, function = ptx.INSTRUCTIONS[name], getattr(ptx, name)
    assert function.__doc__.startswith(f"{name}(")
    assert f"PTX ISA: {row.section}" in function.__doc__ and row.arch in function.__doc__
    assert ": " in row.section


def test_shared_addresses_of_static_and_dynamic_memory_are_32_bit_numbers():
    def kernel(out):
        out[0] = ptx.shared_address(cuda.shared.array(8, float32))
        out[1] = ptx.dynamic_shared_address()

    text = compile.compile_ptx(kernel, (types.int32[::1],), "sm_75")
    assert re.search(r"\.extern \.shared \.align 1024 \.b8", text)
    assert "cvta" not in text.replace("cvta.to.global", "")


def test_a_run_time_value_for_an_immediate_is_an_error_that_names_the_argument():
    def kernel(n):
        ptx.cp_async_wait_group(n)

    with pytest.raises(Exception, match="pending must be a constant integer, got a run-time int32"):
        compile.compile_ptx(kernel, (types.int32,), "sm_80")


def test_a_scalar_for_a_fragment_is_an_error_that_names_the_argument():
    def kernel(n):
        ptx.ldmatrix_x4(n, 0, n)

    with pytest.raises(Exception, match="d must be a cuda.local.array, got int32"):
        compile.compile_ptx(kernel, (types.int32,), "sm_80")


def test_calling_an_instruction_outside_a_kernel_says_so():
    with pytest.raises(NotImplementedError, match="thread_index"):
        ptx.thread_index()
