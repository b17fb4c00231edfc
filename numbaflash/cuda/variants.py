"""Every kind of kernel that calls need, by name: what compile gates go through.

A variant is a small call.  The planners choose its kernels, exactly as they do for a user's call, so that
there is no second list of tile sizes to fall behind.

>>> next(name for name in VARIANTS if "tf32" in name)
'tensor-forward-tf32-d32-plain'
>>> [launch.kernel.name for launch in plan_of("simt-forward-float64-d64-plain", "sm_80").launches]
['forward_simt_float64_float64_64x64_32x32_v']
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np

from numbaflash.arrays import FLOATING
from numbaflash.cuda import plan_sm80, simt_plan
from numbaflash.cuda.backward_sm80 import BackwardConfig
from numbaflash.cuda.configs_sm80 import BACKWARD_WORDS, FORWARD_WORDS, WIDTHS, capability, choose_backward, choose_forward
from numbaflash.cuda.forward_sm80 import ForwardConfig
from numbaflash.cuda.plan import Launch, Plan
from numbaflash.cuda.simt_config import CLASSES
from numbaflash.options import Options
from numbaflash.problem import Problem, make_problem

ROWS, HEADS = 32, 2
PLANNERS = {"simt": simt_plan, "tensor": plan_sm80}
DIRECTIONS = ("forward", "backward")
STYLES = ("plain", "everything", "strided")
"""No options, aligned; every option at once; every option on arrays that no 16-byte access can read."""
DETERMINISTIC = ("deterministic", "deterministic-everything")
"""Of gradients on tensor cores besides: bit-equal ones, without options and with all of them."""
GROUPED = ("grouped", "grouped-everything")
"""Of forward passes on tensor cores besides: heads of a group packed into tiles, without options and with all."""
PLAIN = ("plain", "deterministic", "grouped")
FULL = ("sm_80", "sm_90a")
"""Architectures for which everything is compiled; the others take the sample."""
SAMPLED = ("sm_75", "sm_86", "sm_89", "sm_100a", "sm_120a")

SAMPLE = (
    "simt-forward-float32-d64-*",
    "simt-backward-float32-d64-plain",
    "simt-*-float32-d128-everything",
    "simt-forward-float64-d64-plain",
    "simt-forward-bfloat16-d256-plain",
    "simt-forward-float32-d300-plain",
    "tensor-forward-float16-d64-plain",
    "tensor-forward-bfloat16-d128-everything",
    "tensor-forward-tf32-d64-plain",
    "tensor-backward-bfloat16-d64-plain",
    "tensor-backward-bfloat16-d64-deterministic",
)
"""Patterns of names: one of each kind, at the sizes that are used most or are the tightest."""
SAMPLE_ELSEWHERE = (
    "simt-forward-float32-d64-everything",
    "simt-backward-float32-d128-plain",
    "tensor-forward-float16-d128-plain",
    "tensor-backward-bfloat16-d128-everything",
)
"""The same for an architecture that is not in `FULL`."""
QUICK = ("simt-forward-float32-d64-plain", "tensor-forward-float16-d64-plain")


class Variant(NamedTuple):
    """A call.

    Attributes
    ----------
    family : str
        Of kernels: a key of `PLANNERS`.
    direction : str
    kind : str
        Dtype of the inputs, or the precision of the products where these are float32 on tensor cores.
    dim : int
        Head dimension, of values too.
    style : str
        One of `STYLES`, `DETERMINISTIC` or `GROUPED`.
    """

    family: str
    direction: str
    kind: str
    dim: int
    style: str

    @property
    def name(self) -> str:
        return f"{self.family}-{self.direction}-{self.kind}-d{self.dim}-{self.style}"


def _variants() -> Iterator[Variant]:
    past = CLASSES[-1] + 44
    for family, kinds, dims in (
        ("simt", [dtype.name for dtype in FLOATING], (*CLASSES, past)),
        ("tensor", ["float16", "bfloat16"], WIDTHS),
    ):
        for direction in DIRECTIONS:
            for kind in kinds:
                for dim in dims:
                    more = {("tensor", "backward"): DETERMINISTIC, ("tensor", "forward"): GROUPED}
                    styles = STYLES + more.get((family, direction), ())
                    yield from (Variant(family, direction, kind, dim, style) for style in styles)
    for direction, table in zip(DIRECTIONS, (FORWARD_WORDS, BACKWARD_WORDS)):
        for kind, dim in table:
            styles = STYLES + GROUPED * (direction == "forward")
            yield from (Variant("tensor", direction, kind, dim, style) for style in styles)


VARIANTS = {variant.name: variant for variant in _variants()}
"""Name -> variant."""


def select(patterns: tuple[str, ...]) -> list[str]:
    """Names of the variants that match any of the patterns (``*`` and ``?``)."""
    return [name for name in VARIANTS if any(fnmatchcase(name, pattern) for pattern in patterns)]


def plan_of(name: str, arch: str) -> Plan:
    """The launches of a variant's call.

    Parameters
    ----------
    name : str
        A key of `VARIANTS`.
    arch : str

    Raises
    ------
    NotImplementedError
        Where this family of kernels has nothing for this architecture.
    """
    variant = VARIANTS[name]
    problem = _problem(variant)
    planner = PLANNERS[variant.family]
    shape = (1, HEADS, ROWS, variant.dim)
    out, lse = _array(shape, problem.out_dtype, variant), np.zeros(shape[:3], problem.compute_dtype)
    if variant.direction == "forward":
        return planner.plan_forward(problem, out, lse, arch)
    dout, dq, dk, dv = (_array(shape, problem.out_dtype, variant) for _ in range(4))
    dbias = (
        None
        if problem.score.bias_shape is None
        else np.zeros(problem.score.bias_shape, problem.compute_dtype)
    )
    dsinks = None if problem.sinks is None else np.zeros(problem.sinks.shape)
    dlse = None if variant.style in PLAIN else np.zeros_like(lse)
    return planner.plan_backward(problem, dout, out, lse, dlse, dq, dk, dv, dbias, dsinks, arch)


def configurations(name: str, arch: str) -> dict[int, ForwardConfig | BackwardConfig]:
    """Tile sizes of a variant's kernels that multiply tiles on tensor cores, by the number of their launch.

    Parameters
    ----------
    name : str
        A key of `VARIANTS`, of the family "tensor".
    arch : str

    Raises
    ------
    NotImplementedError
        Where these kernels have nothing for this architecture.
    """
    variant, launches = VARIANTS[name], plan_of(name, arch).launches
    problem = _problem(variant)
    shape = (1, HEADS, ROWS, variant.dim)
    if variant.direction == "forward":
        out = _array(shape, problem.out_dtype, variant)
        return {0: choose_forward(problem, out, capability(arch) < plan_sm80.OLDEST)}
    dout, dq, dk, dv = (_array(shape, problem.out_dtype, variant) for _ in range(4))
    keys, queries = choose_backward(problem, dout, dq, dk, dv, arch)
    left, found = list(keys), {}
    for number, launch in enumerate(launches):
        if launch.kernel.name.startswith("backward_keys"):
            found[number] = left.pop(0)
        elif launch.kernel.name.startswith("backward_queries"):
            found[number] = queries
    return found


class Kernel(NamedTuple):
    """One kernel to compile: launch number `launch` of the plan of a variant."""

    variant: str
    launch: int
    arch: str

    @property
    def planned(self) -> Launch:
        """The launch itself."""
        return plan_of(self.variant, self.arch).launches[self.launch]


def kernels(names: list[str], arch: str) -> list[Kernel]:
    """The different kernels of some variants; those that the architecture has."""
    found = {}
    for name in names:
        try:
            launches = plan_of(name, arch).launches
        except NotImplementedError:
            continue
        for number, launch in enumerate(launches):
            spec = launch.kernel
            found.setdefault((spec.function, spec.signature, spec.launch_bounds), Kernel(name, number, arch))
    return list(found.values())


def _problem(variant: Variant) -> Problem:
    words = variant.kind.startswith("tf32")
    dtype = next(one for one in FLOATING if one.name == ("float32" if words else variant.kind))
    kv_heads = 1 if variant.style in GROUPED else HEADS
    q, k, v = (_array((1, heads, ROWS, variant.dim), dtype, variant) for heads in (HEADS, kv_heads, kv_heads))
    options = {"precision": variant.kind} if words else {}
    options["deterministic"] = variant.style in DETERMINISTIC
    if variant.style not in PLAIN:
        options |= {
            "causal": True,
            "softcap": 2.0,
            "bias": np.zeros((1, HEADS, ROWS, ROWS), dtype),
            "mask": np.ones((ROWS, ROWS), bool),
            "alibi_slopes": np.ones(HEADS),
            "dropout_p": 0.5,
            "seed": 0,
            "sinks": np.zeros(HEADS, np.float32),
        }
    return make_problem(q, k, v, Options(**options))


def _array(shape: tuple[int, ...], dtype: np.dtype, variant: Variant) -> np.ndarray:
    if variant.style == "strided":
        return np.zeros((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]
    return np.zeros(shape, dtype)
