"""The queue of sequences that wait for a place, by priority class."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from chunkcache.engine.sequence import Sequence

PATIENCE = 32
"""Admissions from better classes that a class lets pass before its first sequence goes next."""

_by_age = attrgetter("order")


class WaitingQueue:
    """First come, first served within a class; the class with the lowest number first.

    No class waits for ever: when `PATIENCE` sequences of better classes have been admitted past a
    class, its oldest sequence goes next, before all others, and from then on counts as one of the
    best class that passed it, so that it is not the first to be preempted either. A sequence with
    k others of its class before it is therefore admitted after at most (k + 1) * (PATIENCE + 1)
    admissions, whatever comes in.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._classes: dict[int, list[Sequence]] = {}
        self._num_passed: dict[int, int] = {}
        self._best_passed: dict[int, int] = {}

    def __len__(self) -> int:
        """Return how many sequences wait."""
        return sum(map(len, self._classes.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """Return the sequences in the order in which they are to be admitted."""
        overdue = [rank for rank in sorted(self._classes) if self._is_overdue(rank)]
        yield from [self._classes[rank][0] for rank in overdue]
        for rank in sorted(self._classes):
            yield from self._classes[rank][1 if rank in overdue else 0 :]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by its class and age."""
        insort(self._classes.setdefault(sequence.rank, []), sequence, key=_by_age)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that will not be admitted."""
        members = self._classes[sequence.rank]
        # No two sequences are of the same age.
        del members[bisect_left(members, sequence.order, key=_by_age)]
        if not members:
            self._forget(sequence.rank)

    def admit(self, sequence: Sequence) -> None:
        """Take a sequence out that was admitted, and let the classes that it passed know."""
        rank = sequence.rank
        is_overdue = self._is_overdue(rank) and self._classes[rank][0] is sequence
        best_passed = self._best_passed.get(rank, rank)
        self.remove(sequence)
        if is_overdue:
            sequence.rank = best_passed
            self._num_passed.pop(rank, None)
            self._best_passed.pop(rank, None)
            return
        for passed in self._classes:
            if passed > rank:
                self._num_passed[passed] = self._num_passed.get(passed, 0) + 1
                self._best_passed[passed] = min(rank, self._best_passed.get(passed, rank))

    def _is_overdue(self, rank: int) -> bool:
        return self._num_passed.get(rank, 0) >= PATIENCE

    def _forget(self, rank: int) -> None:
        del self._classes[rank]
        self._num_passed.pop(rank, None)
        self._best_passed.pop(rank, None)
