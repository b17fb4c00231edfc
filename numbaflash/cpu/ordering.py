"""Order between threads inside one kernel: counters that are published, and waited for without the GIL.

A job may wait only for jobs with smaller numbers. Those have been taken from the queue before it, by threads
that are running, so the waiting ends whatever the number of threads, and also when a call is stopped: what
has been taken is finished.
"""

import platform

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .compile import helper
from .simd import I32, I64, POINTER

_PAUSE = {
    "x86_64": ("llvm.x86.sse2.pause", []), "amd64": ("llvm.x86.sse2.pause", []),
    "aarch64": ("llvm.aarch64.hint", [1]), "arm64": ("llvm.aarch64.hint", [1]),
}


@intrinsic
def read_published(typing_context, address):
    """The int64 at an address; what was written before it was published is visible afterwards."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], POINTER)
        return builder.load_atomic(pointer, "acquire", 8, typ=I64)

    return types.intp(types.intp), generate


@intrinsic
def publish(typing_context, address, value):
    """Store an int64 after everything written before."""

    def generate(context, builder, signature, arguments):
        # An exchange: llvmlite's store_atomic does not know opaque pointers.
        builder.atomic_rmw("xchg", builder.inttoptr(arguments[0], POINTER), arguments[1], "release")
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def publish_one_more(typing_context, address):
    """Add 1 to an int64 after everything written before."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], POINTER)
        builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "release")
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def count_up(typing_context, address):
    """Add 1 to an int64 after everything written before; the new count, and what the others wrote is visible."""

    def generate(context, builder, signature, arguments):
        one = ir.Constant(I64, 1)
        old = builder.atomic_rmw("add", builder.inttoptr(arguments[0], POINTER), one, "acq_rel")
        return builder.add(old, one)

    return types.intp(types.intp), generate


@intrinsic
def pause(typing_context):
    """Tell the core that it is waiting."""

    def generate(context, builder, signature, arguments):
        name, numbers = _PAUSE.get(platform.machine().lower(), (None, []))
        if name is not None:
            kind = ir.FunctionType(ir.VoidType(), [I32] * len(numbers))
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            builder.call(function, [ir.Constant(I32, number) for number in numbers])
        return context.get_dummy_value()

    return types.void(), generate


@helper
def wait_for(address, value):
    """Return when the int64 at an address has been published as ``value``."""
    while read_published(address) != value:
        pause()
