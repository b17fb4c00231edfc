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


@pytest.fixture(scope="session", params=BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    """Every backend that can run here, one after the other."""
    return request.param
