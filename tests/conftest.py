"""The hypothesis budget and where the shared data lies."""

import os
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# CHUNKCACHE_HYPOTHESIS_EXAMPLES: examples per property, more for a long hunt.
hypothesis.settings.register_profile(
    "budget",
    max_examples=int(os.environ.get("CHUNKCACHE_HYPOTHESIS_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("budget")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240219)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of traces and prompts from outside the project, or a skip where it is absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("CHUNKCACHE_SHARED_DATA", beside))
    if not path.is_dir():
        pytest.skip(f"no shared data at {path}; CHUNKCACHE_SHARED_DATA names its folder")
    return path
