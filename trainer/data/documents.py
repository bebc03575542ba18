"""Tokenised data sets: what the target reads, one document at a time.

`open_dataset` takes a `datasets` directory (save_to_disk), parquet, arrow or JSONL files, or a directory of these.
A data set is opened by one scan over all tokens, which checks them, counts them and computes the fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from remote.protocol.errors import preflight_error
from trainer.data.chunks import Chunk
from trainer.data.files import read_chunks
from trainer.data.scan import Scan, pieces, scan_chunk


@dataclass(frozen=True)
class Document:
    """One document: input_ids int32[S], and loss_mask uint8[S], 1 where the token is a label."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


@dataclass(frozen=True)
class Counts:
    """What opening a data set found, in documents and, for `supervised_tokens`, in tokens after truncation."""

    read: int
    kept: int
    truncated: int
    without_candidates: int
    supervised_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.read} documents read, {self.kept} kept, {self.without_candidates} dropped without two supervised "
            f"tokens in a row, {self.truncated} cut to the maximum length, {self.supervised_tokens} supervised tokens"
        )


class Dataset:
    """Documents with at least one anchor candidate, numbered from 0 in the order of the files.

    Attributes:
        lengths: int32[n], tokens after truncation.
        supervised: int32[n], tokens with loss_mask 1.
        candidates: int32[n], number of i in [0, S-2] with loss_mask[i] and loss_mask[i+1].
        counts: what was read, cut and dropped.
        fingerprint: sha256 over the kept documents' content, whatever form of file they are stored in.
    """

    def __init__(self, chunks: Sequence[Chunk], scans: Sequence[Scan], max_length: int) -> None:
        self._chunks = chunks
        kept = [np.flatnonzero(scan.candidates) for scan in scans]
        # The place of document i: chunk and row in the chunk.
        self._chunk_of = np.repeat(np.arange(len(chunks), dtype=np.int32), [len(rows) for rows in kept])
        self._row_of = _concatenate(kept, np.int64)
        self.lengths = _concatenate([s.lengths[k] for s, k in zip(scans, kept, strict=True)], np.int32)
        self.supervised = _concatenate([s.supervised[k] for s, k in zip(scans, kept, strict=True)], np.int32)
        self.candidates = _concatenate([s.candidates[k] for s, k in zip(scans, kept, strict=True)], np.int32)
        checksums = _concatenate([s.checksums[k] for s, k in zip(scans, kept, strict=True)], np.uint64)
        read = sum(len(chunk) for chunk in chunks)
        self.counts = Counts(
            read=read,
            kept=len(self.lengths),
            truncated=sum(int((chunk.lengths > max_length).sum()) for chunk in chunks),
            without_candidates=read - len(self.lengths),
            supervised_tokens=sum(int(scan.supervised.sum()) for scan in scans),
        )
        self._checksums = checksums
        digest = hashlib.sha256(b"dflash documents 1\n")
        for column in (self.lengths, self.supervised, self.candidates, checksums):
            digest.update(column.astype(column.dtype.newbyteorder("<")).tobytes())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, index: int) -> Document:
        """Return one document, truncated; IndexError outside 0..len-1."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        chunk, row, length = self._chunks[self._chunk_of[index]], int(self._row_of[index]), int(self.lengths[index])
        return Document(chunk.input_ids(row, length), chunk.loss_mask(row, length))

    def common(self, other: Dataset) -> int:
        """Return how many documents of `other` are in this set too, by length and checksum, as far as both are cut."""
        mine, theirs = (np.stack([each.lengths.astype(np.uint64), each._checksums], axis=1) for each in (self, other))
        kind = np.dtype([("length", np.uint64), ("checksum", np.uint64)])
        return int(np.isin(theirs.view(kind)[:, 0], mine.view(kind)[:, 0]).sum())

    def token_ids_seen(self) -> NDArray[np.int64]:
        """Return the sorted distinct token ids of all documents, int64[m]."""
        seen = np.zeros(0, dtype=bool)
        for number, chunk in enumerate(self._chunks):
            used = self._used(number, chunk)
            for first, last in pieces(chunk):
                start, end, lengths = chunk.offsets[first], chunk.offsets[last], chunk.lengths[first:last]
                limits = np.repeat(chunk.offsets[first:last] + used[first:last], lengths)
                ids = chunk.ids[int(start) : int(end)][np.arange(start, end) < limits]
                if len(ids) and int(ids.max()) >= len(seen):
                    seen = np.concatenate([seen, np.zeros(int(ids.max()) + 1 - len(seen), dtype=bool)])
                seen[ids] = True
        return np.flatnonzero(seen).astype(np.int64)

    def count_labels(self, token: int) -> int:
        """Return how many labels of all documents are this token."""
        count = 0
        for number, chunk in enumerate(self._chunks):
            used = self._used(number, chunk)
            for first, last in pieces(chunk):
                start, end = int(chunk.offsets[first]), int(chunk.offsets[last])
                found = np.flatnonzero(chunk.ids[start:end] == token)
                # A token that no text contains is found nowhere: one comparison a token, 2% of what opening took.
                if not len(found):
                    continue
                found = found[chunk.flat_loss_mask(first, last)[found] == 1] + start
                rows = np.searchsorted(chunk.offsets, found, side="right") - 1
                count += int((found < chunk.offsets[rows] + used[rows]).sum())
        return count

    def _used(self, number: int, chunk: Chunk) -> NDArray[np.int64]:
        """Return int64[n], the tokens of each document of a chunk that count: none of those that were dropped."""
        mine = self._chunk_of == number
        used = np.zeros(len(chunk), np.int64)
        used[self._row_of[mine]] = self.lengths[mine]
        return used


def open_dataset(path: Path | str, *, max_length: int, vocab_size: int | None = None) -> Dataset:
    """Open tokenised data: `input_ids` and one of loss_mask, labels (-100), completion_mask, prompt_len.

    Args:
        path: a `datasets` directory, a file (.parquet, .arrow, .jsonl, .jsonl.gz), or a directory of such files.
        max_length: longer documents are cut at their end, and counted.
        vocab_size: ids from this on are an error; None leaves out that check.

    Raises:
        DflashError: nothing to read, columns missing, a bad row (file and row named), no supervised token at all.
    """
    path = Path(path)
    chunks = list(read_chunks(path))
    dataset = Dataset(chunks, [scan_chunk(chunk, max_length, vocab_size) for chunk in chunks], max_length)
    if not len(dataset):
        nothing = "no supervised token" if not dataset.counts.supervised_tokens else "no anchor candidate"
        raise preflight_error(
            f"{path} has {nothing}: there is nothing to train on",
            cause=str(dataset.counts),
            hint="make the loss mask with `python -m trainer prepare`, or raise the maximum length",
        )
    return dataset


def _concatenate(arrays: Sequence[NDArray], dtype: type) -> NDArray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)
