"""From a kernel to PTX and to machine code, without a GPU, with a cache.

`compile_ptx` gives the text that the emulator runs, `compile_cubin` the machine code that a driver loads and
what the assembler said about it (`Resources`).  Both keep results in memory and on disk; a *bundle* carries
machine code to a computer that has only a driver: `save_bundle` here, and there `load_bundle`, or its path in the
environment variable ``NUMBAFLASH_BUNDLE``.

>>> from numba import cuda, types
>>> @cuda.jit
... def clear(x):
...     x[cuda.grid(1)] = 0
>>> cubin = compile_cubin(clear, (types.float32[::1],), "sm_80")       # doctest: +SKIP
>>> cubin.resources.registers, cubin.resources.spill_stores            # doctest: +SKIP
(8, 0)
"""
import functools
import importlib.util
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from numbaflash.cuda import fingerprint, store

# --- architectures ------------------------------------------------------------------------------------


class Architecture(NamedTuple):
    """A compilation target: its name, and the same as Numba wants it."""

    name: str
    capability: tuple


ARCHITECTURES = {
    name: Architecture(name, capability) for name, capability in {
        "sm_75": (7, 5), "sm_80": (8, 0), "sm_86": (8, 6), "sm_87": (8, 7), "sm_89": (8, 9),
        "sm_90": (9, 0), "sm_90a": (9, 0, "a"), "sm_100": (10, 0), "sm_100a": (10, 0, "a"),
        "sm_103": (10, 3), "sm_103a": (10, 3, "a"), "sm_120": (12, 0), "sm_120a": (12, 0, "a"),
        "sm_121": (12, 1), "sm_121a": (12, 1, "a"),
    }.items()
}


def parse_arch(arch: "str | tuple | Architecture") -> Architecture:
    """An `Architecture` from ``"sm_90a"``, ``(9, 0)``, ``(9, 0, "a")`` or an `Architecture`.

    Raises
    ------
    ValueError
        If there is no such architecture.
    """
    if isinstance(arch, Architecture):
        return arch
    name = "sm_" + "".join(map(str, arch)) if isinstance(arch, tuple) else arch
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"arch must be one of {known}, or its (major, minor) tuple; got {arch!r}")
    return ARCHITECTURES[name]


# --- what the assembler reports -----------------------------------------------------------------------


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of a multiprocessor, from the assembler's own report.

    Attributes
    ----------
    registers : int
        Per thread.
    stack, spill_stores, spill_loads : int
        Bytes of local memory per thread.  A flash kernel has none.
    static_shared : int
        Bytes per block, without the dynamic shared memory of the launch.
    barriers : int
        Named barriers.
    warnings : tuple of str
        Such as C7508 and C7512, where the assembler gave up on setmaxnreg or serialised wgmma.
    """

    registers: int
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    static_shared: int = 0
    barriers: int = 0
    warnings: tuple = ()


FIELDS = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "static_shared": r"(\d+) bytes smem",
    "barriers": r"used (\d+) barriers",
}


def parse_resources(log: str) -> Resources:
    """Read the log of the linker (``-v``) of a module with one kernel.

    Raises
    ------
    ValueError
        If the log does not tell the registers: then nothing else in it can be believed.
    """
    found = {name: re.search(pattern, log) for name, pattern in FIELDS.items()}
    if found["registers"] is None:
        raise ValueError(f"the linker's log does not report registers:\n{log}")
    numbers = {name: int(match.group(1)) for name, match in found.items() if match}
    warnings = [line.strip() for line in log.splitlines() if re.search(r"\bC75\d\d\b|\bwarning\b", line)]
    return Resources(**numbers, warnings=tuple(warnings))


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel.

    Attributes
    ----------
    code : bytes
        The file to load into the driver.
    entry : str
        Name of the kernel in it.
    arch : str
        What it was compiled for.
    resources : Resources
    identity : str
        Digest of what was asked for: sources, function, signature, architecture and options.  Empty where the
        function cannot be described (see `fingerprint.Unstable`).
    """

    code: bytes
    entry: str
    arch: str
    resources: Resources
    identity: str


# --- compiling ----------------------------------------------------------------------------------------

_memory: dict = {}              # identity, or the function itself -> PTX text or Cubin
_lock = threading.RLock()       # Numba compiles one function at a time anyway


def require_numba_cuda() -> None:
    """Raise ImportError unless the package numba-cuda is there.

    Without it ``from numba import cuda`` still succeeds: it gives Numba's old built-in target, which compiles
    something else, for fewer architectures.
    """
    if importlib.util.find_spec("numba_cuda") is None:
        raise ImportError("CUDA kernels need the package numba-cuda: pip install 'numbaflash[cuda13]' "
                          "(or numbaflash[cuda12] for drivers of CUDA 12)")


def compile_ptx(function, signature: tuple, arch: "str | tuple", *,
                launch_bounds: "int | tuple | None" = None, fastmath: bool = False,
                lineinfo: bool = False) -> str:
    """PTX of a kernel.

    Parameters
    ----------
    function : function or dispatcher
        A kernel; ``@cuda.jit`` or not.  Device functions it calls must be ``inline="always"``.
    signature : tuple of numba types
        Types of its arguments.
    arch : str or tuple
        Such as ``"sm_80"`` or ``(9, 0, "a")``.
    launch_bounds : int or tuple of int, optional
        Most threads per block, fewest blocks per multiprocessor, most blocks per cluster.
    fastmath : bool
        Lets the compiler assume that there is no infinity, which flash kernels do not allow.
    lineinfo : bool
        Keep ``.loc`` directives that point to the Python source.

    Returns
    -------
    str

    Raises
    ------
    ImportError
        If numba-cuda is not installed.
    ValueError
        If the architecture is unknown.
    """
    options = {"launch_bounds": launch_bounds, "fastmath": fastmath, "lineinfo": lineinfo}
    request = _Request("ptx", function, tuple(signature), parse_arch(arch), options)
    return _cached(request, _build_ptx, lambda text: ({}, text.encode()), lambda header, data: data.decode())


def compile_cubin(function, signature: tuple, arch: "str | tuple", *,
                  launch_bounds: "int | tuple | None" = None, fastmath: bool = False,
                  lineinfo: bool = False, max_registers: "int | None" = None) -> Cubin:
    """Machine code of a kernel, with its resources.

    Links LTO-IR with link-time optimisation: linking PTX makes relocatable code, in which the assembler
    ignores setmaxnreg and serialises wgmma.

    Parameters
    ----------
    function, signature, arch, launch_bounds, fastmath, lineinfo
        As in `compile_ptx`.
    max_registers : int, optional
        Per thread.

    Returns
    -------
    Cubin

    Raises
    ------
    ImportError
        If numba-cuda is not installed.
    ValueError
        If the architecture is unknown.
    """
    options = {"launch_bounds": launch_bounds, "fastmath": fastmath, "lineinfo": lineinfo,
               "max_registers": max_registers}
    request = _Request("cubin", function, tuple(signature), parse_arch(arch), options)
    return _cached(request, _build_cubin, _cubin_record, _cubin_from_record)


class _Request(NamedTuple):
    kind: str
    function: object
    signature: tuple
    arch: Architecture
    options: dict

    def identity(self) -> str:
        """What is asked for, whatever compiles it; empty if it cannot be described."""
        try:
            function = fingerprint.function_digest(self.function, lines=self.options["lineinfo"])
            options = sorted(self.options.items())
            return fingerprint.digest(self.kind, fingerprint.sources(), function, self.signature,
                                      self.arch.name, options)
        except fingerprint.Unstable:
            return ""


def _cached(request, build, to_record, from_record):
    identity = request.identity()
    name = identity or (request.kind, request.function, request.signature, request.arch,
                        str(sorted(request.options.items())))
    with _lock:
        if name not in _memory:
            _load_named_bundle()
        if name in _memory:
            return _memory[name]
        require_numba_cuda()
        keep = identity and not fingerprint.sources_edited()
        key = fingerprint.digest(identity, _toolchain()) if keep else None
        record = store.read(key) if key else None
        if record is None:
            result = build(request, identity)
            if key:
                store.write(key, *to_record(result))
        else:
            result = from_record(*record)
        _memory[name] = result
        return result


def _toolchain() -> str:
    from numbaflash.cuda.inlining import naming_what_is_missing

    with naming_what_is_missing():
        return fingerprint.toolchain()


@functools.cache
def _load_named_bundle() -> None:
    path = os.environ.get("NUMBAFLASH_BUNDLE")
    if path:
        load_bundle(path)


def _numba_arguments(request) -> dict:
    return {"pyfunc": getattr(request.function, "py_func", request.function), "sig": request.signature,
            "cc": request.arch.capability, "fastmath": request.options["fastmath"],
            "lineinfo": request.options["lineinfo"], "launch_bounds": request.options["launch_bounds"],
            "device": False, "abi": "numba"}


def _build_ptx(request, identity) -> str:
    from numba import cuda

    from numbaflash.cuda.inlining import compiling_for

    with compiling_for(request.arch.capability):
        text, _ = cuda.compile_ptx(**_numba_arguments(request))
    return text


def _build_cubin(request, identity) -> Cubin:
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba import cuda

    from numbaflash.cuda.inlining import compiling_for

    with compiling_for(request.arch.capability):
        code, _ = cuda.compile(**_numba_arguments(request), output="ltoir")
    options = LinkerOptions(arch=request.arch.name, link_time_optimization=True, ptxas_options=["-v"],
                            lineinfo=request.options["lineinfo"] or None,
                            max_register_count=request.options["max_registers"])
    linker = Linker(ObjectCode.from_ltoir(code), options=options)
    cubin = linker.link("cubin")
    log = linker.get_info_log() + linker.get_error_log()
    entry = re.search(r"Compiling entry function '([^']+)'", log).group(1)
    return Cubin(bytes(cubin.code), entry, request.arch.name, parse_resources(log), identity)


# --- files --------------------------------------------------------------------------------------------


def save_bundle(path: "str | PathLike", entries: Iterable[Cubin]) -> None:
    """Write machine code to one file, for computers that have a driver but no compiler.

    Parameters
    ----------
    path : path
        Replaced as a whole, or not at all.
    entries : iterable of Cubin
        From `compile_cubin`.

    Raises
    ------
    ValueError
        If an entry has no identity: its kernel captures something that means nothing in another process.
    """
    entries = list(entries)
    for cubin in entries:
        if not cubin.identity:
            raise ValueError(f"entries: {cubin.entry} captures values that have no description, so no other "
                             "process can ask for it")
    records = [store.pack(*_cubin_record(cubin)) for cubin in entries]
    header = {"sources": fingerprint.sources(), "sizes": [len(record) for record in records]}
    store.write_file(Path(path), store.pack(header, b"".join(records)))


def load_bundle(path: "str | PathLike") -> "list[Cubin]":
    """Read a bundle; from then on `compile_cubin` answers its kernels from it.

    Returns
    -------
    list of Cubin

    Raises
    ------
    ValueError
        If the file is damaged, or was made by another version of this package: none of its kernels would
        be found.
    """
    try:
        header, payload = store.unpack(Path(path).read_bytes())
    except store.CorruptRecord as error:
        raise ValueError(f"path: {path} is {error}") from None
    if header["sources"] != fingerprint.sources():
        raise ValueError(f"path: {path} was made by another version of numbaflash; make it again with this")
    entries, start = [], 0
    for size in header["sizes"]:
        entries.append(_cubin_from_record(*store.unpack(payload[start:start + size])))
        start += size
    with _lock:
        _memory.update({cubin.identity: cubin for cubin in entries})
    return entries


def _cubin_record(cubin: Cubin) -> "tuple[dict, bytes]":
    return {"entry": cubin.entry, "arch": cubin.arch, "identity": cubin.identity,
            "resources": asdict(cubin.resources)}, cubin.code


def _cubin_from_record(header: dict, code: bytes) -> Cubin:
    resources = dict(header["resources"], warnings=tuple(header["resources"]["warnings"]))
    return Cubin(code, header["entry"], header["arch"], Resources(**resources), header["identity"])
