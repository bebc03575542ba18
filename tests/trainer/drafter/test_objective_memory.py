"""What the objective allocates, forward and backward: a few chunks of logits, whatever the number of rows.

Torch's own record of every allocation is read, also of those inside an operator: no clock, no resident pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from trainer.drafter import objective as objective_module
from trainer.drafter.objective import DECAY, Objective, block_objective

BLOCK, HIDDEN, VOCABULARY = 8, 16, 4096
CHUNK_ROWS = 64
CHUNK = CHUNK_ROWS * VOCABULARY * 4
"""Bytes of the logits of a chunk: the softmax is float32 for bfloat16 states too."""
PER_ROW = 2 * HIDDEN * 4 + 64
"""Bytes a row may take beside logits: two gradients of its state, and some numbers. Its own logits would be 16 KiB."""
FEW, MANY = 4, 32
ROWS = {documents: documents * 8 * BLOCK for documents in (FEW, MANY)}


class Allocations(NamedTuple):
    """Bytes: the largest single one, and the most that lived at once."""

    largest: int
    peak: int


def allocations(work: Callable[[], object]) -> Allocations:
    """Return what `work` allocates on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        work()
    assert record.profiler is not None
    assert record.profiler.kineto_results is not None
    events = [each for each in record.profiler.kineto_results.events() if each.name() == "[memory]"]
    sizes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    live = peak = 0
    for size in sizes:
        live += size
        peak = max(peak, live)
    return Allocations(max(sizes), peak)


@pytest.fixture(scope="module")
def measured(row, blocks_of):
    """Return a function that measures `compute` (hidden, head, blocks, teacher), which returns a loss, and its backward."""

    def measure(compute, documents, dtype=torch.float32):
        blocks = blocks_of(row([64] * documents), num_anchors=8, row_budget=64 * documents, block_size=BLOCK)
        assert blocks.count * BLOCK == ROWS[documents]
        torch.manual_seed(0)
        hidden = torch.randn(ROWS[documents], HIDDEN, dtype=dtype, requires_grad=True)
        head = torch.randn(VOCABULARY, HIDDEN, dtype=dtype)
        teacher = torch.randn(64 * documents, HIDDEN, dtype=dtype)
        found = allocations(lambda: compute(hidden, head, blocks, teacher).backward())
        assert hidden.grad is not None
        return found

    return measure


def ours(objective, chunk_rows=CHUNK_ROWS):
    def compute(hidden, head, blocks, teacher):
        return block_objective(
            hidden, head, blocks, chunk_rows=chunk_rows, objective=objective, teacher=teacher
        ).loss_sum

    return compute


def kept_logits(hidden, head, blocks, _):
    """Chunks of the right size whose logits autograd keeps until the backward."""
    parts = zip(hidden.split(CHUNK_ROWS), blocks.labels.flatten().split(CHUNK_ROWS), strict=True)
    return torch.stack(
        [functional.cross_entropy(rows @ head.T, labels, reduction="sum") for rows, labels in parts]
    ).sum()


def growth(few, many):
    """Return the bytes that a further row took."""
    return (many.peak - few.peak) / (ROWS[MANY] - ROWS[FEW])


# Chunks of logits at once: the drafter's; with KL the target's probabilities too, and what they are made from.
@pytest.mark.parametrize(
    ("objective", "chunks"),
    [(DECAY, 1), (Objective(0.5), 1), (Objective(None, 0.5), 3), (Objective(0.5, 0.5), 3)],
    ids=["decay", "dpace", "kl", "dpace with kl"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_a_chunk_whatever_the_rows(measured, objective, chunks, dtype):
    few, many = (measured(ours(objective), documents, dtype) for documents in (FEW, MANY))
    # A product in bfloat16 is half a chunk until it has become float32, and its operands are repacked on the CPU.
    narrow = 1 if dtype is torch.bfloat16 and chunks == 1 else 0
    for documents, found in ((FEW, few), (MANY, many)):
        assert found.largest <= CHUNK
        assert found.peak <= (chunks + narrow) * CHUNK + PER_ROW * ROWS[documents]
    assert growth(few, many) <= PER_ROW


def test_more_rows_at_once_take_more(measured):
    one, two = (measured(ours(DECAY, chunk_rows=rows), MANY) for rows in (CHUNK_ROWS, 2 * CHUNK_ROWS))
    assert 1.9 * one.largest <= two.largest <= 2 * CHUNK
    assert two.peak > CHUNK + PER_ROW * ROWS[MANY]


def test_one_chunk_of_everything_is_seen(measured):
    few, many = (measured(ours(DECAY, chunk_rows=ROWS[MANY]), documents) for documents in (FEW, MANY))
    # Seven of a block's eight rows are supervised.
    assert many.largest > 0.8 * ROWS[MANY] * VOCABULARY * 4
    assert growth(few, many) > 50 * PER_ROW


def test_chunks_that_outlive_the_forward_are_seen(measured):
    few, many = (measured(kept_logits, documents) for documents in (FEW, MANY))
    assert many.largest <= CHUNK, "each is small, and yet all are there"
    assert growth(few, many) > 50 * PER_ROW


def test_a_chunk_that_lives_until_the_next_is_seen(measured, monkeypatch):
    kept = []

    def hold(*given):
        found = chunk_losses(*given)
        # What a name in the loop does: the gradient of the logits stays until there is another.
        kept[:] = [torch.empty(len(given[2]), VOCABULARY)]
        return found

    chunk_losses = objective_module._chunk_losses
    monkeypatch.setattr(objective_module, "_chunk_losses", hold)
    assert measured(ours(DECAY), MANY).peak > CHUNK + PER_ROW * ROWS[MANY]


def test_a_temporary_inside_an_operator_is_seen():
    rows = torch.zeros(64, VOCABULARY)
    # logsumexp returns 64 numbers, and makes the exponentials of all on its way.
    assert allocations(lambda: rows.logsumexp(dim=-1)).largest == rows.numel() * 4
