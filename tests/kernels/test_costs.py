"""The constants of devices: where they are kept, and the search for them."""

from dataclasses import replace

import pytest

from chunkcache.errors import KernelError
from chunkcache.kernels.costs import costs_file, keep_costs, read_costs
from chunkcache.kernels.tune import CONSTANTS, search
from chunkcache.kernels.work import DeviceCosts

NAME = "NVIDIA Some/Device 9"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_constants_are_kept_by_the_name_of_the_device():
    assert read_costs(NAME, 108) is None
    costs = DeviceCosts(num_blocks=108, item=400.0)
    path = keep_costs(NAME, costs)
    assert path == costs_file(NAME)
    assert path.name == "nvidia-some-device-9.json"
    assert read_costs(NAME, 108) == costs
    assert read_costs("NVIDIA Other", 108) is None


def test_a_smaller_device_of_the_name_has_its_own_blocks():
    keep_costs(NAME, DeviceCosts(num_blocks=108))
    assert read_costs(NAME, 42).num_blocks == 42


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"num_blocks": 1, "item": 2, "row_tile": 3, "partial_row": -4}']
)
def test_a_broken_file_is_named(text):
    costs_file(NAME).parent.mkdir(parents=True)
    costs_file(NAME).write_text(text)
    with pytest.raises(KernelError, match=r"nvidia-some-device-9.json.*chunkcache tune"):
        read_costs(NAME, 1)


def test_the_search_finds_the_best_constants():
    target = DeviceCosts(item=600.0, row_tile=0.15, partial_row=4.0)

    def seconds(costs):
        ratios = (getattr(costs, name) / getattr(target, name) for name in CONSTANTS)
        return 1.0 + sum((ratio + 1 / ratio - 2) for ratio in ratios)

    found = list(search(DeviceCosts(item=100.0, row_tile=0.9, partial_row=1.0), seconds))
    times = [time for _, time in found]
    assert times == sorted(times, reverse=True)
    best, _ = found[-1]
    for name in CONSTANTS:
        assert getattr(best, name) == pytest.approx(getattr(target, name), rel=0.3)


def test_noise_moves_no_constant():
    times = iter([1.0, *[0.999] * 100])
    start = DeviceCosts()
    assert list(search(start, lambda _: next(times))) == [(start, 1.0)]
    assert replace(start) == start
