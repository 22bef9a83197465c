"""The ring of pinned buffers, over a device that is played by lists."""

from typing import Any

import pytest

from chunkcache.kernels.staging import StagingRing


class Recorder:
    """Hands out addresses and notes what is asked of it."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.live: set[int] = set()
        self.live_events: set[str] = set()

    def allocate(self, num_bytes: int) -> int:
        address = 1000 * (len(self.live) + 1)
        self.live.add(address)
        self.log.append(("allocate", num_bytes))
        return address

    def free(self, address: int) -> None:
        self.live.remove(address)

    def event(self) -> Any:
        event = f"event {len(self.live_events)}"
        self.live_events.add(event)
        return event

    def copy(self, target: int, source: int, num_bytes: int, stream: int, event: Any) -> None:
        assert event in self.live_events
        self.log.append(("copy", target, source, num_bytes, stream, event))

    def wait(self, event: Any) -> None:
        assert event in self.live_events
        self.log.append(("wait", event))

    def end(self, event: Any) -> None:
        self.live_events.remove(event)


def sent(device: Recorder) -> list[int]:
    return [entry[2] for entry in device.log if entry[0] == "copy"]


def test_buffers_take_turns():
    device = Recorder()
    ring = StagingRing(device, num_words=8, num_buffers=3)
    for _ in range(5):
        ring.take()
        ring.send(target=7, num_words=2, stream=1)
    assert sent(device) == [1000, 2000, 3000, 1000, 2000]


def test_a_buffer_is_written_again_only_after_its_last_copy():
    device = Recorder()
    ring = StagingRing(device, num_words=8, num_buffers=2)
    for _ in range(2):
        ring.take()
        ring.send(target=7, num_words=2, stream=1)
    assert ("wait", "event 0") not in device.log
    assert [ring.take(), ring.take()] == [1000, 1000]
    assert [entry for entry in device.log if entry[0] == "wait"] == [("wait", "event 0")]


def test_a_buffer_that_is_not_sent_is_taken_again_without_a_wait():
    device = Recorder()
    ring = StagingRing(device, num_words=8, num_buffers=2)
    assert [ring.take() for _ in range(4)] == [1000] * 4
    assert not [entry for entry in device.log if entry[0] == "wait"]


def test_only_the_words_in_use_travel():
    device = Recorder()
    ring = StagingRing(device, num_words=8)
    ring.take()
    ring.send(target=7, num_words=3, stream=9)
    assert device.log[-1] == ("copy", 7, 1000, 12, 9, "event 0")


@pytest.mark.parametrize("copies", [0, 1, 5])
def test_memory_is_given_back_after_the_copies(copies: int):
    device = Recorder()
    ring = StagingRing(device, num_words=8)
    for _ in range(copies):
        ring.take()
        ring.send(target=7, num_words=3, stream=9)
    del ring
    assert device.live == set()
    assert device.live_events == set()
    events = {entry[5] for entry in device.log if entry[0] == "copy"}
    assert events == {entry[1] for entry in device.log if entry[0] == "wait"}
