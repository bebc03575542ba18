"""Tokenised JSONL, read whole into compact arrays: 5 to 12 bytes a token."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remote.protocol.errors import preflight_error
from trainer.data.chunks import Chunk, Supervision
from trainer.data.jsonl import read_rows, row_error

# A chunk is closed at this many tokens, so that joining its arrays never needs the file's memory twice.
_CHUNK_TOKENS = 1 << 22


def supervision_column(columns: Collection[str], source: Path) -> Supervision:
    """Return the first known supervision column; the DflashError without one names the columns seen."""
    kind = next((kind for kind in Supervision if kind.value in columns), None)
    twice = [name for name in ("input_ids", kind.value if kind else "") if list(columns).count(name) > 1]
    if twice:
        raise preflight_error(f"{source} has several columns named {twice[0]}", hint="keep one of them")
    if "input_ids" in columns and kind is not None:
        return kind
    chat = any(name in columns for name in ("messages", "conversations", "prompt"))
    raise preflight_error(
        f"{source} is not tokenised: it needs input_ids and one of {', '.join(kind.value for kind in Supervision)}",
        cause=f"columns seen: {', '.join(sorted(columns)) or 'none'}",
        hint="run `python -m trainer prepare` on it first" if chat else "rename or add the columns",
    )


def read_jsonl(path: Path) -> Iterator[Chunk]:
    """Yield the documents of one file.

    Raises:
        DflashError: a row is no JSON object, lacks the first row's columns, or its lists differ in length.
    """
    kind: Supervision | None = None
    reader = _Collected(path)
    for number, row in read_rows(path):
        kind = kind or supervision_column(row.keys(), path)
        reader.add(number, row, kind)
        if reader.tokens >= _CHUNK_TOKENS:
            yield reader.chunk(kind)
            reader = _Collected(path)
    if kind is not None and reader.rows:
        yield reader.chunk(kind)


class _Collected:
    """Rows on their way into one chunk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids: list[NDArray[np.int32]] = []
        self._supervision: list[NDArray[np.integer]] = []
        self.rows: list[int] = []
        self.tokens = 0

    def add(self, number: int, row: dict[str, Any], kind: Supervision) -> None:
        ids = _integers(row, "input_ids", self._path, number)
        if kind.per_token:
            supervision = _integers(row, kind.value, self._path, number)
            if len(supervision) != len(ids):
                cause = f"input_ids has {len(ids)} entries, {kind.value} has {len(supervision)}"
                raise row_error(self._path, number, cause)
            if kind is not Supervision.LABELS:
                supervision = (supervision != 0).astype(np.uint8)
        else:
            supervision = np.array([prompt_length(row.get(kind.value), self._path, number)])
        self._ids.append(ids)
        self._supervision.append(supervision)
        self.rows.append(number)
        self.tokens += len(ids)

    def chunk(self, kind: Supervision) -> Chunk:
        lengths = np.array([len(ids) for ids in self._ids], dtype=np.int64)
        return Chunk(
            ids=np.concatenate(self._ids),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            kind=kind,
            supervision=np.concatenate(self._supervision),
            source=self._path,
            rows=np.array(self.rows, dtype=np.int64),
        )


def prompt_length(value: Any, path: Path, number: int) -> int:
    """Return a prompt_len that is an integer of at least 0, or raise for the row."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise row_error(path, number, f"prompt_len is {value!r}, not an integer of at least 0")
    if value > np.iinfo(np.int32).max:
        raise row_error(path, number, "prompt_len lies beyond 32 bits")
    return value


def _integers(row: dict[str, Any], name: str, path: Path, number: int) -> NDArray[np.int32]:
    values = row.get(name)
    if not isinstance(values, list):
        raise row_error(path, number, f"{name} is {type(values).__name__}, not a list")
    if not values:
        return np.zeros(0, np.int32)
    try:
        array = np.asarray(values)
    except ValueError as error:  # a list in the list
        raise row_error(path, number, f"{name} is no flat list of integers") from error
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise row_error(path, number, f"{name} is no flat list of integers")
    if array.min() < np.iinfo(np.int32).min or array.max() > np.iinfo(np.int32).max:
        raise row_error(path, number, f"{name} holds numbers beyond 32 bits")
    return array.astype(np.int32)
