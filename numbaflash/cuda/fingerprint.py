"""What compiled code depends on, as a digest: the name of a cache entry.

A cache that misses a dependency runs stale code, so nothing is assumed: *every* source file of the folders that
kernels are made of counts, so do the versions of the compilers, and of a function from elsewhere its bytecode,
closure and the globals it names.  What cannot be described in full raises `Unstable`; its code is then kept in
memory only.
"""
import functools
import hashlib
import sys
import time
import types as python_types
from pathlib import Path

import numpy as np
from numba.core import types

PACKAGE = __name__.partition(".")[0]
FOLDERS = (".", "cuda")
"""Of this package, what kernels are made of; a kernel in another one (``bench``) counts like a user's."""
TRUSTED = {PACKAGE, "numba", "numba_cuda", "llvmlite", "numpy", "math", "operator", "builtins", "cuda"}
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), np.dtype, types.Type)
HOW_NUMBA_LINKS = {"lto"}
"""Options of a dispatcher whose default depends on the libraries that are installed, and not what `compile` makes: a
machine with only a driver must ask for the same kernels as the one that compiled them."""
IMPORTED = time.time()


class Unstable(Exception):
    """A function depends on a value that has no description stable between processes."""


def digest(*parts: object) -> str:
    """sha256 of a sequence of strings, each delimited."""
    hashed = hashlib.sha256()
    for part in parts:
        text = str(part).encode()
        hashed.update(f"{len(text)}:".encode() + text)
    return hashed.hexdigest()


@functools.lru_cache(maxsize=None)
def sources(root: "str | None" = None) -> str:
    """Digest of the names and contents of all Python files below `root`: by default, of what kernels are made of."""
    directory = Path(__file__).parent.parent if root is None else Path(root)
    files = _files() if root is None else sorted(directory.rglob("*.py"))
    if not files:
        raise Unstable(f"no source files in {directory}")
    hashed = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        hashed.update(f"{file.relative_to(directory).as_posix()}:{len(content)}:".encode() + content)
    return hashed.hexdigest()


def sources_edited() -> bool:
    """Whether a file of this package changed since the import: then what runs is not what `sources` read."""
    return any(file.stat().st_mtime > IMPORTED for file in _files())


def _files() -> list[Path]:
    package = Path(__file__).parent.parent
    return [file for folder in FOLDERS for file in sorted((package / folder).glob("*.py"))]


@functools.lru_cache(maxsize=None)
def _modules() -> frozenset[str]:
    """Names of the modules whose text `sources` covers."""
    package = Path(__file__).parent.parent
    parts = ((PACKAGE, *file.relative_to(package).with_suffix("").parts) for file in _files())
    return frozenset(".".join(names).removesuffix(".__init__") for names in parts)


def _counts_already(module: str) -> bool:
    """Whether a module's text or version is part of the digest anyway."""
    top = module.partition(".")[0]
    return module in _modules() if top == PACKAGE else top in TRUSTED


@functools.lru_cache(maxsize=None)
def toolchain() -> str:
    """The versions that decide what a kernel is compiled to."""
    import llvmlite
    import numba
    import numba_cuda
    from cuda.bindings import nvjitlink, nvvm

    return digest(sys.version_info[:2], numba.__version__, numba_cuda.__version__, llvmlite.__version__,
                  nvvm.version(), nvjitlink.version())


def function_digest(function: object, lines: bool = False) -> str:
    """Digest of a Python function, or a dispatcher, with everything that it captures and names.

    Parameters
    ----------
    function : function or dispatcher
        Functions of this package count by name and closure, as `sources` covers their text.
    lines : bool
        Whether line numbers count: they do when they are compiled in.

    Raises
    ------
    Unstable
        If the function captures or names a value that cannot be described.
    """
    return digest(_describe(function, lines, {}))


def _describe(value: object, lines: bool, seen: dict) -> str:
    """A string that differs wherever compiled code could."""
    if isinstance(value, (np.ndarray, np.generic)):             # before float, which np.float64 is
        return digest(type(value).__name__, value.dtype, value.shape, value.tobytes().hex())
    if isinstance(value, CONSTANTS):
        return f"{type(value).__module__}.{type(value).__qualname__}:{value!r}"
    if isinstance(value, (tuple, list, frozenset)):
        items = [_describe(item, lines, seen) for item in value]
        items = sorted(items) if isinstance(value, frozenset) else items
        return digest(type(value).__qualname__, getattr(value, "_fields", ""), *items)
    if isinstance(value, dict):
        return digest("dict", *(_describe(item, lines, seen) for pair in value.items() for item in pair))
    if isinstance(value, (python_types.ModuleType, type)):
        return _named(value, value.__name__)
    if isinstance(value, (python_types.BuiltinFunctionType, np.ufunc)):
        return f"builtin:{getattr(value, '__module__', None)}.{value.__name__}"
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = f"seen:{len(seen)}"           # recursion, mutual too: the position names it
    if isinstance(value, python_types.FunctionType):
        return _describe_function(value, lines, seen)
    if isinstance(getattr(value, "py_func", None), python_types.FunctionType):          # a dispatcher
        options = getattr(value, "targetoptions", {})
        plain = {name: option for name, option in options.items()
                 if isinstance(option, CONSTANTS) and name not in HOW_NUMBA_LINKS}
        return digest(type(value).__name__, _describe(plain, lines, seen),
                      _describe(value.py_func, lines, seen))
    if isinstance(getattr(value, "__wrapped__", None), python_types.FunctionType):      # an intrinsic
        return digest(type(value).__name__, _describe(value.__wrapped__, lines, seen))
    return _named(value, getattr(value, "__qualname__", None))


def _describe_function(function, lines, seen) -> str:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    captured = [_describe(item, lines, seen)
                for item in (function.__defaults__, function.__kwdefaults__, *cells)]
    module = sys.modules.get(function.__module__)
    if _counts_already(function.__module__ or "") and function.__globals__ is vars(module):     # a copy may name other globals
        where = function.__code__.co_firstlineno                    # two closures of one name
        return digest("function", function.__module__, function.__qualname__, where, *captured)
    code = function.__code__
    named = [f"{name}={_describe(function.__globals__[name], lines, seen)}"
             for name in sorted(_names(code)) if name in function.__globals__]
    return digest("function", _describe_code(code, lines), *captured, *named)


def _describe_code(code, lines) -> str:
    constants = [_describe_code(item, lines) if isinstance(item, python_types.CodeType)
                 else _describe(item, lines, {}) for item in code.co_consts]
    where = (code.co_filename, code.co_firstlineno, code.co_linetable.hex()) if lines else ()
    return digest(code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_flags,
                  code.co_argcount, code.co_kwonlyargcount, *constants, *where)


def _names(code) -> set:
    nested = [_names(item) for item in code.co_consts if isinstance(item, python_types.CodeType)]
    return set(code.co_names).union(*nested)


def _named(value, name) -> str:
    """A module, class or object of a package whose version or sources count already."""
    module = name if isinstance(value, python_types.ModuleType) else getattr(value, "__module__", None)
    if name is None or not _counts_already(module or ""):
        raise Unstable(f"{value!r} has no description that holds between processes")
    return f"{type(value).__name__}:{module}.{name}"


def _is_filled(cell) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True
