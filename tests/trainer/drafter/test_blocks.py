"""Blocks of packed rows, compared with rules written out one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.drafter.blocks import PADDING, document_runs


def expected(row, anchor_row, block_size, mask_token_id, gamma):
    """Return (input ids, labels, weights, positions) of one block by the text of the algorithm."""
    own = row["document_ids"][anchor_row]
    ids, labels, weights, positions = [], [], [], []
    for k in range(block_size):
        at = anchor_row + k
        inside = at < len(row["document_ids"]) and row["document_ids"][at] == own
        counts = k > 0 and inside and row["loss_mask"][at] == 1
        ids.append(int(row["input_ids"][at]) if k == 0 else mask_token_id)
        labels.append(int(row["input_ids"][at]) if counts else 0)
        weights.append(math.exp(-(k - 1) / gamma) if counts else 0.0)
        positions.append(int(row["position_ids"][anchor_row]) + k)
    return ids, labels, weights, positions


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    padding=st.integers(0, 5),
    seed=st.integers(0, 10_000),
    holes=st.sampled_from([0.0, 0.3, 0.9]),
    block_size=st.integers(2, 6),
)
def test_every_block_is_what_the_algorithm_says(row, blocks_of, lengths, padding, seed, holes, block_size):
    packed = row(lengths, padding, seed, holes)
    blocks = blocks_of(packed, block_size=block_size)
    for n, anchor_row in enumerate(blocks.anchor_rows.tolist()):
        ids, labels, weights, positions = expected(packed, anchor_row, block_size, 3, 4.0)
        assert blocks.input_ids[n].tolist() == ids
        assert blocks.labels[n].tolist() == labels
        assert blocks.weights[n].tolist() == pytest.approx(weights)
        assert blocks.positions[n].tolist() == positions
        assert blocks.supervised[n].tolist() == [weight > 0 for weight in weights]
        # The anchor and its successor are supervised and of one document, so row 1 always carries loss.
        assert blocks.supervised[n, 1]
        assert packed["document_ids"][anchor_row] == 100 + int(blocks.documents[n])
    assert torch.equal(blocks.supervised_rows, blocks.supervised.flatten().nonzero()[:, 0])
    assert blocks.anchor_rows.tolist() == sorted(set(blocks.anchor_rows.tolist()))


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 14), min_size=1, max_size=5), padding=st.integers(0, 5))
def test_segments_cover_every_block_and_no_row_at_or_behind_the_last_anchor(row, blocks_of, lengths, padding):
    blocks = blocks_of(row(lengths, padding))
    covered = [n for s in blocks.segments for n in range(s.first_block, s.last_block)]
    assert covered == list(range(blocks.count))
    for segment in blocks.segments:
        anchors = blocks.anchor_rows[segment.first_block : segment.last_block].tolist()
        assert segment.end == max(anchors, default=0)
        assert all(segment.start <= anchor <= segment.end for anchor in anchors)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_documents_too_short_for_a_supervised_pair_have_no_block(row, blocks_of, length):
    # Two tokens of prompt come first, so three tokens hold a single supervised one.
    blocks = blocks_of(row([length]))
    assert blocks.count == 0
    assert blocks.input_ids.shape == (0, 4)
    assert len(blocks.segments) == 1


def test_a_block_that_runs_over_the_end_trains_what_is_left(row, blocks_of):
    packed = row([6])
    blocks = blocks_of(packed, num_anchors=10, block_size=4)
    assert blocks.anchor_rows.tolist() == [2, 3, 4]
    assert blocks.supervised.sum(dim=1).tolist() == [3, 2, 1]


def test_labels_stop_at_the_document_not_at_the_row(row, blocks_of):
    blocks = blocks_of(row([5, 9]), num_anchors=10)
    last_of_first = [n for n in range(blocks.count) if blocks.documents[n] == 0][-1]
    assert blocks.anchor_rows[last_of_first] == 3
    assert blocks.supervised[last_of_first].tolist() == [False, True, False, False]


def test_a_hole_drops_one_position_only(row, blocks_of):
    packed = row([10])
    packed["loss_mask"][5] = 0
    blocks = blocks_of(packed, num_anchors=10)
    at_three = blocks.anchor_rows.tolist().index(3)
    assert blocks.supervised[at_three].tolist() == [False, True, False, True]
    assert 4 not in blocks.anchor_rows.tolist()
    assert 5 not in blocks.anchor_rows.tolist()


def test_anchors_of_a_document_do_not_depend_on_the_row_it_is_packed_in(row, blocks_of):
    together = row([20, 30])
    alone = {name: values[20:] for name, values in together.items()}
    both = blocks_of(together, seed=5)
    own = blocks_of(alone, seed=5)
    assert (both.anchor_positions[both.documents == 1]).tolist() == own.anchor_positions.tolist()
    assert both.anchor_positions.tolist() != blocks_of(together, seed=6).anchor_positions.tolist()
    assert both.anchor_positions.tolist() != blocks_of(together, seed=5, epoch=1).anchor_positions.tolist()


def test_the_budget_bounds_block_rows(row, blocks_of):
    blocks = blocks_of(row([40, 40, 40]), num_anchors=100, row_budget=42, block_size=4)
    assert blocks.count == 10


def test_runs_are_contiguous_documents_without_padding():
    runs = document_runs(np.array([7, 7, 9, PADDING, PADDING, 7]))
    assert [tuple(run) for run in runs] == [(0, 2, 7), (2, 3, 9), (5, 6, 7)]
    assert document_runs(np.array([], dtype=np.int64)) == []


def test_moving_keeps_every_tensor(row, blocks_of):
    blocks = blocks_of(row([9, 9], 2))
    moved = blocks.to("meta")
    assert moved.input_ids.device.type == "meta"
    assert moved.context_documents.device.type == "meta"
    assert moved.segments == blocks.segments
