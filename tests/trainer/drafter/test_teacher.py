"""KL to the target's distribution against PyTorch's own, and the rows of the target that teach."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from trainer.drafter import teacher as module
from trainer.drafter.dpace import dpace_weights
from trainer.drafter.objective import Objective, block_objective, make_vocab_subset
from trainer.drafter.teacher import part_states, teaching_rows

LENGTHS = [20, 9, 15]


@pytest.fixture
def case(row, blocks_of):
    """Return hidden f[N·B, H], teacher f[T, H], head f[V, H] and blocks with holes and ends."""
    blocks = blocks_of(row(LENGTHS, 3, holes=0.2), num_anchors=6)
    torch.manual_seed(0)
    hidden = torch.randn(blocks.count * 4, 16, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(47, 16, dtype=torch.float64)
    return hidden, teacher, torch.randn(40, 16, dtype=torch.float64), blocks


def plain(hidden, teacher, head, blocks, kl_weight, alpha=None, subset=None):
    """Return Σ w·((1 - l)·CE + l·KL) and Σ w over all logits at once."""
    logits, taught = hidden @ head.T, teacher @ head.T
    if subset is not None:
        outside = torch.ones(head.shape[0], dtype=torch.bool).index_fill(0, subset, False)
        logits, taught = (each.masked_fill(outside, -1e9) for each in (logits, taught))
    # Row k of the block anchored at t learns from the state at t + k - 1, which has not seen the label yet.
    source = (blocks.anchor_rows[:, None] + torch.arange(4) - 1).flatten().clamp(0, len(teacher) - 1)
    log_p = logits.log_softmax(dim=-1)
    losses = functional.nll_loss(log_p, blocks.labels.flatten(), reduction="none") * (1 - kl_weight)
    targets = taught.log_softmax(dim=-1)[source]
    losses = losses + kl_weight * functional.kl_div(log_p, targets, reduction="none", log_target=True).sum(dim=-1)
    weights = blocks.weights.flatten().double()
    if alpha is not None:
        rows = blocks.supervised_rows
        confidence = log_p[rows, blocks.labels.flatten()[rows]].exp()
        weights = torch.zeros(len(hidden), dtype=torch.float64)
        weights[rows] = dpace_weights(confidence, rows, blocks=blocks.count, block_size=4, alpha=alpha)
    return (losses * weights).sum(), weights.sum()


@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("kl_weight", [0.3, 1.0])
@pytest.mark.parametrize("chunk_rows", [1, 9, 10_000])
def test_loss_and_gradient_equal_the_plain_ones(case, chunk_rows, kl_weight, alpha):
    hidden, teacher, head, blocks = case
    sums = block_objective(
        hidden, head, blocks, chunk_rows=chunk_rows, objective=Objective(alpha, kl_weight), teacher=teacher
    )
    loss, weight = plain(hidden, teacher, head, blocks, kl_weight, alpha)
    torch.testing.assert_close(sums.loss_sum, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums.weight_sum, weight, rtol=1e-12, atol=1e-12)
    (ours,) = torch.autograd.grad(2.5 * sums.loss_sum, hidden)
    (theirs,) = torch.autograd.grad(2.5 * loss, hidden)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_sub_vocabulary_is_renormalised_on_both_sides(case):
    hidden, teacher, head, blocks = case
    subset = torch.from_numpy(make_vocab_subset(blocks.labels.flatten().numpy(), 40, 3, seed=1))
    assert len(subset) < 40
    sums = block_objective(
        hidden,
        head[subset],
        blocks,
        chunk_rows=9,
        vocab_subset=subset,
        objective=Objective(None, 0.7),
        teacher=teacher,
    )
    loss, _ = plain(hidden, teacher, head, blocks, 0.7, subset=subset)
    torch.testing.assert_close(sums.loss_sum, loss, rtol=1e-12, atol=1e-12)
    (ours,) = torch.autograd.grad(sums.loss_sum, hidden)
    (theirs,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_drafter_that_says_what_the_target_says_has_no_divergence(case):
    _, teacher, head, blocks = case
    rows = torch.arange(blocks.count * 4)
    hidden = teacher[teaching_rows(blocks, rows).clamp(0, 46)].requires_grad_()
    sums = block_objective(hidden, head, blocks, chunk_rows=9, objective=Objective(None, 1.0), teacher=teacher)
    assert abs(sums.loss_sum.item()) < 1e-12
    sums.loss_sum.backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().max() < 1e-12


def test_the_state_of_the_label_itself_is_another_loss(case, monkeypatch):
    hidden, teacher, head, blocks = case
    options = {"chunk_rows": 9, "objective": Objective(None, 1.0), "teacher": teacher}
    right = block_objective(hidden, head, blocks, **options).loss_sum
    monkeypatch.setattr(
        "trainer.drafter.objective.teaching_rows", lambda blocks, rows: module.teaching_rows(blocks, rows) + 1
    )
    assert abs(block_objective(hidden, head, blocks, **options).loss_sum - right) > 1


def test_teaching_rows_stay_in_the_document_and_precede_the_label(case):
    _, _, _, blocks = case
    before = teaching_rows(blocks, blocks.supervised_rows)
    block = blocks.supervised_rows // 4
    assert torch.equal(blocks.context_documents[before], blocks.documents[block])
    labels = blocks.positions.flatten()[blocks.supervised_rows]
    assert torch.equal(blocks.context_positions[before] + 1, labels)


def test_metrics_are_those_of_the_cross_entropy(case):
    hidden, teacher, head, blocks = case
    with_kl = block_objective(hidden, head, blocks, chunk_rows=9, objective=Objective(None, 0.5), teacher=teacher)
    without = block_objective(hidden, head, blocks, chunk_rows=9, teacher=teacher)
    assert torch.equal(with_kl.metrics, without.metrics)
    assert torch.equal(without.loss_sum, block_objective(hidden, head, blocks, chunk_rows=9).loss_sum)


def test_the_softmaxes_are_float32_under_autocast(case):
    hidden, teacher, head, blocks = case
    hidden, teacher, head = (each.detach().bfloat16() for each in (hidden, teacher, head))
    options = {"chunk_rows": 9, "objective": Objective(None, 1.0), "teacher": teacher}
    with torch.autocast("cpu", torch.bfloat16):
        got = block_objective(hidden, head, blocks, **options).loss_sum
    # Both products of matrices are rounded to bfloat16 in either case; nothing behind them may be.
    torch.testing.assert_close(got, block_objective(hidden, head, blocks, **options).loss_sum, rtol=1e-6, atol=0)
    loss, _ = plain(hidden.double(), teacher.double(), head.double(), blocks, 1.0)
    assert got.dtype is torch.float32
    assert got.item() == pytest.approx(loss.item(), rel=1e-2)


def test_without_states_to_learn_from_it_is_refused(case):
    hidden, _, head, blocks = case
    with pytest.raises(ValueError, match="last states"):
        block_objective(hidden, head, blocks, chunk_rows=9, objective=Objective(None, 0.5))


@pytest.mark.parametrize("split", [False, True])
def test_states_are_parted_without_a_copy(split):
    layers = torch.arange(3 * 5 * 4.0).view(3, 5, 4)
    given = tuple(layers) if split else layers.permute(1, 0, 2).reshape(5, 12)
    states, last = part_states(given, 2)
    together = torch.cat(tuple(states), dim=-1) if split else states
    assert torch.equal(together, torch.cat([layers[0], layers[1]], dim=-1))
    assert torch.equal(last, layers[2])
    storage = layers if split else given
    assert last.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()


def test_no_block_has_no_loss(row, blocks_of):
    blocks = blocks_of(row([2, 1]))
    hidden = torch.zeros(0, 16, requires_grad=True)
    sums = block_objective(
        hidden,
        torch.randn(40, 16),
        blocks,
        chunk_rows=8,
        objective=Objective(0.5, 0.5),
        teacher=torch.from_numpy(np.zeros((3, 16), dtype=np.float32)),
    )
    sums.loss_sum.backward()
    assert (sums.loss_sum.item(), sums.weight_sum.item()) == (0, 0)
