from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.schedule import Layout, Packing, Schedule

LAYOUTS = st.builds(Layout, st.integers(1, 2), st.integers(1, 5), st.integers(1, 3), st.just(False)) | st.builds(
    lambda machines, ranks: Layout(machines, ranks, ranks, True), st.integers(1, 2), st.integers(1, 4)
)
ONE = Layout(1, 1, 1, False)


def schedule(layout: Layout = ONE, *, documents: int = 40, epochs: int = 3, group: int = 4, seed: int = 0) -> Schedule:
    lengths = np.random.default_rng(seed).integers(5, 90, documents).astype(np.int32)
    packing = Packing(lengths, np.ones_like(lengths), seed=11, token_budget=200, bucket_tokens=16)
    return Schedule(packing, layout, epochs=epochs, micro_batches_per_step=group)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 9))
def test_steps_take_every_micro_batch_once_in_order_across_epoch_ends(documents: int, epochs: int, group: int) -> None:
    plan = schedule(documents=documents, epochs=epochs, group=group)
    taken = [each for step in range(1, plan.total_steps + 1) for each in plan.step(step)]
    assert [each.b for each in taken] == list(range(plan.total_micro_batches))
    assert [each.step for each in taken] == [each.b // group + 1 for each in taken]
    for epoch in range(epochs):
        seen = sorted(d for each in taken if each.epoch == epoch for d in each.row.documents)
        assert seen == list(range(documents))


@settings(deadline=None, max_examples=30)
@given(LAYOUTS, st.integers(3, 12))
def test_targets_and_drafters_partition_the_run_in_ascending_order(layout: Layout, group: int) -> None:
    plan = schedule(layout, group=group)
    machines = range(layout.machines)
    produced = [list(plan.for_target(m, t)) for m in machines for t in range(layout.targets)]
    consumed = [list(plan.for_drafter(m, d)) for m in machines for d in range(layout.drafters)]
    for streams in (produced, consumed):
        assert sorted(each.b for stream in streams for each in stream) == list(range(plan.total_micro_batches))
        assert all(a.b < b.b for stream in streams for a, b in itertools.pairwise(stream))


@settings(deadline=None, max_examples=20)
@given(LAYOUTS)
def test_the_layout_changes_ranks_and_nothing_else(layout: Layout) -> None:
    plan, reference = schedule(layout), schedule()
    assert plan.total_steps == reference.total_steps
    for step in range(1, plan.total_steps + 1):
        ours, theirs = plan.step(step), reference.step(step)
        assert [(e.b, e.epoch, e.row) for e in ours] == [(e.b, e.epoch, e.row) for e in theirs]


def test_a_resumed_stream_is_the_rest_of_the_whole_one() -> None:
    layout = Layout(1, 2, 2, False)
    whole = list(schedule(layout).for_target(0, 1))
    rest = list(schedule(layout).for_target(0, 1, first_step=3))
    assert rest == [each for each in whole if each.step >= 3]
    drafted = list(schedule(layout).for_drafter(0, 0))
    assert list(schedule(layout).for_drafter(0, 0, first_step=2)) == [each for each in drafted if each.step >= 2]


def test_a_step_that_spans_an_epochs_end_holds_both_epochs() -> None:
    plan = schedule(group=5)
    assert plan.rows_per_epoch[0] % 5, "the case needs an epoch that is no multiple of the group"
    spanning = plan.step(plan.rows_per_epoch[0] // 5 + 1)
    assert {each.epoch for each in spanning} == {0, 1}


def test_the_last_step_may_be_smaller_and_nothing_follows_it() -> None:
    plan = schedule(group=7, epochs=1)
    assert plan.total_steps == -(-plan.total_micro_batches // 7)
    assert len(plan.step(plan.total_steps)) == plan.total_micro_batches - 7 * (plan.total_steps - 1)
    assert plan.step(plan.total_steps + 1) == []


def test_a_group_larger_than_the_run_is_one_step() -> None:
    assert schedule(group=1000).total_steps == 1


def test_rows_are_those_of_pack_rows() -> None:
    plan = schedule()
    assert [plan.row(b) for b in range(plan.rows_per_epoch[0])] == [
        each.row for step in range(1, plan.total_steps + 1) for each in plan.step(step) if each.epoch == 0
    ]
