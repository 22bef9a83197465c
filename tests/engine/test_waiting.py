"""The order in which waiting sequences are admitted."""

from chunkcache.engine.waiting import PATIENCE, WaitingQueue
from chunkcache_testing.fake_engine import FakeEngine


class _Arrivals:
    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self._fake = FakeEngine()

    def come(self, priority: int):
        sequence = self._fake.add([1], priority=priority).sequences[0]
        self.queue.add(sequence)
        return sequence

    def admit(self):
        sequence = next(iter(self.queue))
        self.queue.admit(sequence)
        return sequence


def test_first_come_first_served_within_a_class() -> None:
    arrivals = _Arrivals()
    sequences = [arrivals.come(0) for _ in range(5)]
    assert [arrivals.admit() for _ in range(5)] == sequences


def test_the_lowest_number_goes_first() -> None:
    arrivals = _Arrivals()
    low, high, middle = arrivals.come(7), arrivals.come(-3), arrivals.come(0)
    assert [arrivals.admit() for _ in range(3)] == [high, middle, low]


def test_one_that_comes_back_keeps_its_age() -> None:
    arrivals = _Arrivals()
    first, second = arrivals.come(0), arrivals.come(0)
    arrivals.admit()
    arrivals.queue.add(first)
    assert [arrivals.admit() for _ in range(2)] == [first, second]


def test_a_passed_class_goes_next_after_a_while() -> None:
    arrivals = _Arrivals()
    low = arrivals.come(5)
    order = []
    for _ in range(PATIENCE + 1):
        arrivals.come(0)
        order.append(arrivals.admit())
    assert order.index(low) == PATIENCE


def test_one_that_was_passed_for_long_is_raised_to_the_class_that_passed_it() -> None:
    arrivals = _Arrivals()
    low = arrivals.come(5)
    for _ in range(PATIENCE + 1):
        arrivals.come(2)
        arrivals.admit()
    assert low.rank == 2


def test_every_class_has_its_turn() -> None:
    arrivals = _Arrivals()
    waiting = {arrivals.come(rank) for rank in (1, 2, 3) for _ in range(2)}
    num_admitted = 0
    while waiting:
        arrivals.come(0)
        waiting.discard(arrivals.admit())
        num_admitted += 1
        assert num_admitted <= 3 * 3 * (PATIENCE + 1)


def test_a_sequence_that_is_taken_out_is_not_admitted() -> None:
    arrivals = _Arrivals()
    first, second = arrivals.come(0), arrivals.come(0)
    arrivals.queue.remove(first)
    assert (list(arrivals.queue), len(arrivals.queue)) == ([second], 1)
