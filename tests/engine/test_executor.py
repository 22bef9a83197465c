"""Waiting for a step that may never end."""

import threading

import pytest
import torch

from chunkcache import EngineError
from chunkcache.engine.executor import StepExecutor, _HostTokens
from chunkcache.engine.picker import TokenPicker
from chunkcache_testing.fake_engine import FakeEngine, counted, tokens_of


class _Never:
    """An event of a device that waits for another one for ever."""

    def query(self) -> bool:
        return False


def _lost() -> None:
    raise EngineError("process 1 has ended")


def _engine(check) -> FakeEngine:
    fake = FakeEngine()
    fake.engine._executor = StepExecutor(fake.runner, TokenPicker(), overlap=False, check=check)
    return fake


def test_a_step_that_runs_is_given_up_when_it_cannot_end() -> None:
    fake = _engine(_lost)
    others = threading.Event()
    fake.runner.before = lambda number: others.wait()
    request = fake.add([1, 2, 3])
    try:
        with pytest.raises(EngineError, match="process 1 has ended; this ended all 1 requests"):
            fake.run()
    finally:
        others.set()
    assert isinstance(request.error, EngineError)
    fake.engine.check_accounts()


def test_tokens_on_their_way_are_given_up_when_they_cannot_come(monkeypatch) -> None:
    tokens = _HostTokens(torch.zeros(1, dtype=torch.int64))
    monkeypatch.setattr(tokens, "_event", _Never())
    with pytest.raises(EngineError, match="process 1 has ended"):
        tokens.wait(_lost)


def test_tokens_of_a_device_that_was_broken_off_are_none() -> None:
    with pytest.raises(EngineError, match="process 1 has ended"):
        _HostTokens(torch.zeros(1, dtype=torch.int64)).wait(_lost)


def test_a_device_that_fails_afterwards_fails_the_step(monkeypatch) -> None:
    def fail(self, check) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(_HostTokens, "wait", fail)
    fake = FakeEngine()
    fake.add([1, 2, 3])
    with pytest.raises(EngineError, match="the model step failed: RuntimeError: an illegal"):
        fake.run()


def test_a_check_that_finds_nothing_changes_nothing() -> None:
    fake = _engine(lambda: None)
    request = fake.add([1, 2, 3])
    fake.run()
    assert tokens_of(request) == counted([1, 2, 3])
