"""Writing tokenised documents: arrow where pyarrow is installed, else JSONL; both are read by open_dataset.

Arrow and not parquet, since an arrow file is mapped: the leader and all targets of a run then share one copy in the
page cache, 5 bytes a token, where each would decode parquet into memory of its own.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
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
    """n documents one after the other: input_ids int32[tokens], loss_mask uint8[tokens], lengths int64[n].

    Three arrays and not one object a document: they cross from process to process by copying memory.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, documents: Sequence[Encoded]) -> Documents:
        """Join documents."""
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(document.input_ids for document in documents)]),
            np.concatenate([np.zeros(0, np.uint8), *(document.loss_mask for document in documents)]),
            np.array([len(document.input_ids) for document in documents], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.lengths)


class DocumentWriter(Protocol):
    """A file that takes documents; closed by the end of its with block."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def write(self, documents: Documents) -> None:
        """Append documents."""
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
        """Append documents."""
        end = 0
        for length in documents.lengths.tolist():
            span = slice(end, end + length)
            end += length
            row = {"input_ids": documents.input_ids[span].tolist(), "loss_mask": documents.loss_mask[span].tolist()}
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
        """Append documents."""
        self._waiting.append(documents)
        self._tokens += len(documents.input_ids)
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
