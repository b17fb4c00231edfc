"""Compiled code on disk: a cache that many processes share, and the file format of bundles.

A record is a JSON header and a payload under one checksum.  Writers make a temporary file and rename it, so a
reader sees a whole record or none; whatever fails its checksum counts as absent.  No record is ever executed
or unpickled by reading it.
"""
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

MAGIC = b"numbaflash record 1\n"
DIGEST_BYTES = hashlib.sha256().digest_size


class CorruptRecord(ValueError):
    """Bytes that are not a whole record."""


def cache_directory() -> "Path | None":
    """Where compiled kernels are kept.

    ``NUMBAFLASH_CACHE_DIR`` if set (empty: no cache on disk), else ``numbaflash`` in the cache directory of
    the platform: ``%LOCALAPPDATA%``, ``~/Library/Caches``, ``$XDG_CACHE_HOME`` or ``~/.cache``.
    """
    chosen = os.environ.get("NUMBAFLASH_CACHE_DIR")
    if chosen is not None:
        return Path(chosen) if chosen else None
    try:
        home = Path.home()
    except RuntimeError:                        # no home directory at all
        return None
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    return Path(base) / "numbaflash"


def pack(header: dict, payload: bytes) -> bytes:
    """One record."""
    text = json.dumps(header, sort_keys=True).encode()
    body = len(text).to_bytes(8, "little") + text + payload
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(record: bytes) -> "tuple[dict, bytes]":
    """Header and payload of a record; raises `CorruptRecord`."""
    start = len(MAGIC) + DIGEST_BYTES
    body = record[start:]
    if record[:len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != record[len(MAGIC):start]:
        raise CorruptRecord("not a numbaflash record, or a damaged one")
    length = int.from_bytes(body[:8], "little")
    return json.loads(body[8:8 + length]), body[8 + length:]


def read(key: str) -> "tuple[dict, bytes] | None":
    """The cached record of this key, or None: absent, damaged or unreadable."""
    directory = cache_directory()
    if directory is None:
        return None
    try:
        return unpack(_path(directory, key).read_bytes())
    except (OSError, CorruptRecord):
        return None


def write(key: str, header: dict, payload: bytes) -> bool:
    """Keep a record; False where the disk does not let us, which is no error."""
    directory = cache_directory()
    if directory is None:
        return False
    try:
        write_file(_path(directory, key), pack(header, payload))
    except OSError:
        return False
    return True


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that no reader, and no crash, ever leaves half of it under its name."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _path(directory: Path, key: str) -> Path:
    return directory / key[:2] / key[2:]
