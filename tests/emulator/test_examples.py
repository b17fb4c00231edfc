"""The examples in the docstrings of the emulator run and show what it prints."""
import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["numbaflash.emulator", "numbaflash.emulator.launching"])
def test_examples_run(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 5 and not result.failed
