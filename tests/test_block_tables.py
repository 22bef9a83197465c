"""`BlockTablePlanner`: plan after plan over tables that grow."""

import gc
import weakref

import numpy as np
import pytest

from chunkcache import InvalidConfigError, StalePlanError, attention
from chunkcache._core import Plan
from chunkcache.kernels.image import TableState
from chunkcache.kernels.work import DeviceCosts, Heads

PAGE = 16


class Growing:
    """A paged cache of sequences behind a shared prefix, whose pages hold random K and V."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.pages = [[0, 1, 2, 3 + i] for i in range(3)]
        self.seq_lens = [50, 53, 60]
        self.next_page = 6
        self.k, self.v = rng.standard_normal((2, 40, PAGE, 2, 16), dtype=np.float32)
        self.q = rng.standard_normal((3, 4, 16), dtype=np.float32)

    def grow(self) -> None:
        for i in range(3):
            self.seq_lens[i] += 1
            if self.seq_lens[i] > PAGE * len(self.pages[i]):
                self.pages[i].append(self.next_page)
                self.next_page += 1

    @property
    def block_table(self) -> np.ndarray:
        width = max(map(len, self.pages))
        return np.array([[*row, *[-1] * (width - len(row))] for row in self.pages])

    def csr(self) -> tuple[list[int], list[int], list[int]]:
        indptr = np.cumsum([0, *map(len, self.pages)]).tolist()
        return (
            indptr,
            [page for row in self.pages for page in row],
            [(len_ - 1) % PAGE + 1 for len_ in self.seq_lens],
        )

    def run(self, plan: Plan) -> np.ndarray:
        return attention.run(plan, self.q, self.k, self.v)

    def expected(self) -> np.ndarray:
        return self.run(attention.plan_from_block_tables(self.block_table, self.seq_lens, PAGE))


@pytest.mark.parametrize("only_grew", [False, True])
@pytest.mark.parametrize("form", ["plan", "plan_csr"])
def test_each_plan_is_that_of_its_tables(rng, form, only_grew) -> None:
    paged, planner = Growing(rng), attention.BlockTablePlanner(PAGE)
    for _ in range(40):
        tables = paged.csr() if form == "plan_csr" else (paged.block_table, paged.seq_lens)
        plan = getattr(planner, form)(*tables, only_grew=only_grew)
        assert np.array_equal(paged.run(plan), paged.expected())
        paged.grow()


@pytest.mark.parametrize("dtypes", [("i4", "i4", "i4"), ("i4", "i8", "i4"), ("i8", "i4", "i8")])
@pytest.mark.parametrize("form", ["plan", "plan_csr"])
def test_integers_of_any_width_make_the_same_plan(rng, form, dtypes) -> None:
    paged, planner = Growing(rng), attention.BlockTablePlanner(PAGE)
    tables = paged.csr() if form == "plan_csr" else (paged.block_table, paged.seq_lens)
    arrays = [np.array(table, dtype) for table, dtype in zip(tables, dtypes, strict=False)]
    plan = getattr(planner, form)(*arrays, np.arange(4, dtype=dtypes[2]))
    assert np.array_equal(paged.run(plan), paged.expected())


def test_other_sequences_are_planned_anew(rng) -> None:
    paged, planner = Growing(rng), attention.BlockTablePlanner(PAGE)
    planner.plan(paged.block_table, paged.seq_lens)
    paged.pages[0] = [9, 1, 2, 3]
    assert np.array_equal(
        paged.run(planner.plan(paged.block_table, paged.seq_lens)), paged.expected()
    )


def test_a_plan_is_stale_when_the_next_one_is_made(rng) -> None:
    paged, planner = Growing(rng), attention.BlockTablePlanner(PAGE)
    first = planner.plan(paged.block_table, paged.seq_lens)
    planner.plan(paged.block_table, paged.seq_lens)
    with pytest.raises(StalePlanError):
        paged.run(first)


def test_an_overtaken_plan_is_told_from_a_closed_one(rng) -> None:
    paged, planner = Growing(rng), attention.BlockTablePlanner(PAGE)
    first = planner.plan(paged.block_table, paged.seq_lens)
    last = planner.plan(paged.block_table, paged.seq_lens)
    with pytest.raises(StalePlanError, match=r"later plan has taken over, allowed is the last pl"):
        paged.run(first)
    last.close()
    with pytest.raises(StalePlanError, match="which is closed, allowed is an open plan"):
        paged.run(last)


@pytest.mark.parametrize("empty", [[], (), np.zeros((0, 3), dtype=int)])
def test_a_batch_of_no_sequences_may_be_given_as_a_list(empty) -> None:
    plans = (
        attention.BlockTablePlanner(PAGE).plan(empty, []),
        attention.plan_from_block_tables(empty, [], PAGE),
    )
    assert [len(plan.positions) for plan in plans] == [0, 0]


def test_a_refused_step_leaves_the_last_plan_valid(rng) -> None:
    paged, planner = Growing(rng), attention.BlockTablePlanner(PAGE)
    plan = planner.plan(paged.block_table, paged.seq_lens)
    for wrong in ([50, 53, 900], [50, 53, -1], [50, 53]):
        with pytest.raises(InvalidConfigError, match=r"seq_lens|block_table"):
            planner.plan(paged.block_table, wrong)
    assert np.array_equal(paged.run(plan), paged.expected())


@pytest.mark.parametrize("how", ["closed", "dropped", "open"])
def test_tables_are_kept_whatever_becomes_of_the_plan(rng, how) -> None:
    paged, planner = Growing(rng), attention.BlockTablePlanner(PAGE)
    plan = planner.plan(paged.block_table, paged.seq_lens)
    before = planner._planner.max_patch_words(plan)
    if how == "closed":
        plan.close()
    if how == "dropped":
        del plan
    paged.grow()
    again = planner.plan(paged.block_table, paged.seq_lens)
    assert planner._planner.max_patch_words(again) == before
    assert np.array_equal(paged.run(again), paged.expected())


def test_a_planner_goes_with_its_last_plan(rng) -> None:
    paged, planner = Growing(rng), attention.BlockTablePlanner(PAGE)
    plan = planner.plan(paged.block_table, paged.seq_lens)
    watch = weakref.ref(planner._planner)
    del planner
    assert np.array_equal(paged.run(plan), paged.expected())
    del plan
    gc.collect()
    assert watch() is None


def test_other_arguments_are_refused_by_name() -> None:
    with pytest.raises(InvalidConfigError, match="page_size: got 0"):
        attention.BlockTablePlanner(0)
    with pytest.raises(InvalidConfigError, match="only_grew"):
        attention.BlockTablePlanner(16).plan([[0]], [3], only_grew=2)


class Device:
    """What a device would hold of the tables."""

    def __init__(self, planner: attention.BlockTablePlanner) -> None:
        self.planner = planner._planner
        self.held = (0, 0)

    def sync(self, plan: Plan) -> int:
        """Stage a plan; returns the words that travel."""
        heads = Heads(2, 2, 8).packed()
        if self.planner.heads(plan) != heads:
            self.planner.set_heads(plan, heads, DeviceCosts().packed())
        state = TableState.of(self.planner, plan)
        buffer = np.zeros(self.planner.max_patch_words(plan), dtype=np.uint32)
        words = self.planner.stage(plan, self.held, buffer.ctypes.data, len(buffer), 1)
        self.held = (state.image_id, state.version)
        return words


def test_a_device_gets_nothing_while_no_page_is_added(rng) -> None:
    paged, planner = Growing(rng), attention.BlockTablePlanner(PAGE)
    device = Device(planner)
    sent = []
    for _ in range(14):
        sent.append(device.sync(planner.plan(paged.block_table, paged.seq_lens)))
        paged.grow()
    # 60 tokens end 4 before their page does, 53 end 11.
    assert [i for i, words in enumerate(sent) if words] == [0, 5, 12]
    assert max(sent[1:]) < 40


def test_larger_batches_keep_the_heads(rng) -> None:
    paged, planner = Growing(rng), attention.BlockTablePlanner(PAGE)
    device = Device(planner)
    device.sync(planner.plan(paged.block_table, paged.seq_lens))
    plan = planner.plan([[0, 1, i] for i in range(9)], [40] * 9)
    assert planner._planner.heads(plan) == (2, 2, 8, False)


def test_pages_of_other_sizes_have_no_items() -> None:
    planner = attention.BlockTablePlanner(24)
    with pytest.raises(InvalidConfigError, match="page_size: got 24, allowed is a multiple of 16"):
        Device(planner).sync(planner.plan([[0]], [3]))
