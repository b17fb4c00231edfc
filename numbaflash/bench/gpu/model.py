"""The pipe model held against the measurement: what share of its bound a kernel reaches."""

from typing import Any

from numbaflash.cuda import variants

from .. import bounds
from ..pipes import GPUS
from ..report import UsageError
from ..sass import SassError
from .cases import TOKENS, GpuCase


def case_of(variant: variants.Variant) -> str:
    """Name of the case that a variant's kernels are timed with."""
    prefix = "" if variant.style == "plain" else f"{variant.style}-"
    return f"{prefix}d{variant.dim}-full-{TOKENS}"


def against_model(
    arch: str, rows: list[dict[str, Any]], cases: tuple[GpuCase, ...]
) -> tuple[list[dict[str, Any]], str]:
    """Measured and greatest possible speed of the plain 16-bit kernels, and why some are missing.

    Parameters
    ----------
    arch : str
    rows : list of dict
        Of `measure.Run`.
    cases : tuple of GpuCase
        What was measured.
    """
    if arch not in GPUS:
        return [], f"no rates are known for {arch}"
    names = {case.name for case in cases}
    speeds = {(row["case"], row["direction"]): row["teraflops"] for row in rows if row["who"] == "numbaflash"}
    found = []
    for name in bounds.PATTERNS:
        variant = variants.VARIANTS[name]
        measured = speeds.get((case_of(variant), variant.direction))
        if case_of(variant) not in names or measured is None:
            continue
        try:
            kernels = [variants.Kernel(name, number, arch) for number in variants.configurations(name, arch)]
            (whole,) = bounds.passes(bounds.measure(kernel) for kernel in kernels)
        except (ImportError, NotImplementedError, SassError, UsageError) as error:
            return found, str(error)
        found.append(
            {
                "model": name,
                "case": case_of(variant),
                "direction": variant.direction,
                "measured": measured,
                "bound": whole["bound"],
                "percent": 100 * measured / whole["bound"],
            }
        )
    return found, "" if found else "none of its cases was measured"
