"""What the contestants of all benchmarks have in common: a name, needs, and calls that may not work out."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

OURS = "numbaflash"


class Unsupported(Exception):
    """The contestant cannot do this case; the message says why in a few words."""


class Contestant:
    """One whose attention is measured.

    Attributes
    ----------
    name : str
    modules : tuple of str
        What must be installed.
    """

    name = ""
    modules: tuple[str, ...] = ()

    @classmethod
    def lacking(cls) -> list[str]:
        """Modules it needs that are not installed."""
        return [module for module in cls.modules if find_spec(module) is None]


def attempt(prepare: Callable[[], Callable[[], Any]], finish: Callable[[Any], Any]) -> tuple[Callable[[], Any], Any]:
    """The callable that `prepare` gives and its first result, finished; Unsupported, whatever goes wrong."""
    try:
        call = prepare()
        return call, finish(call())
    except Unsupported:
        raise
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise Unsupported(f"{type(error).__name__}: {first_line[:100]}") from error
