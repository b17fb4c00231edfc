"""What a kernel is linked with besides its own PTX: the C++ of Numba's bfloat16 and float16 functions, and files
that the user names (``link=``). NVRTC compiles C++ without a GPU."""
from __future__ import annotations

import functools
import os
import re
from contextlib import contextmanager

from .calls import SYSTEM_CALLS
from .errors import UnknownInstruction
from .half_shims import SHIMS

EXTERN = re.compile(r"\.extern\s+\.func\s+(?:\([^)]*\)\s*)?([\w$]+)")
DEFINED = re.compile(r"^\s*(?:\.(?:visible|weak)\s+)*\.func\s+(?:\([^)]*\)\s*)?([\w$]+)", re.M)


@contextmanager
def whole_program():
    """Numba's code libraries give their PTX in one piece, and the list takes the files they ask for."""
    from numba.cuda.codegen import CUDACodeLibrary
    original, files = CUDACodeLibrary.get_asm_strs, []

    def joined(self, cc=None):
        files.extend(self._linking_files)
        return ["\n".join(original(self, cc))]

    CUDACodeLibrary.get_asm_strs = joined
    try:
        yield files
    finally:
        CUDACodeLibrary.get_asm_strs = original


def undefined(text):
    """Names of the functions that the PTX calls and neither defines nor the emulator knows."""
    return set(EXTERN.findall(text)) - set(DEFINED.findall(text)) - SHIMS.keys() - SYSTEM_CALLS.keys()


def with_linked(text: str, files, capability: tuple) -> str:
    """PTX with that of the linked files behind it, if it calls functions it does not define."""
    from numba.cuda.cudadrv.linkable_code import LinkableCode
    for file in files if undefined(text) else ():
        try:
            code = LinkableCode.from_path_or_obj(os.fspath(file) if isinstance(file, os.PathLike) else file)
        except OSError as error:
            raise ValueError(f"link: {file!r} cannot be read: {error}") from None
        if code.kind == "cu":
            text += "\n" + compile_cpp(code.data, code.name, capability)
        elif code.kind == "ptx":
            text += "\n" + (code.data.decode() if isinstance(code.data, bytes) else code.data)
    return text


@functools.lru_cache(maxsize=64)
def compile_cpp(source, name: str, capability: tuple) -> str:
    """CUDA C++ to PTX."""
    from cuda.bindings import nvrtc
    source = source.encode() if isinstance(source, str) else source
    _, program = nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], [])
    options = ["-arch=sm_" + "".join(map(str, capability)), "-rdc=true", *include_options(nvrtc)]
    status, = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        raise UnknownInstruction(f"the C++ that the kernel is linked with ({name}) does not compile:\n{log}")
    return _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)


def include_options(nvrtc):
    """Where CUDA's headers are: Numba brings those of the half types."""
    import numba.cuda
    from numba.cuda.cuda_paths import get_cuda_paths
    own = os.path.join(os.path.dirname(numba.cuda.__file__), "include", str(nvrtc.nvrtcVersion()[1]))
    return [f"-I{own}", f"-I{get_cuda_paths()['include_dir'].info}"]


def _text(size_of, get, program):
    buffer = bytearray(size_of(program)[1])
    get(program, buffer)
    return bytes(buffer).rstrip(b"\0").decode()
