"""A tiny random Llama in a folder, and options that are complete."""

from pathlib import Path
from typing import Any

import pytest

from chunkcache.cli.serve_bench.options import BenchOptions
from chunkcache.cli.serve_bench.workload import Row
from chunkcache_testing.tiny_models import CONFIGS, make_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A saved model without a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    make_model(CONFIGS["llama"]()).save_pretrained(folder)
    return folder


@pytest.fixture
def make_options(model_folder: Path):
    """Make options for small runs of our two halves; any of them may be given."""

    def make(**changes: Any) -> BenchOptions:
        defaults: dict[str, Any] = {
            "device": "cpu",
            "model": str(model_folder),
            "dtype": "float32",
            "rows": (Row(64, 64, 8, 0.1),),
            "trace": None,
            "trace_format": None,
            "speed": 1.0,
            "scale": 1.0,
            "num_requests": 4,
            "max_trace_requests": None,
            "num_prefixes": 1,
            "seed": 0,
            "throughput_runs": 1,
            "repeats": 1,
            "contenders": ("on", "off"),
            "search": False,
            "latency_limit_ms": 1e4,
            "tolerance": 0.1,
            "max_trials": 6,
            "search_seconds": 10.0,
            "time_limit": None,
            "sample": 2,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "chunk_size": 16,
            "capacity_bytes": None,
        }
        return BenchOptions(**{**defaults, **changes})

    return make
