"""Arrow and parquet files. Arrow is mapped and read in place; parquet is packed and has to be decoded into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remote.protocol.errors import DflashError, preflight_error
from trainer.data.chunks import Chunk, Supervision
from trainer.data.jsonl import row_error
from trainer.data.tokenised_jsonl import supervision_column

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ModuleNotFoundError as missing:
    raise preflight_error(
        "arrow and parquet files need pyarrow", cause=str(missing), hint="pip install pyarrow, or give JSONL files"
    ) from missing


def read_arrow(path: Path) -> Iterator[Chunk]:
    """Yield the record batches of an arrow stream or arrow file; their arrays are views of the mapped file."""
    with _Readable(path):
        source = pa.memory_map(str(path))
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = pa.ipc.open_file(source)
            batches: Iterable[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            reader = batches = pa.ipc.open_stream(source)
        kind = supervision_column(reader.schema.names, path)
        yield from _chunks(batches, kind, path)


def read_parquet(path: Path) -> Iterator[Chunk]:
    """Yield the row groups of a parquet file: 5 to 12 bytes a token stay in memory."""
    with _Readable(path), pq.ParquetFile(path, memory_map=True) as file:
        kind = supervision_column(file.schema_arrow.names, path)
        batches = file.iter_batches(columns=["input_ids", kind.value])
        for chunk in _chunks(batches, kind, path):
            yield _compact(chunk)


class _Readable:
    """Turn arrow's own errors about a damaged file into one that names it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, pa.ArrowException | OSError):
            raise preflight_error(
                f"cannot read {self._path}", cause=str(error), hint="the file is damaged: copy or make it again"
            ) from error


def _chunks(batches: Iterable[Any], kind: Supervision, path: Path) -> Iterator[Chunk]:
    before = 0
    for batch in batches:
        rows = np.arange(before + 1, before + len(batch) + 1, dtype=np.int64)
        before += len(batch)
        if not len(batch):
            continue
        ids, offsets = _lists(batch, "input_ids", path, rows)
        if kind.per_token:
            supervision, own_offsets = _lists(batch, kind.value, path, rows)
            ragged = np.flatnonzero(np.diff(offsets) != np.diff(own_offsets))
            if len(ragged):
                raise row_error(path, int(rows[ragged[0]]), f"input_ids and {kind.value} differ in length")
        else:
            column = batch.column(kind.value)
            supervision = _numbers(column, kind.value, path, int(rows[_first_null(column)]))
            if (supervision < 0).any():
                row = int(rows[np.flatnonzero(supervision < 0)[0]])
                raise row_error(path, row, "prompt_len is negative")
        yield Chunk(ids, offsets, kind, supervision, path, rows)


def _lists(batch: Any, name: str, path: Path, rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return (flat values, offsets from 0) of a list column."""
    column = batch.column(name)
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise _wrong_type(path, name, column.type, "a list of integers")
    if column.null_count:
        raise row_error(path, int(rows[_first_null(column)]), f"{name} is null")
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    offsets -= offsets[0]
    row_of_value = np.searchsorted(offsets, _first_null(values), side="right") - 1 if values.null_count else 0
    return _numbers(values, name, path, int(rows[row_of_value])), offsets


def _numbers(column: Any, name: str, path: Path, row_of_null: int) -> NDArray[Any]:
    if not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
        raise _wrong_type(path, name, column.type, "integers")
    if column.null_count:
        raise row_error(path, row_of_null, f"{name} holds a null")
    # Booleans are bits in arrow, so only they are copied.
    return column.to_numpy(zero_copy_only=not pa.types.is_boolean(column.type))


def _first_null(column: Any) -> int:
    """Return the index of the first null, or 0 without one."""
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))


def _compact(chunk: Chunk) -> Chunk:
    ids = chunk.ids
    bounds = np.iinfo(np.int32)
    if len(ids) and bounds.min <= int(ids.min()) <= int(ids.max()) <= bounds.max:  # else the scan names the row
        ids = ids.astype(np.int32)
    supervision = chunk.supervision
    if chunk.kind in (Supervision.LOSS_MASK, Supervision.COMPLETION_MASK):
        supervision = (supervision != 0).astype(np.uint8)
    return Chunk(ids, chunk.offsets, chunk.kind, supervision, chunk.source, chunk.rows)


def _wrong_type(path: Path, name: str, found: Any, wanted: str) -> DflashError:
    return preflight_error(
        f"column {name} of {path} has the wrong type", cause=f"{found}, not {wanted}", hint="convert the column"
    )
