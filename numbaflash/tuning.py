"""Tile sizes of the CPU kernels: set by hand, or measured on this machine and kept for later processes."""

import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

LARGEST_TILE = 4096
FORMAT = 1
"""Version of the files; others are ignored."""


@dataclass(frozen=True, kw_only=True)
class CPUConfig:
    """Tile sizes of the CPU kernels, for ``config=``. They change speed and rounding, never the task.

    Every size is rounded up to what the kernels can take, and None leaves the choice to a model of the caches.

    Parameters
    ----------
    block_q, block_k : int, optional
        Queries of a job and keys of a tile, forward.
    part_keys : int, optional
        Keys of a job where queries are few and keys are split (decoding).
    backward_block_q, backward_block_k : int, optional
        Queries of a tile and keys of a block, backward.

    Raises
    ------
    TypeError, ValueError
        If a size is not an integer, or is not in 1 ... 4096 (``part_keys``: at least 1).

    Examples
    --------
    >>> import numpy as np, numbaflash
    >>> q = k = v = np.ones((1, 2, 100, 32), np.float32)
    >>> out = numbaflash.attention(q, k, v, backend="cpu", config=numbaflash.CPUConfig(block_k=64))
    """

    block_q: int | None = None
    block_k: int | None = None
    part_keys: int | None = None
    backward_block_q: int | None = None
    backward_block_k: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if size is None:
                continue
            if type(size) is not int:
                raise TypeError(f"{field.name} must be an integer or None, not {size!r}")
            largest = 1 << 40 if field.name == "part_keys" else LARGEST_TILE
            if not 1 <= size <= largest:
                raise ValueError(f"{field.name} must be in [1, {largest}], not {size}")


DEFAULT = CPUConfig()


class Situation(NamedTuple):
    """What a measured configuration is good for: calls alike, lengths and heads to the next power of two."""

    direction: str
    dtype: str
    general: bool
    banded: bool
    head_dim: int
    value_dim: int
    q_length: int
    k_length: int
    units: int
    group: int
    adjacent: bool
    threads: int


def situation(direction: str, problem: Any, threads: int) -> Situation:
    """The situation of a checked call, ``direction`` being "forward" or "backward"."""
    from .segments import K_LENGTH, Q_LENGTH

    table, (batch, heads, _, head_dim) = problem.segments, problem.q.shape
    return Situation(
        direction, problem.k.dtype.name,
        not problem.score.is_empty or problem.mask is not None or problem.dropout is not None,
        not problem.band.is_open, head_dim, problem.v.shape[3],
        *(_round_up(int(table[:, column].max(initial=0))) for column in (Q_LENGTH, K_LENGTH)),
        _round_up(len(table) * heads), problem.group,
        all(a.strides[3] == a.dtype.itemsize for a in (problem.k, problem.v)), threads,
    )


def _round_up(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


# ------------------------------------------------------------------------------------------------- on the disk


@cache
def machine_name() -> str:
    """What a measurement holds for: the processor, and the vector width that kernels are written in."""
    from llvmlite import binding

    from .cpu.config import machine

    name = f"{platform.machine()}-{binding.get_host_cpu_name()}-{machine().vector_bits}-{os.cpu_count()}"
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def folder() -> Path:
    """Where configurations are kept: ``NUMBAFLASH_TUNING_DIR``, or a folder in the user's cache."""
    given = os.environ.get("NUMBAFLASH_TUNING_DIR", "").strip()
    if given:
        return Path(given)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "numbaflash" / "tuning"


def _path(where: Situation) -> Path:
    from . import __version__

    name = "-".join(str(int(value) if isinstance(value, bool) else value) for value in where)
    return folder() / f"v{FORMAT}-{__version__}" / machine_name() / f"{name}.json"


def store(where: Situation, config: CPUConfig) -> None:
    """Keep a configuration, in one step for whoever reads or writes at the same time. OSError where that fails."""
    path = _path(where)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"format": FORMAT, "situation": list(where), "config": asdict(config)}
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    finally:
        _forget()


def load(where: Situation) -> CPUConfig | None:
    """What was kept for a situation; None where there is nothing that can be trusted."""
    try:
        record = json.loads(_path(where).read_text(encoding="utf-8"))
        if record["format"] != FORMAT or record["situation"] != list(where):
            return None
        return CPUConfig(**record["config"])
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, RecursionError):
        return None


@lru_cache(maxsize=1024)
def _load_once(where: Situation) -> CPUConfig | None:
    return load(where)


def _forget() -> None:
    """What was looked up in this process is looked up again."""
    _load_once.cache_clear()
    forward = sys.modules.get(f"{__package__}.cpu.forward")
    if forward is not None:
        forward.forget()


def config_of(direction: str, problem: Any, threads: int) -> CPUConfig:
    """The configuration of a call: the caller's, else what was measured, else the default."""
    if problem.config is not None:
        return problem.config
    return _load_once(situation(direction, problem, threads)) or DEFAULT


# ------------------------------------------------------------------------------------------------- measurement

_GAIN = 1.03
"""What a winner must gain over the default, twice: less may be noise."""


class _Bar:
    """A progress bar: tqdm's where it is installed, else a line that is written over."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total, self._done, self._shown, self._bar = total, 0, shown, None
        if shown:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc="autotune", unit="turn", leave=False)

    def step(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.update()
        elif self._shown:
            filled = 30 * self._done // self._total
            end = "\n" if self._done == self._total else ""
            print(f"\rautotune [{'#' * filled:30}] {self._done}/{self._total}", end=end, file=sys.stderr,
                  flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._shown and self._done < self._total:
            print(file=sys.stderr)


def candidates(direction: str, few: bool, default: dict[str, int]) -> Iterator[CPUConfig]:
    """Alternatives to the default's tile sizes: halves and doubles of each, and of both."""
    if direction == "backward":
        names = ("backward_block_q", "backward_block_k")
    else:
        names = ("block_k", "part_keys") if few else ("block_q", "block_k")
    seen = {tuple(default[name] for name in names)}
    for first in (1, 0.5, 2):
        for second in (1, 0.5, 2, 0.25):
            sizes = tuple(max(1, int(default[name] * factor)) for name, factor in zip(names, (first, second)))
            largest = LARGEST_TILE if not few else 1 << 40
            if sizes not in seen and max(sizes) <= largest and sizes[0] <= LARGEST_TILE:
                seen.add(sizes)
                yield CPUConfig(**dict(zip(names, sizes)))


def fastest(calls: dict[CPUConfig, Any], turns: int, step: Any, clock: Any = time.perf_counter) -> CPUConfig:
    """The configuration whose call takes least time; DEFAULT, a key of ``calls``, unless one is surely faster.

    All take turns; then the best alone against the default, again, in turns.
    """
    best = DEFAULT
    for contestants in (list(calls), None):
        if contestants is None:
            if best is DEFAULT:
                for _ in range(2 * turns):
                    step()
                return DEFAULT
            contestants = [DEFAULT, best]
        times: dict[CPUConfig, list[float]] = {config: [] for config in contestants}
        rounds = turns if len(contestants) > 2 or best is DEFAULT else 2 * turns
        for _ in range(rounds):
            for config in contestants:
                start = clock()
                calls[config]()
                times[config].append(clock() - start)
            step()
        gains = {
            config: median(old / new for old, new in zip(times[DEFAULT], times[config], strict=True))
            for config in contestants
        }
        best = max(contestants, key=gains.__getitem__)
        if gains[best] < _GAIN:
            best = DEFAULT
    return best


def autotune(
    q: Any, k: Any, v: Any, *, backward: bool = False, turns: int = 7, progress: bool = True, save: bool = True,
    **options: Any,
) -> CPUConfig:
    """Measure alternatives to the default tile sizes on a call, and keep the winner for calls like it.

    Later calls of the same dtype, head_dim and kind, with lengths and heads up to the same powers of two, on the same
    kind of machine with as many threads, take what was kept, in this process and in others. An alternative that is
    not surely faster leaves the default in place.

    Parameters
    ----------
    q, k, v : array
        Inputs as for :func:`attention`, in host memory. Their values do not matter, their shape and strides do.
    backward : bool
        Also measure the gradients.
    turns : int
        How often each alternative is timed, at least 3.
    progress : bool
        Show a progress bar on standard error.
    save : bool
        Keep the winner in ``NUMBAFLASH_TUNING_DIR``, by default a folder in the user's cache.
    **options
        As for :func:`attention`.

    Returns
    -------
    CPUConfig
        The winner, which ``config=`` takes as well.

    Raises
    ------
    TypeError, ValueError
        As :func:`attention`, and for ``turns``.

    Warns
    -----
    UserWarning
        Where the winner could not be kept.

    Examples
    --------
    >>> import numpy as np, numbaflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 300, 32), dtype=np.float32)
    >>> config = numbaflash.autotune(q, k, v, turns=3, progress=False, save=False)
    >>> out = numbaflash.attention(q, k, v, backend="cpu", config=config)
    """
    import warnings

    from . import api
    from .cpu import backward as cpu_backward
    from .cpu import forward as cpu_forward
    from .cpu.threads import get_num_threads
    from .problem import make_problem

    if type(turns) is not int or turns < 3:
        raise ValueError(f"turns must be an integer, at least 3, not {turns!r}")
    options = options | {"backend": "cpu"}
    problem = make_problem(q, k, v, api._options(options))
    if problem.home.device is not None:
        raise ValueError("autotune measures the CPU backend; q lies on a GPU")
    out, lse = api.attention(q, k, v, return_lse=True, **options | {"config": None})
    plain = problem._replace(config=DEFAULT)
    shape = cpu_forward._shape(plain)
    directions = {
        "forward": (
            cpu_forward.few_queries(shape), cpu_forward.tile_sizes(plain),
            lambda config: lambda: api.attention(q, k, v, **options | {"config": config}),
        )
    }
    if backward:
        directions["backward"] = (
            False, cpu_backward.tile_sizes(plain),
            lambda config: lambda: api.attention_backward(out, q, k, v, out, lse, **options | {"config": config}),
        )
    bar = _Bar(3 * turns * len(directions), progress)
    winners = {}
    try:
        for direction, (few, sizes, make) in directions.items():
            calls = {config: make(config) for config in (DEFAULT, *candidates(direction, few, sizes))}
            for call in calls.values():
                call()
            winners[direction] = fastest(calls, turns, bar.step)
    finally:
        bar.close()
    if save:
        try:
            for direction, config in winners.items():
                store(situation(direction, problem, get_num_threads()), config)
        except OSError as error:
            warnings.warn(f"the tuned configuration could not be kept: {error}", stacklevel=2)
    found = {
        name: size for config in winners.values() for name, size in asdict(config).items() if size is not None
    }
    return CPUConfig(**found)
