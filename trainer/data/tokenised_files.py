"""Writing tokenised documents: arrow where pyarrow is installed, else JSONL; both are read by open_dataset.

Arrow and not parquet, since an arrow file is mapped: the leader and all targets of a run then share one copy in the
page cache, 5 bytes a token, where each would decode parquet into memory of its own.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from trainer.data.chat import Encoded

# Tokens of one record batch: 5 MB. Batches of a few documents each would make a file slow to open.
_BATCH_TOKENS = 1 << 20


@dataclass(frozen=True)
class Documents:
    """n documents one after the other: input_ids int32[tokens], loss_mask uint8[tokens], lengths and times int64[n].

    A few arrays and not one object a document: they cross from process to process by copying memory. `times` says how
    often each stands in the set; a document is repeated where it is written, so that memory knows no weights.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    times: NDArray[np.int64]

    @classmethod
    def of(cls, documents: Sequence[Encoded], times: Sequence[int] | None = None) -> Documents:
        """Join documents; each counts once if `times` does not say otherwise."""
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(document.input_ids for document in documents)]),
            np.concatenate([np.zeros(0, np.uint8), *(document.loss_mask for document in documents)]),
            np.array([len(document.input_ids) for document in documents], dtype=np.int64),
            np.array([1] * len(documents) if times is None else times, dtype=np.int64),
        )

    def __len__(self) -> int:
        """Documents with their repetitions."""
        return int(self.times.sum())

    def repeated(self) -> Iterator[Documents]:
        """Yield all documents as often as they count, each time in its place, in pieces of about a million tokens."""
        if (self.times == 1).all():
            yield self
            return
        ends, starts = np.cumsum(self.times), np.cumsum(self.lengths) - self.lengths
        step = max(_BATCH_TOKENS // max(int(self.lengths.max()), 1), 1)
        for first in range(0, len(self), step):
            rows = np.searchsorted(ends, np.arange(first, min(first + step, len(self))), side="right").tolist()
            spans = [slice(int(starts[row]), int(starts[row] + self.lengths[row])) for row in rows]
            yield Documents(
                np.concatenate([self.input_ids[span] for span in spans]),
                np.concatenate([self.loss_mask[span] for span in spans]),
                self.lengths[rows],
                np.ones(len(rows), np.int64),
            )


class DocumentWriter(Protocol):
    """A file that takes documents; closed by the end of its with block."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def write(self, documents: Documents) -> None:
        """Append documents, each as often as it counts."""
        ...


def document_writer(directory: Path) -> DocumentWriter:
    """Return the writer of the best form that this machine has."""
    if importlib.util.find_spec("pyarrow") is not None:
        return ArrowWriter(directory / "documents.arrow")
    return JsonlWriter(directory / "documents.jsonl")


class JsonlWriter:
    """One object a line with input_ids and loss_mask."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, documents: Documents) -> None:
        """Append documents, each as often as it counts."""
        for piece in documents.repeated():
            end = 0
            for length in piece.lengths.tolist():
                span = slice(end, end + length)
                end += length
                row = {"input_ids": piece.input_ids[span].tolist(), "loss_mask": piece.loss_mask[span].tolist()}
                self._file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")


class ArrowWriter:
    """Columns input_ids list<int32> and loss_mask list<uint8>, in record batches of a million tokens."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._pa: Any = pa
        schema = pa.schema({"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.uint8())})
        self._file: Any = pa.ipc.new_file(str(path), schema)
        self._waiting: list[Documents] = []
        self._tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self._flush()
        self._file.close()

    def write(self, documents: Documents) -> None:
        """Append documents, each as often as it counts."""
        for piece in documents.repeated():
            self._waiting.append(piece)
            self._tokens += len(piece.input_ids)
            if self._tokens >= _BATCH_TOKENS:
                self._flush()

    def _flush(self) -> None:
        lengths = np.concatenate([np.zeros(1, np.int64), *(documents.lengths for documents in self._waiting)])
        offsets = self._pa.array(np.cumsum(lengths).astype(np.int32))
        columns = {
            name: self._pa.ListArray.from_arrays(
                offsets, np.concatenate([getattr(documents, name) for documents in self._waiting])
            )
            for name in ("input_ids", "loss_mask")
            if self._waiting
        }
        if columns:
            self._file.write_batch(self._pa.record_batch(columns))
        self._waiting, self._tokens = [], 0
