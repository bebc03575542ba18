"""Blocks of one packed row: N anchors, B rows each, with labels, weights and what the attention mask needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from trainer.drafter.anchors import candidates, row_shares, sample_anchors
from trainer.upload import upload

# The document index of rows that are padding: of context rows, and of the blocks behind a row's own.
PADDING = -1


class Run(NamedTuple):
    """One document of a packed row: rows [start, end) and its id in the data set."""

    start: int
    end: int
    document_id: int


class Segment(NamedTuple):
    """One document of a packed row that owns blocks [first_block, last_block), and the rows [start, end) they may see.

    `end` is the row of the document's last anchor: no block looks at or beyond its own anchor. Padding blocks see none.
    """

    start: int
    end: int
    first_block: int
    last_block: int


@dataclass(frozen=True)
class Blocks:
    """N blocks of B rows over a packed row of T context rows. Block row k predicts the token at anchor + k (no shift).

    The drafter runs P >= N blocks: those behind the N are padding to a bucket (`pad_blocks`), and carry no loss.
    All tensors share one device; the tuples stay on the host, so that no step waits for them.
    `supervised_rows` lists the M rows of the flattened [N·B] that carry loss; `supervised_before` says on the host where
    in it each block begins. N may be 0, then there is one empty segment, which keeps every parameter in the autograd
    graph: a rank without anchors still joins the all-reduce.
    """

    input_ids: torch.Tensor  # i64[P, B]: the anchor's token, then mask tokens
    labels: torch.Tensor  # i64[N, B]: tokens anchor .. anchor+B-1, 0 where unsupervised
    weights: torch.Tensor  # f32[N, B]: exp(-(k-1)/gamma), 0 where unsupervised
    supervised: torch.Tensor  # bool[N, B]
    supervised_rows: torch.Tensor  # i64[M]
    anchor_positions: torch.Tensor  # i64[P]: position of the anchor in its document
    anchor_rows: torch.Tensor  # i64[N]: index of the anchor in the packed row
    positions: torch.Tensor  # i64[P, B]: anchor position + k, the rotary position
    documents: torch.Tensor  # i64[P]: ordinal of the block's document in the row, PADDING for padding
    context_positions: torch.Tensor  # i64[T]
    context_documents: torch.Tensor  # i64[T], PADDING for padding rows
    runs: tuple[Run, ...]
    segments: tuple[Segment, ...]
    supervised_before: tuple[int, ...]  # N+1: supervised rows in front of block n; the last is M

    @property
    def count(self) -> int:
        """N, the number of blocks that have an anchor."""
        return self.labels.shape[0]

    @property
    def block_size(self) -> int:
        """B, the number of rows of a block."""
        return self.input_ids.shape[1]

    def to(self, device: torch.device | str) -> Blocks:
        """Return the same blocks with every tensor on `device`; the host does not wait for it."""
        moved = {}
        for field in fields(self):
            value = getattr(self, field.name)
            moved[field.name] = upload(value, device) if torch.is_tensor(value) else value
        return Blocks(**moved)


def build_blocks(
    input_ids: NDArray[np.int32],
    loss_mask: NDArray[np.uint8],
    document_ids: NDArray[np.int64],
    position_ids: NDArray[np.int32],
    *,
    seed: int,
    epoch: int,
    num_anchors: int,
    row_budget: int,
    block_size: int,
    mask_token_id: int,
    gamma: float,
    bucket: int = 0,
) -> Blocks:
    """Draw the anchors of a packed row and lay out their blocks on the CPU.

    Args: four arrays of T rows, every document one contiguous run (id -1: padding); `num_anchors` blocks at most a
    document, `row_budget` block rows at most a packed row, `gamma` the decay length of the weights in rows; `bucket` as
    for `pad_blocks`.
    """
    # Everything here is numpy on the CPU copy of the batch: no count, and no empty-batch test, waits for a GPU.
    runs = document_runs(document_ids)
    found = [candidates(loss_mask[run.start : run.end]) for run in runs]
    counts = np.array([len(each) for each in found], dtype=np.int64)
    shares = row_shares(counts, row_budget // block_size, num_anchors)
    drawn = [
        sample_anchors(each, int(share), seed=seed, epoch=epoch, document_id=run.document_id)
        for run, each, share in zip(runs, found, shares, strict=True)
    ]
    blocks = lay_out(
        input_ids,
        loss_mask,
        position_ids,
        runs,
        drawn,
        block_size=block_size,
        mask_token_id=mask_token_id,
        gamma=gamma,
    )
    return pad_blocks(blocks, bucket)


def lay_out(
    input_ids: NDArray[np.int32],
    loss_mask: NDArray[np.uint8],
    position_ids: NDArray[np.int32],
    runs: Sequence[Run],
    anchors: Sequence[NDArray[np.int64]],
    *,
    block_size: int,
    mask_token_id: int,
    gamma: float,
) -> Blocks:
    """Lay out blocks at given anchors; `anchors[d]` are ascending offsets inside document d of `runs`.

    A block that runs over its document's end keeps its B rows; those beyond the end are unsupervised.
    """
    rows = len(input_ids)
    context_documents = np.full(rows, PADDING, dtype=np.int64)
    for ordinal, run in enumerate(runs):
        context_documents[run.start : run.end] = ordinal
    # Ordinals, not data-set ids, tell documents apart: one document may be in a row twice when epochs meet.
    documents = np.repeat(np.arange(len(runs)), [len(each) for each in anchors]).astype(np.int64)
    starts, ends = np.array([(run.start, run.end) for run in runs], dtype=np.int64).reshape(-1, 2)[documents].T
    anchor_rows = starts + (np.concatenate(anchors) if anchors else np.zeros(0, dtype=np.int64))
    # Row k of a block predicts the token at anchor + k, the very position it stands at: no shift, unlike a causal LM.
    offsets = np.arange(block_size)
    row_index = anchor_rows[:, None] + offsets
    # Blocks may run over the end of the row; they are clipped for the look-up and masked right below.
    inside = np.minimum(row_index, max(rows - 1, 0))
    # The document's end, not the row's: in a packed row the next token belongs to somebody else.
    supervised = (row_index < ends[:, None]) & (offsets > 0) & loss_mask.astype(bool)[inside]
    block_ids = np.full(row_index.shape, mask_token_id, dtype=np.int64)
    block_ids[:, 0] = input_ids[anchor_rows]
    # Rotary positions count from the document's start, like the target's; S + k would be off by the whole context.
    anchor_positions = position_ids[anchor_rows].astype(np.int64)
    return Blocks(
        input_ids=torch.from_numpy(block_ids),
        labels=torch.from_numpy(np.where(supervised, input_ids[inside], 0).astype(np.int64)),
        weights=torch.from_numpy((np.exp(-(offsets - 1) / gamma) * supervised).astype(np.float32)),
        supervised=torch.from_numpy(supervised),
        supervised_rows=torch.from_numpy(np.flatnonzero(supervised)),
        anchor_positions=torch.from_numpy(anchor_positions),
        anchor_rows=torch.from_numpy(anchor_rows),
        positions=torch.from_numpy(anchor_positions[:, None] + offsets),
        documents=torch.from_numpy(documents),
        context_positions=torch.from_numpy(position_ids.astype(np.int64)),
        context_documents=torch.from_numpy(context_documents),
        runs=tuple(runs),
        segments=_segments(runs, anchors),
        supervised_before=(0, *np.cumsum(supervised.sum(axis=1)).tolist()),
    )


def pad_blocks(blocks: Blocks, bucket: int) -> Blocks:
    """Return the blocks with padding up to the next multiple of `bucket`, at least one; 0: as they are.

    So few numbers of block rows exist, and kernels are compiled for these and for no more. A padding block sees itself
    alone: a row that saw nothing would be NaN. None of its rows is supervised, so it adds nothing to any sum or gradient.
    """
    missing = padded_count(blocks.count, bucket) - blocks.count
    if not missing:
        return blocks
    # Anchored at 0, in front of which there is no context; token 0 is as good as any.
    offsets = torch.arange(blocks.block_size).expand(missing, -1)
    return replace(
        blocks,
        input_ids=functional.pad(blocks.input_ids, (0, 0, 0, missing)),
        anchor_positions=functional.pad(blocks.anchor_positions, (0, missing)),
        positions=torch.cat([blocks.positions, offsets]),
        documents=functional.pad(blocks.documents, (0, missing), value=PADDING),
        segments=(*blocks.segments, Segment(0, 0, blocks.count, blocks.count + missing)),
    )


def padded_count(count: int, bucket: int) -> int:
    """Return the number of blocks with padding, P, of N = `count`."""
    return max(1, -(-count // bucket)) * bucket if bucket else count


def document_runs(document_ids: NDArray[np.int64]) -> list[Run]:
    """Return every contiguous run of one document id of i64[T], padding left out."""
    if len(document_ids) == 0:
        return []
    cuts = np.flatnonzero(np.diff(document_ids)) + 1
    bounds = [0, *cuts.tolist(), len(document_ids)]
    runs = (Run(start, end, int(document_ids[start])) for start, end in pairwise(bounds))
    return [run for run in runs if run.document_id != PADDING]


def _segments(runs: Sequence[Run], anchors: Sequence[NDArray[np.int64]]) -> tuple[Segment, ...]:
    """Return the documents that own blocks; one empty segment where none does."""
    segments: list[Segment] = []
    first = 0
    for run, offsets in zip(runs, anchors, strict=True):
        # Documents without anchors (prompts cut at the limit, for instance) cost no attention at all.
        if len(offsets):
            segments.append(Segment(run.start, run.start + int(offsets[-1]), first, first + len(offsets)))
        first += len(offsets)
    return tuple(segments) or (Segment(0, 0, 0, 0),)
