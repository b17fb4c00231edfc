"""What every GPU, or one of an architecture, takes (CUDA Programming Guide, Compute Capabilities; shared
memory as ptxas and ``cuda/__device/arch_traits.h`` of CCCL have it)."""
from __future__ import annotations

import re
from operator import index

import numpy as np

LARGEST = {"grid": (2**31 - 1, 65535, 65535), "block": (1024, 1024, 64)}
THREADS = 1024
STATIC_SHARED = 48 << 10
SHARED_KIB = {50: 48, 52: 48, 53: 48, 60: 48, 61: 48, 62: 48, 70: 96, 72: 96, 75: 64, 80: 163, 86: 99,
              87: 163, 88: 99, 89: 99, 90: 227, 100: 227, 101: 227, 103: 227, 107: 227, 110: 227, 120: 99,
              121: 99}


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


def shared_limits(target):
    """Bytes of shared memory that a block has at most: static ones, and all together.

    ptxas lets code for one architecture alone (``sm_90a``) declare all of it, other code 48 KB.
    """
    name = re.match(r"sm_(\d+)([af]?)\b", target)
    if name is None or int(name[1]) not in SHARED_KIB:
        known = ", ".join(f"sm_{number}" for number in SHARED_KIB)
        raise ValueError(f"the PTX is for {target}, an architecture that is not known here: the limits of "
                         f"its shared memory are missing; known are {known}, also with a suffix a or f")
    largest = SHARED_KIB[int(name[1])] << 10
    return largest if name[2] == "a" else STATIC_SHARED, largest


def check_shared(module, function, shared_bytes):
    """Errors for more shared memory than the architecture of the PTX has."""
    most_static, largest = shared_limits(module.target)
    declared = (module.variables | function.variables).values()
    static = 0
    for variable in declared:
        if variable.space == "shared" and not variable.dynamic:
            static = -(-static // variable.align) * variable.align + variable.nbytes
    if static > most_static:
        raise ValueError(f"the kernel declares {static} bytes of shared memory; {module.target} has at "
                         f"most {most_static} of static shared memory: use cuda.shared.array(0, dtype) and "
                         "shared_bytes")
    if static + shared_bytes > largest:
        raise ValueError(f"shared_bytes={shared_bytes} and {static} bytes of static shared memory make "
                         f"{static + shared_bytes}; {module.target} has at most {largest} per block")
