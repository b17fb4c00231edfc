"""Numba's float16 arithmetic calls C++ functions of cuda_fp16.h, which NVRTC compiles at link time; here is
their PTX.

Each takes pointers: where to put the result, then the operands; and returns a status, 0. The table gives,
for a C++ function, the instructions that compute ``%h0`` (or the predicate ``%p0``) from ``%h1``, ``%h2``,
``%h3``.
"""
from __future__ import annotations

from .parser import Function, parse

WIDEN = "cvt.f32.f16 %f1, %h1; "
NARROW = " cvt.rn.f16.f32 %h0, %f0;"
LOG2_E, LN_2 = "0f3FB8AA3B", "0f3F317218"


def through_float(instructions):
    return WIDEN + instructions + NARROW


ARITHMETIC = {
    "add": "add.f16 %h0, %h1, %h2;", "sub": "sub.f16 %h0, %h1, %h2;", "mul": "mul.f16 %h0, %h1, %h2;",
    "div": through_float("cvt.f32.f16 %f2, %h2; div.rn.f32 %f0, %f1, %f2;")
}
COMPARISONS = {name: f"setp.{name}.f16 %p0, %h1, %h2;" for name in ("eq", "ne", "lt", "le", "gt", "ge")}
COMPARISONS["ne"] = "setp.neu.f16 %p0, %h1, %h2;"
UNARY = {
    "hsqrt": "sqrt.rn.f32 %f0, %f1;", "hrsqrt": "rsqrt.approx.f32 %f0, %f1;", "hrcp": "rcp.rn.f32 %f0, %f1;",
    "hexp": f"mul.f32 %f2, %f1, {LOG2_E}; ex2.approx.f32 %f0, %f2;", "hexp2": "ex2.approx.f32 %f0, %f1;",
    "hlog": f"lg2.approx.f32 %f2, %f1; mul.f32 %f0, %f2, {LN_2};", "hlog2": "lg2.approx.f32 %f0, %f1;",
    "hsin": "sin.approx.f32 %f0, %f1;", "hcos": "cos.approx.f32 %f0, %f1;",
    "htanh": "tanh.approx.f32 %f0, %f1;", "hfloor": "cvt.rmi.f32.f32 %f0, %f1;",
    "hceil": "cvt.rpi.f32.f32 %f0, %f1;", "hrint": "cvt.rni.f32.f32 %f0, %f1;",
    "htrunc": "cvt.rzi.f32.f32 %f0, %f1;"
}
OPERATORS = {"pl": "add", "mi": "sub", "ml": "mul", "dv": "div"}


def _table():
    """C++ name -> (instructions, number of operands, result is a bool)."""
    table = {}
    for mangled, name in OPERATORS.items():
        table[f"_Z{mangled}RK6__halfS1__nbst"] = ARITHMETIC[name], 2, False
    for name, code in ARITHMETIC.items():
        table[f"_ZL6__h{name}6__halfS__nbst"] = code, 2, False
    for name, code in COMPARISONS.items():
        table[f"_Z{name}RK6__halfS1__nbst"] = table[f"_ZL5__h{name}6__halfS__nbst"] = code, 2, True
    for name, code in UNARY.items():
        table[f"_ZL{len(name)}{name}6__half_nbst"] = through_float(code), 1, False
    table["_ZngRK6__half_nbst"] = table["_ZL6__hneg6__half_nbst"] = "neg.f16 %h0, %h1;", 1, False
    table["_ZpsRK6__half_nbst"] = "mov.b16 %h0, %h1;", 1, False
    table["_ZL6__habs6__half_nbst"] = "abs.f16 %h0, %h1;", 1, False
    for name in ("min", "max"):
        table[f"_ZL6__h{name}6__halfS__nbst"] = f"{name}.f16 %h0, %h1, %h2;", 2, False
    table["_ZL6__hfma6__halfS_S__nbst"] = "fma.rn.f16 %h0, %h1, %h2, %h3;", 3, False
    return table


SHIMS = _table()


def text(name: str) -> str:
    """The function as PTX."""
    code, count, is_bool = SHIMS[name]
    parameters = ", ".join(f".param .b64 p{n}" for n in range(count + 1))
    loads = " ".join(f"ld.param.b64 %rd{n}, [p{n}]; ld.b16 %h{n}, [%rd{n}];" for n in range(1, count + 1))
    store = "selp.u16 %h0, 1, 0, %p0; st.u8 [%rd0], %h0;" if is_bool else "st.b16 [%rd0], %h0;"
    return (f".func (.param .b32 status) {name}({parameters}) {{ .reg .b64 %rd<4>; .reg .b16 %h<4>; "
            f".reg .f32 %f<3>; .reg .pred %p<1>; .reg .b32 %r<1>; {loads} {code} ld.param.b64 %rd0, [p0]; "
            f"{store} mov.u32 %r0, 0; st.param.b32 [status], %r0; ret; }}")


def shim(name: str) -> Function | None:
    """The function that PTX declares as external, if it is one of these."""
    return parse(text(name)).functions[name] if name in SHIMS else None
