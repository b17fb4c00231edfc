"""What every GPU, or one of an architecture, takes (CUDA Programming Guide, Compute Capabilities)."""
from __future__ import annotations

import re
from operator import index

import numpy as np

LARGEST = {"grid": (2**31 - 1, 65535, 65535), "block": (1024, 1024, 64)}
THREADS = 1024
STATIC_SHARED = 48 << 10
SHARED_KIB = {"70": 96, "72": 96, "75": 64, "80": 163, "86": 99, "87": 163, "88": 99, "89": 99, "90": 227,
              "100": 227, "101": 227, "103": 227, "110": 227, "120": 99, "121": 99}


def dimensions(value, name):
    """A grid or block size as three positive ints, none above what a GPU takes."""
    try:
        sizes = (index(value),) if np.ndim(value) == 0 else tuple(index(n) for n in value)
    except TypeError:
        raise TypeError(f"{name} must be an int or a tuple of up to three ints, not {value!r}") from None
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(f"{name} must be one to three positive ints, not {value!r}")
    for axis, size, largest in zip("xyz", sizes, LARGEST[name]):
        if size > largest:
            raise ValueError(f"{name} {axis} is at most {largest}, not {size}")
    return (*sizes, 1, 1)[:3]


def check_threads(function, block):
    """Errors for blocks with more threads than a GPU, or this kernel, takes."""
    threads = block[0] * block[1] * block[2]
    if threads > THREADS:
        raise ValueError(f"a block has at most {THREADS} threads, not {threads}")
    for directive, what in ("maxntid", "at most"), ("reqntid", "exactly"):
        wanted = function.directives.get(directive)
        if wanted is None:
            continue
        number = int(np.prod(wanted))
        if threads > number or directive == "reqntid" and threads != number:
            raise ValueError(f"block has {threads} threads, but the kernel was compiled for {what} "
                             f"{number} (.{directive}, launch_bounds)")


def check_shared(module, function, shared_bytes):
    """Errors for more shared memory than the architecture of the PTX has."""
    declared = (module.variables | function.variables).values()
    static = 0
    for variable in declared:
        if variable.space == "shared" and not variable.dynamic:
            static = -(-static // variable.align) * variable.align + variable.nbytes
    if static > STATIC_SHARED:
        raise ValueError(f"the kernel declares {static} bytes of shared memory; {module.target} has at "
                         f"most {STATIC_SHARED} of static shared memory: use cuda.shared.array(0, dtype) and "
                         "shared_bytes")
    number = re.match(r"sm_(\d+)", module.target)
    largest = SHARED_KIB.get(number[1] if number else "", max(SHARED_KIB.values())) << 10
    if static + shared_bytes > largest:
        raise ValueError(f"shared_bytes={shared_bytes} and {static} bytes of static shared memory make "
                         f"{static + shared_bytes}; {module.target} has at most {largest} per block")
