"""Writing tokenised documents: parquet where pyarrow is installed, else JSONL; both are read by open_dataset."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

from trainer.data.chat import Encoded


class DocumentWriter(Protocol):
    """A file that takes documents; closed by the end of its with block."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def write(self, documents: Sequence[Encoded]) -> None:
        """Append documents."""
        ...


def document_writer(directory: Path) -> DocumentWriter:
    """Return the writer of the best form that this machine has."""
    if importlib.util.find_spec("pyarrow") is not None:
        return ParquetWriter(directory / "documents.parquet")
    return JsonlWriter(directory / "documents.jsonl")


class JsonlWriter:
    """One object a line with input_ids and loss_mask."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, documents: Sequence[Encoded]) -> None:
        """Append documents."""
        for document in documents:
            row = {"input_ids": document.input_ids.tolist(), "loss_mask": document.loss_mask.tolist()}
            self._file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")


class ParquetWriter:
    """Columns input_ids list<int32> and loss_mask list<uint8>; every call of `write` makes a row group."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._schema: Any = pa.schema({"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.uint8())})
        self._table = pa.Table
        self._file: Any = pq.ParquetWriter(path, self._schema, compression="zstd")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, documents: Sequence[Encoded]) -> None:
        """Append documents."""
        columns = {name: [getattr(document, name) for document in documents] for name in self._schema.names}
        self._file.write_table(self._table.from_pydict(columns, schema=self._schema))
