"""Tables for the terminal, JSON, and pictures."""

import json
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

BLUE, ORANGE, GREEN, GREY = "#2a6fbb", "#d9822b", "#3a8f5c", "#8a8a8a"
COLOURS = {
    "numbaflash": BLUE,
    "torch": ORANGE,
    "torch-folded": "#b5541c",
    "jax": GREEN,
    "onnxruntime": "#7b5ea7",
    "numpy": GREY,
}


class UsageError(Exception):
    """A command line that cannot be carried out; the message is for the person who wrote it."""


class Column(NamedTuple):
    """``title``, width (negative: left-aligned) and format of one column; rows are dicts by ``key``."""

    key: str
    title: str
    width: int
    format: str = ""


class Table:
    """A table that is printed line by line, as the numbers come.

    Examples
    --------
    >>> from numbaflash.bench.report import Column, Table
    >>> table = Table([Column("name", "case", -8), Column("ms", "ms", 6, ".1f")])
    >>> table.head()
    case         ms
    >>> table.row({"name": "one", "ms": 2.25})
    one         2.2
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = columns

    def head(self) -> None:
        self._print(column.title for column in self.columns)

    def row(self, row: dict[str, Any]) -> None:
        self._print(_cell(row.get(column.key), column.format) for column in self.columns)

    def _print(self, cells: Iterable[str]) -> None:
        pairs = zip(cells, self.columns)
        line = " ".join(f"{text:<{-c.width}}" if c.width < 0 else f"{text:>{c.width}}" for text, c in pairs)
        print(line.rstrip(), flush=True)


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value, form)


def check_outputs(json_file: str | None, picture: str | None) -> None:
    """Raise before the work starts if results could not be written after it."""
    for name in (json_file, picture):
        if name is not None and not Path(name).absolute().parent.is_dir():
            raise UsageError(f"the folder of {name} does not exist")
    if picture is not None:
        if not picture.endswith(".png"):
            raise UsageError(f"--plot writes PNG files; {picture} has another ending")
        if find_spec("matplotlib") is None:
            raise UsageError("--plot needs matplotlib: pip install matplotlib")


def save_json(path: str, document: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)


def axes(title: str, count: int = 1, size: tuple[float, float] = (8, 4.5)) -> tuple[Any, list[Any]]:
    """A figure with ``count`` plots side by side, drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    plots = list(figure.subplots(1, count, squeeze=False)[0])
    for plot in plots:
        plot.spines[["top", "right"]].set_visible(False)
        plot.grid(alpha=0.25)
        plot.set_axisbelow(True)
    return figure, plots


def legend(figure: Any, plots: Sequence[Any]) -> None:
    """One legend below all plots."""
    entries = {}
    for plot in plots:
        handles, labels = plot.get_legend_handles_labels()
        entries |= dict(zip(labels, handles))
    figure.legend(
        list(entries.values()), list(entries), loc="outside lower center", ncols=6, fontsize=8, frameon=False
    )


def save_picture(figure: Any, path: str) -> None:
    figure.savefig(path, dpi=130)
    print(f"wrote {path}", file=sys.stderr)
