"""The shapes that a run will meet, from the schedule alone: what the target's batches measure, and the drafter's rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from trainer.config import TrainConfig
from trainer.data.rows import Row, padded_width
from trainer.data.schedule import Packing
from trainer.drafter.attention_choice import Backend


@dataclass(frozen=True)
class TargetShape:
    """A batch of `documents` right-padded to `width`."""

    documents: int
    width: int

    def __str__(self) -> str:
        return f"{self.documents} x {self.width}"


@dataclass(frozen=True)
class DrafterShape:
    """A packed row of `tokens` positions, `blocks` of them with a block, and its documents: lengths and anchor candidates.

    Held-out rows are run forward only, which other kernels do.
    """

    tokens: int
    blocks: int
    lengths: tuple[int, ...]
    candidates: tuple[int, ...]
    held_out: bool = False

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.blocks} blocks{', held out' if self.held_out else ''}"


def target_shapes(*sources: tuple[Iterable[Row], Packing]) -> list[TargetShape]:
    """Return the distinct shapes of rows of some data sets, the largest first: where memory lacks, that shows at once."""
    found = {
        TargetShape(documents, padded_width(longest, packing.bucket_tokens))
        for rows, packing in sources
        for documents, longest in np.unique(_measures(rows, packing, num_anchors=1)[:, :2], axis=0).tolist()
    }
    return sorted(found, key=lambda shape: (shape.documents * shape.width, shape.width), reverse=True)


def drafter_shapes(rows: Sequence[Row], packing: Packing, config: TrainConfig, backend: Backend) -> list[DrafterShape]:
    """Return one shape for each that rows of a data set have in the eyes of a backend, the largest first."""
    measures = _measures(rows, packing, num_anchors=config.num_anchors)
    # What `row_shares` deals out in all.
    anchors = np.minimum(measures[:, 3], config.row_anchors)
    # As `packed_length` has it, for all rows at once.
    positions = -(-measures[:, 2] // packing.bucket_tokens) * packing.bucket_tokens
    found: dict[tuple[int, ...], DrafterShape] = {}
    for place in np.lexsort((-measures[:, 1], -anchors, -positions)).tolist():
        tokens, blocks = int(positions[place]), int(anchors[place])
        key = backend.shape(tokens, blocks, config.row_anchors, config.block_size)
        if key not in found:
            documents = list(rows[place].documents)
            found[key] = DrafterShape(
                tokens,
                blocks,
                tuple(packing.lengths[documents].tolist()),
                tuple(packing.candidates[documents].tolist()),
            )
    return list(found.values())


STAND_IN = DrafterShape(tokens=1, blocks=0, lengths=(1,), candidates=(0,))
"""What a drafter runs in a step that has no micro-batch for it."""


def _measures(rows: Iterable[Row], packing: Packing, *, num_anchors: int) -> NDArray[np.int64]:
    """Return i64[rows, 4]: documents, tokens of the longest, tokens in all, anchors that its documents can use."""
    # A million rows: numpy takes a second where Python would take ten.
    rows = list(rows)
    if not rows:
        return np.zeros((0, 4), dtype=np.int64)
    counts = np.fromiter((len(row.documents) for row in rows), dtype=np.int64, count=len(rows))
    documents = np.fromiter(chain.from_iterable(row.documents for row in rows), dtype=np.int64, count=counts.sum())
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    lengths = packing.lengths[documents].astype(np.int64)
    usable = np.minimum(packing.candidates[documents], num_anchors).astype(np.int64)
    longest, tokens = np.maximum.reduceat(lengths, starts), np.add.reduceat(lengths, starts)
    return np.stack([counts, longest, tokens, np.add.reduceat(usable, starts)], axis=1)
