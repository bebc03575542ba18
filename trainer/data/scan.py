"""One pass over the tokens of a chunk: checks, counts and a checksum of each document, without a Python loop."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.data.chunks import Chunk, Supervision
from trainer.data.jsonl import row_error

# Tokens looked at together: temporaries of about 100 bytes a token, beside a data set that may be mapped.
_PIECE_TOKENS = 1 << 20


@dataclass(frozen=True)
class Scan:
    """Per document, after truncation: lengths, supervised and candidates int32[n], checksums uint64[n]."""

    lengths: NDArray[np.int32]
    supervised: NDArray[np.int32]
    candidates: NDArray[np.int32]
    checksums: NDArray[np.uint64]


def scan_chunk(chunk: Chunk, max_length: int, vocab_size: int | None) -> Scan:
    """Scan a chunk in pieces of whole documents.

    Raises:
        DflashError: a token id is negative or outside the vocabulary, labels are shifted against the ids.
    """
    scans = [_scan_piece(chunk, first, last, max_length, vocab_size) for first, last in pieces(chunk)]
    if not scans:
        empty = np.zeros(0, np.int32)
        return Scan(empty, empty, empty, empty.astype(np.uint64))
    columns = zip(*((p.lengths, p.supervised, p.candidates, p.checksums) for p in scans), strict=True)
    return Scan(*(np.concatenate(column) for column in columns))


def pieces(chunk: Chunk) -> list[tuple[int, int]]:
    """Return (first document, last + 1) of the pieces that a chunk is looked at in, about a million tokens each."""
    cuts = [0]
    while cuts[-1] < len(chunk):
        upto = int(np.searchsorted(chunk.offsets, chunk.offsets[cuts[-1]] + _PIECE_TOKENS, side="right")) - 1
        cuts.append(max(upto, cuts[-1] + 1))  # one document longer than a piece goes alone
    return list(itertools.pairwise(cuts))


def _scan_piece(chunk: Chunk, first: int, last: int, max_length: int, vocab_size: int | None) -> Scan:
    ids = chunk.ids[int(chunk.offsets[first]) : int(chunk.offsets[last])].astype(np.int64)
    starts = chunk.offsets[first:last] - chunk.offsets[first]
    mask = chunk.flat_loss_mask(first, last)
    _check_ids(chunk, first, ids, starts, vocab_size)
    if chunk.kind is Supervision.LABELS:
        _check_labels(chunk, first, last, ids, starts, mask)
    lengths = np.minimum(chunk.lengths[first:last], max_length)
    ends = starts + lengths
    pairs = _running(mask[:-1] & mask[1:])
    # i in [start, end-2]: the pair (end-1, end) lies beyond the document.
    candidates = np.where(lengths > 1, pairs[np.maximum(ends - 1, 0)] - pairs[np.minimum(starts, len(pairs) - 1)], 0)
    total = _running(mask)
    return Scan(
        lengths.astype(np.int32),
        (total[ends] - total[starts]).astype(np.int32),
        candidates.astype(np.int32),
        _checksums(ids, mask, starts, ends),
    )


def _running(values: NDArray[np.uint8]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])


def _checksums(
    ids: NDArray[np.int64], mask: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Return Σ v_j·(2j+1) mod 2^64 of each document, v = 2·id + mask, j from 0 in the document.

    The weights 2g+1 of the flat position g are taken first: Σ v·(2(g-start)+1) = Σ v·(2g+1) - 2·start·Σ v.
    """
    values = (2 * ids + mask).astype(np.uint64)
    plain = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
    weights = 2 * np.arange(len(ids), dtype=np.uint64) + np.uint64(1)
    weighted = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values * weights, dtype=np.uint64)])
    return (weighted[ends] - weighted[starts]) - np.uint64(2) * starts.astype(np.uint64) * (plain[ends] - plain[starts])


def _check_ids(
    chunk: Chunk, first: int, ids: NDArray[np.int64], starts: NDArray[np.int64], vocab_size: int | None
) -> None:
    limit = vocab_size if vocab_size is not None else np.iinfo(np.int32).max
    if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < limit):
        return
    position = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
    raise row_error(
        chunk.source,
        int(chunk.rows[first + int(np.searchsorted(starts, position, side="right")) - 1]),
        # As the file has it: ids beyond 63 bits are negative by now.
        f"token id {chunk.ids[int(chunk.offsets[first]) + position]} is outside the vocabulary of {limit}",
        "tokenise with the target's own tokenizer",
    )


def _check_labels(
    chunk: Chunk,
    first: int,
    last: int,
    ids: NDArray[np.int64],
    starts: NDArray[np.int64],
    mask: NDArray[np.uint8],
) -> None:
    labels = chunk.supervision[int(chunk.offsets[first]) : int(chunk.offsets[last])]
    wrong = np.flatnonzero((mask == 1) & (labels != ids))
    if len(wrong):
        position = int(wrong[0])
        raise row_error(
            chunk.source,
            int(chunk.rows[first + int(np.searchsorted(starts, position, side="right")) - 1]),
            f"label {labels[position]} stands at token {ids[position]}: labels have to equal input_ids or be -100",
            "labels are not shifted here: position i holds the label of token i",
        )
