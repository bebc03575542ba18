"""The shapes that a warm-up runs are those that the run meets: all of them, once each, the largest first."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import TrainConfig
from trainer.data.rows import padded_width
from trainer.data.schedule import Layout, Packing, Schedule
from trainer.drafter.attention_choice import DENSE, FLEX, Backend
from trainer.drafter.blocks import build_blocks
from trainer.drafter.flex import KEY_BUCKET, FlexAttention
from trainer.pipeline.reader import packed_length
from trainer.pipeline.shapes import STAND_IN, drafter_shapes, target_shapes
from trainer.pipeline.warm_up import made_up_row

BUDGET = 256

documents = st.lists(st.tuples(st.integers(2, BUDGET), st.integers(1, 300)), min_size=1, max_size=40)


def packing_of(drawn: list[tuple[int, int]], bucket: int = 32) -> Packing:
    lengths = np.array([length for length, _ in drawn], dtype=np.int32)
    candidates = np.array([min(count, length - 1) for length, count in drawn], dtype=np.int32)
    return Packing(lengths, candidates, 3, BUDGET, bucket, max_documents=12)


def config(**changes: Any) -> TrainConfig:
    values = {"token_budget": BUDGET, "bucket_tokens": 32, "row_anchors": 12, "num_anchors": 5, "block_size": 4}
    return TrainConfig(**(values | {"max_length": BUDGET} | changes))


def blocks_of(row: Any, backend: Backend, keys: TrainConfig) -> Any:
    return build_blocks(
        row.input_ids.numpy(),
        row.loss_mask.numpy(),
        row.document_ids.numpy(),
        row.position_ids.numpy(),
        seed=1,
        epoch=0,
        num_anchors=keys.num_anchors,
        row_budget=keys.row_anchors * keys.block_size,
        block_size=keys.block_size,
        mask_token_id=0,
        gamma=4.0,
        bucket=backend.bucket(keys.row_anchors),
    )


@settings(max_examples=60, deadline=None)
@given(documents)
def test_every_batch_of_every_epoch_has_a_shape_of_the_targets(drawn: list[tuple[int, int]]) -> None:
    packing = packing_of(drawn)
    rows = [row for epoch in range(2) for row in packing.rows(epoch)]
    met = [
        (len(row.documents), padded_width(max(int(packing.lengths[each]) for each in row.documents), 32))
        for row in rows
    ]
    shapes = target_shapes((rows, packing), ([], packing))
    assert sorted((each.documents, each.width) for each in shapes) == sorted(set(met))
    sizes = [each.documents * each.width for each in shapes]
    assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=60, deadline=None)
@given(documents)
def test_a_made_up_row_is_what_the_real_one_is_for_the_drafter(drawn: list[tuple[int, int]]) -> None:
    packing, keys = packing_of(drawn), config()
    rows = packing.rows(0)
    for backend in (DENSE, FLEX):
        shapes = drafter_shapes(rows, packing, keys, backend)
        met = set()
        for row in rows:
            # The anchors that a real row gets: its documents with all their candidates.
            (one,) = drafter_shapes([row], packing, keys, backend)
            made = blocks_of(made_up_row(one, 0), backend, keys)
            assert made.count == one.blocks
            assert len(made.context_positions) == one.tokens == packed_length(row.tokens, 32)
            assert len(made.runs) == len(row.documents)
            met.add(backend.shape(one.tokens, made.count, keys.row_anchors, keys.block_size))
        covered = [backend.shape(each.tokens, each.blocks, keys.row_anchors, keys.block_size) for each in shapes]
        assert len(covered) == len(set(covered))
        assert set(covered) == met
        assert shapes[0].tokens == max(packed_length(row.tokens, 32) for row in rows)


@settings(max_examples=40, deadline=None)
@given(documents)
def test_a_shape_of_flex_is_the_sizes_that_its_kernel_is_given(drawn: list[tuple[int, int]]) -> None:
    packing, keys = packing_of(drawn), config()
    sizes: dict[tuple[int, ...], tuple[int, int]] = {}
    for row in packing.rows(0):
        (shape,) = drafter_shapes([row], packing, keys, FLEX)
        attention = FlexAttention(blocks_of(made_up_row(shape, 0), FLEX, keys), kernel=lambda *_: None)  # type: ignore[arg-type,return-value]
        given_to_it = (len(attention._queries.position), len(attention._keys.position))
        assert given_to_it[1] % KEY_BUCKET == 0
        key = FLEX.shape(shape.tokens, shape.blocks, keys.row_anchors, keys.block_size)
        assert sizes.setdefault(key, given_to_it) == given_to_it
    assert len(set(sizes.values())) == len(sizes)


def test_only_the_steps_of_the_run_count() -> None:
    packing = packing_of([(200, 9)] * 3 + [(10, 9)] * 30)
    schedule = Schedule(packing, Layout(1, 1, 1, False), epochs=2, micro_batches_per_step=2)
    everything = [each.row for step in range(1, schedule.total_steps + 1) for each in schedule.step(step)]
    assert list(schedule.rows_of(1, schedule.total_steps)) == everything
    assert list(schedule.rows_of(2, 3)) == everything[2:6]
    assert (
        list(schedule.rows_of(schedule.total_steps, schedule.total_steps + 5))
        == everything[2 * (schedule.total_steps - 1) :]
    )


def test_nothing_to_measure_has_no_shape() -> None:
    packing = packing_of([(20, 9)])
    assert target_shapes(([], packing)) == []
    assert drafter_shapes([], packing, config(), DENSE) == []


def test_who_stands_in_has_a_row_without_blocks() -> None:
    keys = config()
    for backend, rows in ((DENSE, 0), (FLEX, FLEX.bucket(keys.row_anchors))):
        made = blocks_of(made_up_row(STAND_IN, 0), backend, keys)
        assert (made.count, len(made.positions), len(made.context_positions)) == (0, rows, 1)
