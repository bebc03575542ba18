"""D-PACE's weights by hand, and as the derivative of what they stand for."""

from __future__ import annotations

import pytest
import torch

from trainer.drafter.dpace import dpace_weights
from trainer.drafter.objective import Objective, block_objective

ALPHA = 0.5
DPACE = Objective(dpace_alpha=ALPHA)


def weights_of(confidence: list[float], rows: list[int], *, blocks: int = 1, alpha: float = ALPHA) -> list[float]:
    return dpace_weights(
        torch.tensor(confidence, dtype=torch.float64),
        torch.tensor(rows),
        blocks=blocks,
        block_size=4,
        alpha=alpha,
    ).tolist()


def test_three_rows_by_hand():
    # s = 0.9, 0.7, 0.6; P = 0.9, 0.63, 0.378; each weight is the sum of P from its row on.
    assert weights_of([0.8, 0.4, 0.2], [1, 2, 3]) == pytest.approx([1.908, 1.008, 0.378])


def test_a_hole_is_passed_for_sure_and_adds_nothing():
    # Row 2 is a hole: s = 0.9, 1, 0.6; P = 0.9, -, 0.54.
    assert weights_of([0.8, 0.2], [1, 3]) == pytest.approx([1.44, 0.54])


def test_the_end_of_a_document_ends_the_sums():
    assert weights_of([0.8, 0.4], [1, 2]) == pytest.approx([1.53, 0.63])


def test_blocks_do_not_reach_into_each_other():
    both = weights_of([0.8, 0.4, 0.2, 0.6, 0.1], [1, 2, 3, 5, 7], blocks=2)
    assert both == pytest.approx([*weights_of([0.8, 0.4, 0.2], [1, 2, 3]), *weights_of([0.6, 0.1], [1, 3])])


def test_the_bounds_of_alpha():
    assert weights_of([0.8, 0.4, 0.2], [1, 2, 3], alpha=1.0) == [3, 2, 1]
    assert weights_of([0.5, 0.5, 0.5], [1, 2, 3], alpha=0.0) == [0.875, 0.375, 0.125]


def test_without_smoothing_it_is_the_gradient_of_the_expected_length():
    logits = torch.randn(3, dtype=torch.float64, requires_grad=True)
    log_p = torch.nn.functional.logsigmoid(logits)
    expected_length = log_p.cumsum(dim=0).exp().sum()
    (wanted,) = torch.autograd.grad(expected_length, log_p)
    assert weights_of(log_p.exp().tolist(), [1, 2, 3], alpha=0.0) == pytest.approx(wanted.tolist(), rel=1e-12)


# ---- in the objective


@pytest.fixture
def case(row, blocks_of):
    blocks = blocks_of(row([20, 9, 15], 3, holes=0.2), num_anchors=6)
    torch.manual_seed(0)
    hidden = torch.randn(blocks.count * 4, 16, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randn(40, 16, dtype=torch.float64), blocks


def slow(hidden, head, blocks):
    """Σ w·CE and Σ w, row by row."""
    log_p = torch.log_softmax(hidden @ head.T, dim=-1).view(blocks.count, 4, -1)
    loss = weight = torch.zeros((), dtype=torch.float64)
    for n in range(blocks.count):
        rows = [k for k in range(4) if blocks.supervised[n, k]]
        own = [log_p[n, k, blocks.labels[n, k]] for k in rows]
        smoothed = [(1 - ALPHA) * each.detach().exp() + ALPHA for each in own]
        reached = [torch.stack(smoothed[: k + 1]).prod() for k in range(len(rows))]
        for k in range(len(rows)):
            w = torch.stack(reached[k:]).sum()
            loss, weight = loss - w * own[k], weight + w
    return loss, weight


@pytest.mark.parametrize("chunk_rows", [1, 4, 7, 9, 10_000])
def test_loss_weight_and_gradient_are_those_of_the_slow_sum(case, chunk_rows):
    hidden, head, blocks = case
    assert not blocks.supervised[:, 1:].all()  # Holes and ends are among them.
    sums = block_objective(hidden, head, blocks, chunk_rows=chunk_rows, objective=DPACE)
    loss, weight = slow(hidden, head, blocks)
    torch.testing.assert_close(sums.loss_sum, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums.weight_sum, weight, rtol=1e-12, atol=1e-12)
    assert not sums.weight_sum.requires_grad
    (ours,) = torch.autograd.grad(2.5 * sums.loss_sum, hidden)
    (theirs,) = torch.autograd.grad(2.5 * loss, hidden)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_the_decay_has_no_part_in_it_and_the_metrics_are_the_same(case, row, blocks_of):
    hidden, head, blocks = case
    other = blocks_of(row([20, 9, 15], 3, holes=0.2), num_anchors=6, gamma=1.0)
    one, two = (block_objective(hidden, head, each, chunk_rows=9, objective=DPACE) for each in (blocks, other))
    assert torch.equal(one.loss_sum, two.loss_sum)
    decayed = block_objective(hidden, head, blocks, chunk_rows=9)
    assert torch.equal(one.metrics, decayed.metrics)
    assert abs(one.loss_sum / one.weight_sum - decayed.loss_sum / decayed.weight_sum) > 1e-3


def test_confidence_is_float32_in_a_bfloat16_run(case):
    hidden, head, blocks = case
    narrow = hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        sums = block_objective(narrow, head.bfloat16(), blocks, chunk_rows=9, objective=DPACE)
    loss, weight = slow(narrow.double(), head.bfloat16().double(), blocks)
    assert sums.weight_sum.dtype is torch.float32
    assert sums.weight_sum.item() == pytest.approx(weight.item(), rel=5e-3)
    assert sums.loss_sum.item() == pytest.approx(loss.item(), rel=5e-3)


def test_no_block_has_no_weight(row, blocks_of):
    blocks = blocks_of(row([2, 1]))
    hidden = torch.zeros(0, 16, requires_grad=True)
    sums = block_objective(hidden, torch.randn(40, 16), blocks, chunk_rows=8, objective=DPACE)
    sums.loss_sum.backward()
    assert (sums.loss_sum.item(), sums.weight_sum.item()) == (0, 0)
