"""The files of the cache: whole records or nothing, whatever else happens to them."""
import multiprocessing
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numbaflash.cuda import store

TEXT = st.text(max_size=20)
HEADERS = st.dictionaries(TEXT, TEXT | st.integers() | st.booleans() | st.none() | st.lists(TEXT, max_size=3))


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBAFLASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@given(HEADERS, st.binary(max_size=200))
def test_a_record_comes_back_as_it_was(header, payload):
    assert store.unpack(store.pack(header, payload)) == (header, payload)


@given(st.binary(max_size=200))
def test_anything_else_is_corrupt_and_nothing_worse(content):
    with pytest.raises(store.CorruptRecord):
        store.unpack(content)


@given(HEADERS, st.binary(max_size=50), st.data())
def test_one_changed_bit_is_noticed(header, payload, data):
    record = bytearray(store.pack(header, payload))
    record[data.draw(st.integers(0, len(record) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(store.CorruptRecord):
        store.unpack(bytes(record))


def test_what_was_never_written_is_absent(directory):
    assert store.read("0123") is None
    assert store.write("0123", {"a": 1}, b"x") and store.read("0123") == ({"a": 1}, b"x")


def test_a_failed_write_leaves_nothing_behind(directory, monkeypatch):
    def refuse(source, target):
        raise OSError(28, "No space left on device")

    store.write("0123", {}, b"old")
    monkeypatch.setattr(store.os, "replace", refuse)
    assert not store.write("0123", {}, b"new")
    assert store.read("0123") == ({}, b"old")
    assert len([path for path in directory.rglob("*") if path.is_file()]) == 1


def test_an_empty_directory_name_switches_the_disk_cache_off(monkeypatch):
    monkeypatch.setenv("NUMBAFLASH_CACHE_DIR", "")
    assert store.cache_directory() is None
    assert not store.write("0123", {}, b"")
    assert store.read("0123") is None


def test_the_default_directory_is_that_of_the_platform(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBAFLASH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert store.cache_directory() == tmp_path / "numbaflash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.cache_directory() == tmp_path / ".cache" / "numbaflash"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert store.cache_directory() == tmp_path / "Library" / "Caches" / "numbaflash"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert store.cache_directory() == tmp_path / "local" / "numbaflash"


def hammer(directory, writer, rounds):
    """Write and read one key; a reader must see a whole record of some writer, or none."""
    os.environ["NUMBAFLASH_CACHE_DIR"] = directory
    for turn in range(rounds):
        payload = bytes([writer]) * (1 + 5000 * (turn % 7))
        assert store.write("abcdef", {"writer": writer, "size": len(payload)}, payload)
        header, content = store.read("abcdef")
        assert content == bytes([header["writer"]]) * header["size"]


def test_concurrent_writers_leave_whole_records(directory):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=hammer, args=(str(directory), writer, 200)) for writer in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert [path.name for path in directory.rglob("*") if path.is_file()] == ["cdef"]
