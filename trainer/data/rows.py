"""The schedule: which documents make a micro-batch, and which target and drafter it goes to.

Pure functions of (lengths, seed, epoch, token budget) and of the layout. Rows are packed without looking at the
layout, so a run resumes exactly on another number of GPUs and two runs can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Lengths are blurred by up to this share before they are sorted: rows have other companions in each epoch, for a
# padding share that grows by half of it (about 3%).
_BLUR = 1 / 16

# The target's batches have 16 lengths an octave: on average 3% of padding more, and few enough shapes for kernels that
# are tuned for each: tuned at every new length they stopped others in mid-run.
_WIDTHS_PER_OCTAVE = 16


@dataclass(frozen=True)
class Row:
    """One micro-batch: document indices (longest first or nearly so), and its tokens without padding."""

    documents: tuple[int, ...]
    tokens: int


def padded_width(longest: int, bucket_tokens: int) -> int:
    """Return the columns of the target's batch: its longest document rounded up to a multiple of a step.

    The step is 1/16 of the power of two at or below the length, at most `bucket_tokens`.
    """
    step = min(max((1 << (longest.bit_length() - 1)) // _WIDTHS_PER_OCTAVE, 1), bucket_tokens)
    return -(-longest // step) * step


def pack_rows(
    lengths: NDArray[np.int32],
    candidates: NDArray[np.int32],
    *,
    seed: int,
    epoch: int,
    token_budget: int,
    bucket_tokens: int,
    max_documents: int | None = None,
) -> list[Row]:
    """Pack every document into exactly one row of one epoch; rows come in training order.

    The target runs a row as one right-padded batch, so k documents fit when k · (padded width
    of the longest) ≤ token_budget. One document always fits, though its width may exceed the budget by one step.

    Args:
        lengths: int32[n], tokens of each document, 1..token_budget.
        candidates: int32[n], anchor candidates of each document, at least 1 (others are dropped by the data set).
        seed: of the run.
        epoch: counted from 0.
        token_budget: padded tokens of one row.
        bucket_tokens: the largest step of padded widths; documents of one row differ by little more than that in length.
        max_documents: bound of documents a row, since each wants one anchor at least; None for no bound.

    Raises:
        ValueError: a document is longer than the budget, empty, or has no candidate.
    """
    if len(lengths) and (int(lengths.min()) < 1 or int(lengths.max()) > token_budget):
        raise ValueError(f"lengths {lengths.min()}..{lengths.max()} outside 1..{token_budget}")
    if len(candidates) != len(lengths) or (candidates < 1).any():
        raise ValueError("every document needs one anchor candidate at least")
    draws = _draws(seed, epoch, 2 * len(lengths))
    blur = np.minimum(lengths * _BLUR, bucket_tokens) * (draws[: len(lengths)] >> np.uint64(11)) * 2.0**-53
    order = np.argsort(-(lengths + blur), kind="stable")
    packed = _fill(order.tolist(), lengths[order].tolist(), token_budget, bucket_tokens, max_documents or len(lengths))
    shuffled = np.argsort(draws[len(lengths) : len(lengths) + len(packed)], kind="stable")
    return [packed[index] for index in shuffled.tolist()]


def padding_share(rows: Sequence[Row], lengths: NDArray[np.int32], bucket_tokens: int) -> float:
    """Return the share of padding among the tokens that the target computes, 0..1."""
    valid = sum(row.tokens for row in rows)
    computed = sum(
        len(row.documents) * padded_width(max(int(lengths[d]) for d in row.documents), bucket_tokens) for row in rows
    )
    return 1 - valid / computed if computed else 0.0


def assign_step(
    tokens: Sequence[int], step: int, machines: int, targets: int, drafters: int, shared: bool
) -> list[tuple[int, int, int]]:
    """Deal the micro-batches of one optimizer step to machines, targets and drafters.

    Longest first (ties by position), each goes to the machine, and there to the target and independently to the
    drafter, with the fewest tokens so far in this step; ties go to the first index counted cyclically from `step`.
    Starting at 0 in every step would give the odd micro-batch of each step to the same rank.

    Args:
        tokens: of each micro-batch of the step, in ascending b.
        step: counted from 1.
        machines: how many, all with the same layout.
        targets: per machine.
        drafters: per machine; equal to `targets` with `shared`.
        shared: a rank holds both roles, so target and drafter are one choice.

    Returns:
        (machine, target, drafter) of each micro-batch, indices within their kind (target, drafter: of the machine).

    Raises:
        ValueError: shared roles with different counts.
    """
    if shared and targets != drafters:
        raise ValueError(f"shared roles need as many targets as drafters, not {targets} and {drafters}")
    machine_load = [0] * machines
    target_load = [[0] * targets for _ in range(machines)]
    drafter_load = [[0] * drafters for _ in range(machines)]
    chosen: list[tuple[int, int, int]] = [(0, 0, 0)] * len(tokens)
    for position in sorted(range(len(tokens)), key=lambda b: (-tokens[b], b)):
        machine = _lightest(machine_load, step)
        target = _lightest(target_load[machine], step)
        drafter = target if shared else _lightest(drafter_load[machine], step)
        machine_load[machine] += tokens[position]
        target_load[machine][target] += tokens[position]
        drafter_load[machine][drafter] += tokens[position]
        chosen[position] = (machine, target, drafter)
    return chosen


def _lightest(loads: list[int], step: int) -> int:
    return min(range(len(loads)), key=lambda index: (loads[index], (index - step) % len(loads)))


def _draws(seed: int, epoch: int, count: int) -> NDArray[np.uint64]:
    """Return uint64[count] of the Philox stream keyed by (seed, epoch).

    The raw stream is fixed for all numpy versions; Generator's methods are not (NEP 19), and a resumed run may meet
    another numpy.
    """
    return np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(count)


def _fill(order: list[int], lengths: list[int], token_budget: int, bucket_tokens: int, max_documents: int) -> list[Row]:
    """Cut the sorted documents into rows, greedily."""
    rows: list[Row] = []
    start = longest = tokens = 0
    for position, length in enumerate(lengths):
        count = position - start
        width = padded_width(max(longest, length), bucket_tokens)
        if count and ((count + 1) * width > token_budget or count == max_documents):
            rows.append(Row(tuple(order[start:position]), tokens))
            start, longest, tokens = position, 0, 0
        longest = max(longest, length)
        tokens += length
    if lengths:
        rows.append(Row(tuple(order[start:]), tokens))
    return rows
