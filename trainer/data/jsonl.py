"""JSON lines, plain or gzip: read with the file and the line in every error."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from remote.protocol.errors import preflight_error

SUFFIXES = (".jsonl", ".jsonl.gz")


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for every line that is not blank.

    Raises:
        DflashError: a line is no JSON object or no UTF-8, the gzip stream is damaged, the file cannot be read.
    """
    for number, line, _ in read_lines(path):
        yield number, parse_row(line, path, number)


def read_lines(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """Yield (line number from 1, line, bytes of the file read so far) for every line that is not blank.

    A name that ends in .gz is decompressed; the position counts the file's own bytes all the same.

    Raises:
        DflashError: the gzip stream is damaged, the file cannot be read.
    """
    number = 0
    try:
        with path.open("rb") as file:
            lines = cast("BinaryIO", gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file
            for number, line in enumerate(iter(lines.readline, b""), start=1):
                if line.strip():
                    yield number, line, file.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise preflight_error(
            f"{path} is a damaged gzip file", cause=f"after line {number}: {error}", hint="copy or make the file again"
        ) from error
    except OSError as error:
        raise preflight_error(f"cannot read {path}", cause=str(error), hint="check the path and its mode") from error


def parse_row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Return the object of one line, or raise the DflashError that names file and line."""
    try:
        row = json.loads(line)
        # Valid as JSON, but no text: tokenizers and files refuse it. Only an escape can be one, and few lines have any.
        if b"\\ud" in line or b"\\uD" in line:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise row_error(
            path, number, f"it holds half a surrogate pair, \\u{ord(error.object[error.start]):x}"
        ) from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both of this kind
        raise row_error(path, number, f"the line is not valid JSON: {error}") from error
    except RecursionError as error:
        raise row_error(path, number, "the line is nested too deeply") from error
    if not isinstance(row, dict):
        raise row_error(path, number, f"the line holds a {type(row).__name__}, not an object")
    return row


def row_error(path: Path, number: int, cause: str, hint: str = "correct or remove this row") -> Exception:
    """Return the error for one bad row, which names file and row."""
    return preflight_error(f"bad row in {path}, row {number}", cause=cause, hint=hint)
