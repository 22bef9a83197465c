"""The choice of a device, without one."""

import numpy as np
import pytest
import torch

from chunkcache import InvalidConfigError
from chunkcache.engine import LLM
from chunkcache.engine.device import resolve_device, to_device
from chunkcache.engine.graph_runner import row_counts


@pytest.mark.parametrize("device", ["tpu", "meta", 3.5, "cpu:x", None])
def test_other_devices_are_refused(device) -> None:
    with pytest.raises(InvalidConfigError, match="allowed is 'cpu', 'cuda' or 'cuda:N'"):
        resolve_device(device)


def test_a_missing_cuda_device_is_named(llama, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidConfigError, match="torch finds no CUDA device"):
        LLM(llama, device="cuda")


def test_the_cpu_is_a_device(llama) -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert LLM(llama, device="cpu", chunk_size=16, capacity=8).cache.device == "cpu"


def test_arrays_reach_the_cpu_as_they_are() -> None:
    array = np.arange(6)
    assert to_device(array, torch.device("cpu")).data_ptr() == array.ctypes.data


@pytest.mark.parametrize("max_rows", [1, 2, 5, 16, 33, 64, 257])
def test_steps_are_recorded_for_every_number_of_rows(max_rows) -> None:
    counts = row_counts(max_rows)
    assert counts == sorted(set(counts))
    assert counts[-1] == max_rows
    # At most 16 rows, or half of the rows, are computed for nothing.
    for rows in range(1, max_rows + 1):
        recorded = next(count for count in counts if count >= rows)
        assert recorded < max(2 * rows, rows + 32)
