"""Peak memory of a call, from the operating system.

``tracemalloc`` sees what NumPy allocates, but neither what a compiled kernel nor what another library
does. The resident set of the process sees them all. To be measured in a process of its own, after a small
call that compiles whatever there is to compile.
"""

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_growth(function: Callable[[], object]) -> int | None:
    """Bytes by which the resident set grew at most while ``function()`` ran, its results included.

    Returns
    -------
    int or None
        None where the operating system does not tell (Windows).

    Notes
    -----
    On Linux the high-water mark is reset before the call (``/proc/self/clear_refs``). Elsewhere it cannot be,
    and the growth of the mark is returned: right if this is the largest call of the process so far.

    Examples
    --------
    >>> import numpy as np
    >>> from numbaflash.bench.resident import peak_growth
    >>> grown = peak_growth(lambda: np.ones(1 << 21))
    """
    gc.collect()
    _return_free_memory()
    reset = _reset_peak()
    before = _current() if reset else _peak()
    result = function()
    after = _peak()
    del result
    return None if before is None or after is None else max(0, after - before)


def available_bytes() -> int | None:
    """Memory that a process may still take, or None where unknown."""
    try:
        return _kilobytes(Path("/proc/meminfo"), "MemAvailable")
    except OSError:
        return None


def _return_free_memory() -> None:
    # Memory that the allocator has kept from earlier would serve the call without being seen.
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        pass


def _reset_peak() -> bool:
    try:
        _CLEAR.write_text("5")
        return _kilobytes(_STATUS, "VmHWM") is not None
    except OSError:
        return False


def _current() -> int | None:
    return _kilobytes(_STATUS, "VmRSS")


def _peak() -> int | None:
    try:
        return _kilobytes(_STATUS, "VmHWM")
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return None
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size << 10


def _kilobytes(path: Path, name: str) -> int | None:
    for line in path.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    return None
