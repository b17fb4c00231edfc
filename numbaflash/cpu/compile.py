"""Compile kernels ahead of their calls, once per set of constants, and keep them on disk for the next process.

A kernel takes its compile-time constants as one argument, a :class:`Static`: a Numba type that carries numbers
and flags, and no value at run time. Reading ``static.lanes`` in a kernel gives a literal, so branches on
it vanish, and intrinsics read it from the type. It passes through calls of jitted helpers unchanged, which plain
literal arguments do not.
"""

import hashlib
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core.imputils import lower_getattr_generic
from numba.core.pythonapi import NativeValue
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, models, register_model, unbox

Constant = int | bool | float

KERNEL_OPTIONS = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
HELPER_OPTIONS = KERNEL_OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


class Static(types.Type):
    """A Numba type that is nothing but named compile-time constants.

    Examples
    --------
    >>> from numbaflash.cpu.compile import Static
    >>> Static(lanes=8, general=False)["lanes"]
    8
    """

    def __init__(self, **constants: Constant) -> None:
        self.constants = tuple(sorted(constants.items()))
        super().__init__("Static(" + ", ".join(f"{name}={value!r}" for name, value in self.constants) + ")")

    @property
    def key(self) -> tuple:
        return tuple((name, type(value).__name__, value) for name, value in self.constants)

    def __getitem__(self, name: str) -> Constant:
        return dict(self.constants)[name]

    def replace(self, **changes: Constant) -> "Static":
        """The same constants with some changed or added."""
        return Static(**(dict(self.constants) | changes))


register_model(Static)(models.OpaqueModel)


@unbox(Static)
def _unbox_static(typ, obj, c):
    return NativeValue(c.context.get_dummy_value())


@infer_getattr
class _StaticAttributes(AttributeTemplate):
    key = Static

    def generic_resolve(self, typ: Static, attribute: str) -> types.Type | None:
        value = dict(typ.constants).get(attribute)
        if value is None:
            return None
        return types.float64 if isinstance(value, float) else types.literal(value)


@lower_getattr_generic(Static)
def _lower_static_attribute(context, builder, typ, value, attribute):
    constant = typ[attribute]
    kind = {bool: types.boolean, int: types.intp, float: types.float64}[type(constant)]
    return context.get_constant(kind, constant)


def helper(function: Callable) -> Callable:
    """Jit a function that only kernels call: no wrappers for Python, which cost compile time."""
    return numba.njit(**HELPER_OPTIONS)(function)


@cache
def build_id() -> int:
    """A hash of the package's sources that CPU kernels are made of.

    Numba's cache looks at the file of the kernel alone; this goes into the key so that a change in any helper's
    file is seen.
    """
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in (package, package / "cpu"):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return int(digest.hexdigest()[:15], 16)


class Kernel:
    """A function whose last argument is a :class:`Static`, compiled once per signature.

    The compiled entry points are plain C functions of Python: a call costs a fraction of a microsecond.

    Attributes
    ----------
    entries : dict
        Entry point by (argument types, Static): the variants this process has asked for.
    """

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.entries: dict[tuple, Callable] = {}
        self._dispatcher: Any = None
        self._lock = threading.Lock()

    def specialise(self, arguments: tuple[types.Type, ...], static: Static) -> Callable:
        """The entry point for these argument types and constants, compiled or loaded on first use.

        Call it as ``entry(*arguments, None)``: the Static carries no value.
        """
        key = (arguments, static)
        entry = self.entries.get(key)
        if entry is None:
            with self._lock:
                entry = self.entries.get(key)
                if entry is None:
                    entry = self.entries[key] = self._compile((*arguments, static.replace(build=build_id())))
        return entry

    def assembly(self, arguments: tuple[types.Type, ...], static: Static) -> str:
        """The machine code of a variant as text, always compiled anew (code from the disk has none)."""
        signature = (*arguments, static)
        fresh = numba.njit(**KERNEL_OPTIONS)(self.function)
        fresh.compile(signature)
        return fresh.overloads[signature].library.get_asm_str()

    def _compile(self, signature: tuple[types.Type, ...]) -> Callable:
        if self._dispatcher is None:
            self._dispatcher = _cached_dispatcher(self.function)
        try:
            self._dispatcher.compile(signature)
            return self._dispatcher.overloads[signature].entry_point
        except Exception:  # a full disk, a corrupt file: do without the cache, where a real error shows again
            fresh = numba.njit(**KERNEL_OPTIONS)(self.function)
            fresh.compile(signature)
            return fresh.overloads[signature].entry_point


def _cached_dispatcher(function: Callable) -> Any:
    try:
        return numba.njit(cache=True, **KERNEL_OPTIONS)(function)
    except RuntimeError:  # no folder to write a cache to
        return numba.njit(**KERNEL_OPTIONS)(function)
