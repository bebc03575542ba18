"""The chunked objective against plain cross-entropy with autograd, in float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

from remote.protocol.errors import DflashError, ExitCode
from trainer.drafter.objective import _chunks, block_objective, make_vocab_subset


def plain(hidden, head, blocks):
    """Σ w·CE over all logits at once."""
    losses = functional.cross_entropy(hidden @ head.T, blocks.labels.flatten(), reduction="none")
    return (losses * blocks.weights.flatten().to(losses.dtype)).sum()


@pytest.fixture
def case(row, blocks_of):
    blocks = blocks_of(row([20, 9, 15], 3, holes=0.1), num_anchors=6)
    torch.manual_seed(0)
    hidden = torch.randn(blocks.count * 4, 16, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randn(40, 16, dtype=torch.float64), blocks


@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 10_000])
def test_loss_and_gradient_equal_the_plain_ones(case, chunk_rows):
    hidden, head, blocks = case
    sums = block_objective(hidden, head, blocks, chunk_rows=chunk_rows)
    wanted = plain(hidden, head, blocks)
    torch.testing.assert_close(sums.loss_sum, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums.weight_sum, blocks.weights.double().sum())
    (ours,) = torch.autograd.grad(2.5 * sums.loss_sum, hidden)
    (theirs,) = torch.autograd.grad(2.5 * wanted, hidden)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk_rows", [1, 4, 11, 24, 10_000])
def test_chunks_are_whole_blocks_and_no_larger_than_asked_for(case, chunk_rows):
    _, _, blocks = case
    chunks = list(_chunks(blocks, chunk_rows))
    covered = torch.cat([blocks.supervised_rows[chunk.part] for chunk in chunks])
    assert torch.equal(covered, blocks.supervised_rows)
    for chunk in chunks:
        owners = blocks.supervised_rows[chunk.part] // 4
        assert chunk.first <= owners.min()
        assert owners.max() < chunk.last
        assert (chunk.last - chunk.first) * 4 <= max(4, chunk_rows)
    assert all(one.last <= other.first for one, other in pairwise(chunks))


def test_the_head_gets_no_gradient(case):
    hidden, head, blocks = case
    head.requires_grad_()
    block_objective(hidden, head, blocks, chunk_rows=8).loss_sum.backward()
    assert head.grad is None


def test_a_label_shift_by_one_is_another_loss(case):
    hidden, head, blocks = case
    shifted = blocks.labels.roll(-1, dims=1)
    right = block_objective(hidden, head, blocks, chunk_rows=8).loss_sum
    wrong = block_objective(hidden, head, blocks.__class__(**vars(blocks) | {"labels": shifted}), chunk_rows=8).loss_sum
    assert abs(right - wrong) > 1


def test_a_sub_vocabulary_is_a_softmax_over_its_tokens(case):
    hidden, head, blocks = case
    subset = torch.from_numpy(make_vocab_subset(blocks.labels.flatten().numpy(), 40, 3, seed=1))
    assert len(subset) < 40
    sums = block_objective(hidden, head[subset], blocks, chunk_rows=5, vocab_subset=subset)
    logits = torch.full((len(hidden), 40), float("-inf"), dtype=torch.float64)
    logits[:, subset] = hidden @ head[subset].T
    losses = functional.cross_entropy(logits, blocks.labels.flatten(), reduction="none")
    wanted = (losses * blocks.weights.flatten()).sum()
    torch.testing.assert_close(sums.loss_sum, wanted, rtol=1e-12, atol=1e-12)
    (ours,) = torch.autograd.grad(sums.loss_sum, hidden, retain_graph=True)
    (theirs,) = torch.autograd.grad(wanted, hidden)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_the_whole_vocabulary_as_a_subset_changes_nothing(case):
    hidden, head, blocks = case
    subset = torch.arange(40)
    whole = block_objective(hidden, head, blocks, chunk_rows=5)
    same = block_objective(hidden, head, blocks, chunk_rows=5, vocab_subset=subset)
    assert torch.equal(whole.loss_sum, same.loss_sum)
    assert torch.equal(whole.metrics, same.metrics)


def test_a_head_that_does_not_belong_to_the_subset_is_refused(case):
    hidden, head, blocks = case
    with pytest.raises(ValueError, match="head of 40 rows"):
        block_objective(hidden, head, blocks, chunk_rows=5, vocab_subset=torch.arange(39))


def test_metrics_count_what_they_say(case):
    _, _, blocks = case
    # Make the head see the label in some rows: rows 1 right in all blocks, rows 2 in every second one, rows 3 in none.
    one_hot = torch.eye(40, dtype=torch.float64)
    right = torch.zeros(blocks.count, 4, dtype=torch.bool)
    right[:, 1] = True
    right[::2, 2] = True
    right &= blocks.supervised
    wrong = (blocks.labels + 1) % 40
    rows = one_hot[torch.where(right, blocks.labels, wrong)].flatten(0, 1)
    metrics = block_objective(rows, one_hot, blocks, chunk_rows=3).metrics
    accepted = sum(1 + (int(r[1]) and 1 + (int(r[2]) and 1 + int(r[3]))) for r in right)
    assert metrics[:4].tolist() == [int(right.sum()), int(blocks.supervised.sum()), accepted, blocks.count]
    assert metrics[4:8].tolist() == right.sum(dim=0).tolist()
    assert metrics[8:].tolist() == blocks.supervised.sum(dim=0).tolist()


def test_no_block_is_zero_with_a_gradient(row, blocks_of):
    blocks = blocks_of(row([2, 1]))
    hidden = torch.zeros(0, 16, requires_grad=True)
    sums = block_objective(hidden, torch.randn(40, 16), blocks, chunk_rows=8)
    sums.loss_sum.backward()
    assert sums.loss_sum.item() == 0
    assert sums.weight_sum.item() == 0
    assert sums.metrics.tolist() == [0.0] * 12
    assert hidden.grad is not None


def test_bfloat16_states_have_a_float32_softmax(case):
    hidden, head, blocks = case
    narrow = hidden.detach().bfloat16().requires_grad_()
    sums = block_objective(narrow, head.bfloat16(), blocks, chunk_rows=8)
    assert sums.loss_sum.dtype is torch.float32
    wanted = plain(narrow.double(), head.bfloat16().double(), blocks)
    # Logits are rounded to bfloat16 by the product, 3 significant digits; the softmax adds nothing to that.
    assert sums.loss_sum.item() == pytest.approx(wanted.item(), rel=5e-3)
    sums.loss_sum.backward()
    assert narrow.grad is not None
    assert narrow.grad.dtype is torch.bfloat16


def test_the_subset_holds_what_was_seen_and_the_extra_number():
    seen = np.array([5, 5, 39, 0])
    subset = make_vocab_subset(seen, 40, 10, seed=3)
    assert subset.tolist() == sorted(set(subset.tolist()))
    assert {0, 5, 39} <= set(subset.tolist())
    assert len(subset) == 13
    assert subset.tolist() == make_vocab_subset(seen, 40, 10, seed=3).tolist()
    assert subset.tolist() != make_vocab_subset(seen, 40, 10, seed=4).tolist()
    assert len(make_vocab_subset(seen, 40, 1000, seed=3)) == 40


@pytest.mark.parametrize("outside", [[40], [-1, 3]])
def test_a_token_outside_the_vocabulary_is_refused_when_the_subset_is_made(outside):
    with pytest.raises(DflashError) as caught:
        make_vocab_subset(np.array(outside), 40, 0, seed=0)
    assert caught.value.code is ExitCode.PREFLIGHT
