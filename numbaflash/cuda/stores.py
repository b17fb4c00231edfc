"""One float32 result to global memory, rounded to its dtype."""
from numba import float64

from numbaflash.cuda import ptx
from numbaflash.cuda.inlining import device


@device
def _store_float16(address, value):
    ptx.st_global_b16(address, ptx.cvt_f16(value))


@device
def _store_bfloat16(address, value):
    ptx.st_global_b16(address, ptx.cvt_bf16(value))


@device
def _store_float32(address, value):
    ptx.st_global_f32(address, value)


@device
def _store_float64(address, value):
    ptx.st_global_f64(address, float64(value))


STORE_FLOAT = {
    "float16": _store_float16, "bfloat16": _store_bfloat16, "float32": _store_float32, "float64": _store_float64,
}
"""By dtype: ``store(address, value)``."""
