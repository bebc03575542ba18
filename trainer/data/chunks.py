"""Documents of one file or part of a file as flat arrays; a mapped file stays where it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

IGNORED_LABEL = -100


class Supervision(Enum):
    """The column that says which tokens are labels; where a file has several, the first one here counts."""

    LOSS_MASK = "loss_mask"
    LABELS = "labels"
    COMPLETION_MASK = "completion_mask"
    PROMPT_LEN = "prompt_len"

    @property
    def per_token(self) -> bool:
        """Whether the column holds a list a document, not a number."""
        return self is not Supervision.PROMPT_LEN


@dataclass(frozen=True)
class Chunk:
    """n documents.

    Attributes:
        ids: integers[tokens], of all documents one after the other.
        offsets: int64[n+1], document i is ids[offsets[i]:offsets[i+1]].
        kind: what `supervision` means.
        supervision: one number a token beside `ids`, or with PROMPT_LEN int64[n].
        source: the file, for messages.
        rows: int64[n], number of each document's row in the file, from 1 (a line number in JSONL).
    """

    ids: NDArray[np.integer]
    offsets: NDArray[np.int64]
    kind: Supervision
    supervision: NDArray[np.generic]
    source: Path
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64[n], tokens of each document before truncation."""
        return np.diff(self.offsets)

    def input_ids(self, row: int, length: int) -> NDArray[np.int32]:
        """Return the first `length` ids of a document as int32."""
        start = int(self.offsets[row])
        return self.ids[start : start + length].astype(np.int32)

    def loss_mask(self, row: int, length: int) -> NDArray[np.uint8]:
        """Return the first `length` entries of a document's loss mask as uint8 of 0 and 1."""
        if self.kind is Supervision.PROMPT_LEN:
            return (np.arange(length) >= self.supervision[row]).astype(np.uint8)
        start = int(self.offsets[row])
        return supervised_tokens(self.kind, self.supervision[start : start + length])

    def flat_loss_mask(self, first: int, last: int) -> NDArray[np.uint8]:
        """Return the loss mask of documents first..last-1 in one array, untruncated."""
        start, end = int(self.offsets[first]), int(self.offsets[last])
        if self.kind is not Supervision.PROMPT_LEN:
            return supervised_tokens(self.kind, self.supervision[start:end])
        starts = self.offsets[first:last]
        prompt_end = np.repeat(starts + self.supervision[first:last].astype(np.int64), self.lengths[first:last])
        return (np.arange(start, end) >= prompt_end).astype(np.uint8)


def supervised_tokens(kind: Supervision, values: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Return uint8 of 0 and 1 from the values of a per-token column."""
    ignored = IGNORED_LABEL if kind is Supervision.LABELS else 0
    return (values != ignored).astype(np.uint8)
