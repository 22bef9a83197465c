"""Drawing on the logits' device picks what drawing on the host picks."""

import numpy as np
import pytest
import torch

from chunkcache.engine import SamplingParams
from chunkcache.engine.device_sampler import sample_rows
from chunkcache.engine.sampler import sample
from chunkcache_testing.devices import DEVICES

PARAMS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_k": 5000},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.5, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"temperature": 1.0, "top_p": 1e-9},
]


def on_host(logits: torch.Tensor, params: list[SamplingParams], draws: list[float]) -> list[int]:
    rows = logits.double().numpy()
    return [sample(row.copy(), p, draw) for row, p, draw in zip(rows, params, draws, strict=True)]


def rows_of(count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return (3 * torch.randn(count, size, generator=generator)).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", PARAMS)
def test_each_kind_of_distribution(given, dtype, device) -> None:
    logits = rows_of(40, 200, dtype)
    params = [SamplingParams(**given)] * 40
    draws = np.random.default_rng(1).random(40).tolist()
    found = sample_rows(logits.to(device), params, draws)
    assert found.tolist() == on_host(logits, params, draws)


def test_rows_have_their_own_parameters() -> None:
    logits = rows_of(len(PARAMS), 100, torch.float32)
    params = [SamplingParams(**given) for given in PARAMS]
    draws = np.random.default_rng(2).random(len(PARAMS)).tolist()
    together = sample_rows(logits, params, draws).tolist()
    assert together == on_host(logits, params, draws)
    for row, token in enumerate(together):
        alone = sample_rows(logits[row : row + 1], params[row : row + 1], draws[row : row + 1])
        assert alone.tolist() == [token]


def test_of_equal_logits_the_lower_ids_are_kept() -> None:
    logits = torch.zeros(5, 9)
    params = [SamplingParams(temperature=1.0, top_k=3)] * 5
    draws = [0.0, 0.2, 0.4, 0.7, 0.999]
    assert sample_rows(logits, params, draws).tolist() == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("draw", [0.0, np.nextafter(1, 0)])
def test_the_ends_of_the_range(draw) -> None:
    logits = rows_of(6, 50, torch.float32)
    params = [SamplingParams(temperature=1.0)] * 6
    assert sample_rows(logits, params, [draw] * 6).tolist() == on_host(logits, params, [draw] * 6)


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 3] = 1.0
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)]
    assert sample_rows(logits, params, [0.0, 0.9]).tolist() == [3, 3]
