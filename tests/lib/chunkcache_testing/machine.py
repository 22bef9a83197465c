"""Random interleavings of all operations of a tree, against plain lists of tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from chunkcache import (
    ChunkCache,
    InvalidConfigError,
    OutOfChunksError,
    Plan,
    PrefixTree,
    StalePlanError,
    UnknownSequenceError,
)

SALTS = ("", "a")
#: Few ids, so that prompts meet.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)


@dataclass
class Known:
    """What the model knows of a sequence."""

    salt: str
    tokens: list[int]
    #: Slots reserved after the tokens.
    reserved: int = 0
    #: Tokens that came with the prompt: where equal ones must be found by whoever comes later.
    #: Later tokens may be a private duplicate of a chunk that is found in their stead.
    prompt: int = 0
    #: It may stand again where others have not written yet: only its next token is sure.
    rewound: bool = False

    def __len__(self) -> int:
        return len(self.tokens) + self.reserved


@dataclass
class Step:
    """An open plan."""

    plan: Plan
    seqs: list[int]
    #: For each chunk that it holds the namespace and the tokens up to the chunk's end.
    held: dict[int, tuple[str, tuple[int, ...]]]
    #: An earlier plan that it builds on was closed without a commit.
    stale: bool = False


@dataclass
class Pin:
    """A pinned prompt."""

    salt: str
    tokens: list[int]
    num_filled: int


@dataclass
class Model:
    """Everything the model knows."""

    live: dict[int, Known] = field(default_factory=dict)
    removed: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    pins: dict[int, Pin] = field(default_factory=dict)
    #: Every full chunk that was ever known, as (namespace, tokens up to its end).
    ever: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)


class TreeMachine(RuleBasedStateMachine):
    """The operations that a bare tree and a cache have in common, with their checks."""

    chunk_size: int
    tree: PrefixTree | ChunkCache

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    # Choices.

    def choose(self, data: st.DataObject, among: Iterable[Any]) -> Any:
        return data.draw(st.sampled_from(sorted(among)))

    def choose_some(self, data: st.DataObject, among: Iterable[Any]) -> list[Any]:
        return data.draw(
            st.lists(st.sampled_from(sorted(among)), unique=True, min_size=1, max_size=4)
        )

    def prompt(self, data: st.DataObject) -> list[int]:
        """A prompt, often one that goes on from what is there."""
        head: list[int] = []
        if self.model.live and data.draw(st.booleans()):
            tokens = self.model.live[self.choose(data, self.model.live)].tokens
            head = tokens[: data.draw(st.integers(0, len(tokens)))]
        return head + self.new_tokens(data)

    def new_tokens(self, data: st.DataObject) -> list[int]:
        return data.draw(TOKENS)

    # What must hold of single operations.

    def unchanged_by(self, error: type[Exception]) -> Any:
        return _Unchanged(self, error)

    def snapshot(self) -> tuple:
        infos = [self.tree.sequence(seq) for seq in self.model.live]
        stats = self.tree.stats()
        return infos, (stats.num_free, stats.num_evictable, stats.num_in_use), self.tree.render()

    def attempt(self, operation: Any, *arguments: Any) -> Any:
        """Run an operation that may find the pool exhausted; None if it did."""
        before = self.snapshot()
        try:
            return (operation(*arguments),)
        except OutOfChunksError as error:
            exhausted = error.needed > error.free
        assert exhausted
        assert self.snapshot() == before
        return None

    def learn(self, known: Known) -> None:
        size = self.chunk_size
        for end in range(size, len(known.tokens) + 1, size):
            self.model.ever.add((known.salt, tuple(known.tokens[:end])))

    @rule(data=st.data(), salt=st.sampled_from(SALTS))
    def insert(self, data: st.DataObject, salt: str) -> None:
        tokens = self.prompt(data)
        match = self.tree.match_prefix(tokens, salt)
        self.check_match(tokens, salt, match.num_tokens)
        inserted = self.attempt(self.tree.insert, tokens, salt)
        if inserted is None:
            return
        (result,) = inserted
        assert result.num_matched_tokens == match.num_tokens
        assert result.num_copied_tokens <= match.num_partial
        assert result.cached_tokens == result.num_matched_tokens + result.num_copied_tokens
        assert result.num_computed_tokens == min(result.cached_tokens, len(tokens) - 1)
        assert result.seq not in self.model.live
        assert self.tree.sequence(result.seq).chunk_ids[: len(match.chunk_ids)] == match.chunk_ids
        self.model.live[result.seq] = Known(salt, tokens, prompt=len(tokens))
        self.learn(self.model.live[result.seq])

    def check_match(self, tokens: Sequence[int], salt: str, matched: int) -> None:
        """Full chunks of live prompts are found, and nothing that never was."""
        size = self.chunk_size
        assert matched % size == 0
        assert matched == 0 or (salt, tuple(tokens[:matched])) in self.model.ever
        for known in self.model.live.values():
            if known.salt == salt:
                prompt = known.tokens[: known.prompt]
                common = next(
                    (
                        i
                        for i, pair in enumerate(zip(tokens, prompt, strict=False))
                        if pair[0] != pair[1]
                    ),
                    min(len(tokens), len(prompt)),
                )
                assert matched >= common // size * size

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        seq = self.choose(data, self.model.live)
        tokens = self.new_tokens(data)
        if self.attempt(self.tree.append, seq, tokens) is not None:
            self.appended(seq, tokens)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def append_batch(self, data: st.DataObject) -> None:
        seqs = self.choose_some(data, self.model.live)
        tokens = [data.draw(st.integers(0, 1)) for _ in seqs]
        if self.attempt(self.tree.append_batch, seqs, tokens) is not None:
            for seq, token in zip(seqs, tokens, strict=True):
                self.appended(seq, [token])

    def appended(self, seq: int, tokens: list[int]) -> None:
        known = self.model.live[seq]
        known.tokens.extend(tokens)
        known.reserved = max(0, known.reserved - len(tokens))
        self.learn(known)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        seqs = self.choose_some(data, self.model.live)
        if self.attempt(self.tree.reserve, seqs) is not None:
            for seq in seqs:
                self.model.live[seq].reserved += 1

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def cancel_reserved(self, data: st.DataObject) -> None:
        seq = self.choose(data, self.model.live)
        known = self.model.live[seq]
        if known.reserved:
            self.tree.cancel_reserved(seq)
            known.reserved -= 1
        else:
            with self.unchanged_by(InvalidConfigError):
                self.tree.cancel_reserved(seq)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = self.model.live[seq := self.choose(data, self.model.live)]
        forked = self.attempt(self.tree.fork, seq)
        if forked is not None:
            self.model.live[forked[0].seq] = Known(
                source.salt,
                list(source.tokens),
                prompt=source.prompt,
                rewound=source.rewound,
            )

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        known = self.model.live[seq := self.choose(data, self.model.live)]
        length = data.draw(st.integers(1, len(known)))
        chunks = self.tree.sequence(seq).chunk_ids
        if self.attempt(self.tree.truncate, seq, length) is None:
            return
        known.reserved = max(0, length - len(known.tokens))
        del known.tokens[length:]
        known.prompt = min(known.prompt, length)
        # The cut chunk may be filled with other tokens, after the plan in the order of the work.
        for step in self.model.steps:
            for chunk in chunks:
                step.held.pop(chunk, None)

    @precondition(lambda self: self.not_in_a_step())
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        seq = self.choose(data, self.not_in_a_step())
        position = data.draw(st.integers(0, self.tree.sequence(seq).num_computed_tokens))
        self.tree.rewind(seq, position)
        self.model.live[seq].rewound = True
        info = self.tree.sequence(seq)
        assert (info.num_computed_tokens, info.num_scheduled_tokens) == (position, position)

    def not_in_a_step(self) -> list[int]:
        planned = {seq for step in self.model.steps for seq in step.seqs}
        return [seq for seq in self.model.live if seq not in planned]

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        seq = self.choose(data, self.model.live)
        for inherited in self.tree.remove(seq):
            assert inherited.seq in self.model.live
            assert inherited.seq != seq
            assert inherited.begin < inherited.end <= len(self.model.live[inherited.seq])
            assert self.tree.sequence(inherited.seq).num_computed_tokens <= inherited.begin
        del self.model.live[seq]
        self.model.removed.append(seq)

    @precondition(lambda self: self.model.removed)
    @rule(data=st.data())
    def use_a_removed_handle(self, data: st.DataObject) -> None:
        seq = self.choose(data, self.model.removed)
        for operation in (self.tree.remove, self.tree.fork, self.tree.sequence, self.tree.tokens):
            with self.unchanged_by(UnknownSequenceError):
                operation(seq)

    @rule(data=st.data(), salt=st.sampled_from(SALTS))
    def pin(self, data: st.DataObject, salt: str) -> None:
        tokens = self.prompt(data)
        match = self.tree.match_prefix(tokens, salt)
        filled = match.num_filled // self.chunk_size * self.chunk_size
        if filled:
            self.model.pins[self.tree.pin(tokens, salt)] = Pin(salt, tokens, filled)
        else:
            with self.unchanged_by(InvalidConfigError):
                self.tree.pin(tokens, salt)

    @precondition(lambda self: self.model.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = self.choose(data, self.model.pins)
        self.tree.unpin(pin)
        del self.model.pins[pin]

    @rule(num_chunks=st.integers(0, 5))
    def evict(self, num_chunks: int) -> None:
        before = self.tree.stats()
        evicted = self.tree.evict(num_chunks)
        assert evicted == min(num_chunks, before.num_evictable)
        assert self.tree.stats().num_in_use == before.num_in_use

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        assert self.tree.stats().num_evictable == 0

    # Steps.

    def ready(self) -> list[int]:
        return [seq for seq, known in self.model.live.items() if self.num_left(seq, known) > 0]

    def num_left(self, seq: int, known: Known) -> int:
        """Known tokens that a step can compute now, if any."""
        info = self.tree.sequence(seq)
        left = len(known.tokens) - info.num_scheduled_tokens if info.is_ready else 0
        return min(left, 1) if known.rewound else left

    @precondition(lambda self: len(self.model.steps) < 3 and self.ready())
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        seqs = self.choose_some(data, self.ready())
        counts = [
            data.draw(st.integers(1, self.num_left(seq, self.model.live[seq]))) for seq in seqs
        ]
        indptr = [0]
        for count in counts:
            indptr.append(indptr[-1] + count)
        starts = [self.tree.sequence(seq).num_scheduled_tokens for seq in seqs]
        plan = self.tree.plan(seqs, indptr)
        positions = [p for s, n in zip(starts, counts, strict=True) for p in range(s, s + n)]
        assert plan.positions.tolist() == positions
        written = [slot for slot in plan.slot_mapping.tolist() if slot >= 0]
        assert len(written) == len(set(written))
        self.model.steps.append(Step(plan, seqs, self.contents(seqs)))
        self.begun(plan, seqs, starts, counts)

    def begun(self, plan: Plan, seqs: list[int], starts: list[int], counts: list[int]) -> None:
        """What a cache does with a plan."""

    @precondition(lambda self: self.model.steps)
    @rule()
    def commit_step(self) -> None:
        step = self.model.steps[0]
        if step.stale:
            with self.unchanged_by(StalePlanError):
                step.plan.commit()
            step.plan.close()
        else:
            step.plan.commit()
        self.model.steps.pop(0)
        with pytest.raises(StalePlanError):
            step.plan.commit()

    @precondition(lambda self: len(self.model.steps) > 1 and not self.model.steps[0].stale)
    @rule()
    def commit_out_of_order(self) -> None:
        second = self.model.steps[1]
        with self.unchanged_by(StalePlanError if second.stale else InvalidConfigError):
            second.plan.commit()

    @precondition(lambda self: self.model.steps)
    @rule(data=st.data())
    def close_step(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.model.steps) - 1))
        closed = self.model.steps.pop(index)
        closed.plan.close()
        # What began after a stale step was built without it.
        if not closed.stale:
            for later in self.model.steps[index:]:
                assert later.plan.is_stale or not later.stale
                later.stale = later.plan.is_stale
        assert not any(earlier.plan.is_stale != earlier.stale for earlier in self.model.steps)

    # What must hold after every operation.

    def contents(self, seqs: Iterable[int]) -> dict[int, tuple[str, tuple[int, ...]]]:
        """For each chunk of some sequences, the namespace and the known tokens up to its end."""
        found = {}
        for seq in seqs:
            known = self.model.live[seq]
            for i, chunk in enumerate(self.tree.sequence(seq).chunk_ids):
                found[chunk] = (known.salt, tuple(known.tokens[: (i + 1) * self.chunk_size]))
        return found

    @invariant()
    def the_tree_is_sound(self) -> None:
        self.tree.check_invariants()

    @invariant()
    def accounts_add_up(self) -> None:
        stats = self.tree.stats()
        assert stats.num_free + stats.num_evictable + stats.num_in_use == self.tree.capacity
        assert stats.num_sequences == len(self.model.live)
        used = {c for seq in self.model.live for c in self.tree.sequence(seq).chunk_ids}
        assert len(used) <= stats.num_in_use

    @invariant()
    def sequences_are_what_they_were_told(self) -> None:
        for seq, known in self.model.live.items():
            info = self.tree.sequence(seq)
            assert self.tree.tokens(seq).tolist() == known.tokens
            assert (info.num_tokens, info.num_known_tokens) == (len(known), len(known.tokens))
            assert info.num_computed_tokens <= info.num_scheduled_tokens <= info.num_tokens
            assert len(info.chunk_ids) == -(-len(known) // self.chunk_size)

    @invariant()
    def chunks_are_shared_only_if_full_and_equal(self) -> None:
        owners: dict[int, tuple] = {}
        for seq, known in self.model.live.items():
            for i, chunk in enumerate(self.tree.sequence(seq).chunk_ids):
                end = (i + 1) * self.chunk_size
                content = (known.salt, tuple(known.tokens[:end]))
                if chunk in owners:
                    assert owners[chunk] == content
                    assert len(content[1]) == end
                owners[chunk] = content

    @invariant()
    def open_plans_keep_their_chunks(self) -> None:
        now = self.contents(self.model.live)
        for step in self.model.steps:
            for chunk, (salt, tokens) in step.held.items():
                if chunk in now:
                    assert (now[chunk][0], now[chunk][1][: len(tokens)]) == (salt, tokens)

    @invariant()
    def pinned_prompts_stay(self) -> None:
        for pin in self.model.pins.values():
            found = self.tree.match_prefix(pin.tokens, pin.salt)
            assert found.num_filled >= pin.num_filled

    def teardown(self) -> None:
        """With everything ended, all chunks are free or evictable, and then free."""
        for step in self.model.steps:
            step.plan.close()
        for seq in list(self.model.live):
            self.tree.remove(seq)
        for pin in self.model.pins:
            self.tree.unpin(pin)
        assert self.tree.stats().num_in_use == 0
        self.tree.clear()
        self.tree.check_invariants()
        assert self.tree.stats().num_free == self.tree.capacity


class _Unchanged:
    """A context in which an error is raised and nothing changes."""

    def __init__(self, machine: TreeMachine, error: type[Exception]) -> None:
        self.machine = machine
        self.raises = pytest.raises(error)

    def __enter__(self) -> None:
        self.before = self.machine.snapshot()
        self.raises.__enter__()

    def __exit__(self, *details: object) -> bool:
        raised = self.raises.__exit__(*details)
        assert self.machine.snapshot() == self.before
        return raised
