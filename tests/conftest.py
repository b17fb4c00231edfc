"""Shared set-up: tests/support on the import path, backends to run on, and how hard hypothesis tries."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "support"))

from backends import BACKENDS  # noqa: E402

COMMON = dict(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.register_profile("default", max_examples=30, **COMMON)
settings.register_profile("ci", max_examples=30, derandomize=True, **COMMON)
settings.register_profile("thorough", max_examples=1000, **COMMON)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") == "true" else "default")
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What runs on the emulator by default: tests marked `emulated`, with the parameters that the mark names."""
    for item in items:
        backend = getattr(item, "callspec", None) and item.callspec.params.get("backend")
        if getattr(backend, "name", None) != "emulator" or "backend" not in item.fixturenames:
            continue
        mark = item.get_closest_marker("emulated")
        if mark is None or not (mark.args == () or any(name in item.name for name in mark.args)):
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(scope="session", params=BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    """Every backend that can run here, one after the other."""
    return request.param
