"""Anchors: where blocks may start, how many a document of a packed row gets, and which.

numpy on the CPU only: the count and place of anchors never wait for a GPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.drafter.randomness import philox


def candidates(loss_mask: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the ascending indices i of one document, in [0, S-2], with loss_mask[i] and loss_mask[i+1].

    The anchor's successor is the first token that a block predicts; the last token has none, so S-1 is never one.
    """
    supervised = loss_mask.astype(bool)
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def row_shares(candidate_counts: NDArray[np.int64], budget: int, num_anchors: int) -> NDArray[np.int64]:
    """Share `budget` blocks of a packed row among its documents, in proportion to their candidates.

    A document with candidates gets at least one block and at most min(num_anchors, its candidates); one draw over the
    whole row would starve short documents. The sum never exceeds `budget`, which bounds memory: where more documents
    have candidates than there are blocks, those with the most candidates get one each. Integers only, so that every
    machine deals the same. Returns i64, one per document.
    """
    counts = np.asarray(candidate_counts, dtype=np.int64)
    ceiling = np.minimum(counts, num_anchors)
    # The common case of short rows: everybody gets all they can use.
    if ceiling.sum() <= budget:
        return ceiling
    if np.count_nonzero(counts) >= budget:
        shares = np.zeros_like(counts)
        shares[np.argsort(-counts, kind="stable")[:budget]] = 1
        return shares
    # Floors first, raised to one; then the rest is moved, one block each, to or from who is furthest from their part.
    total = int(counts.sum())
    shares = np.clip(budget * counts // total, np.minimum(counts, 1), ceiling)
    while (left := budget - int(shares.sum())) != 0:
        # How far each is below its exact part, in units of 1/total of a block.
        deficit = budget * counts - shares * total
        movable = np.flatnonzero(shares < ceiling) if left > 0 else np.flatnonzero(shares > 1)
        order = movable[np.argsort(-np.sign(left) * deficit[movable], kind="stable")]
        shares[order[: abs(left)]] += np.sign(left)
    return shares


def sample_anchors(
    document_candidates: NDArray[np.int64], count: int, *, seed: int, epoch: int, document_id: int
) -> NDArray[np.int64]:
    """Draw `count` of a document's candidates without replacement; return them ascending.

    Depends on (seed, epoch, document id) alone, never on rank or row. The `count` smallest of one 64-bit draw per
    candidate are taken: numpy guarantees the raw stream of a bit generator, not that of Generator.choice.
    """
    # No draw, so that a short document costs nothing and does not depend on the seed.
    if count >= len(document_candidates):
        return document_candidates
    draws = philox("anchors", seed, epoch, document_id).random_raw(len(document_candidates))
    return np.sort(document_candidates[np.argsort(draws, kind="stable")[:count]])
