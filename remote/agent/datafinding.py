"""The lines of doctor about the data set and about space, both judged by the trainer's own preflight where there is one."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote.agent.facts import free_space
from remote.agent.finding import FAILED, OK, WARNING, Finding, failure, gib
from remote.protocol.codec import loads_object
from remote.protocol.errors import DflashError

_FORMS = (".jsonl", ".jsonl.gz", ".parquet", ".arrow")
_ROW_LIMIT = 16 << 20
_CHECKPOINT_BYTES = 12
"""A parameter in a checkpoint: float32 weight and two moments of AdamW."""

_LOW_DISK = 1 << 30
"""Bytes below which logs and events of a long run are in danger."""


@dataclass(frozen=True)
class Verdict:
    """What the preflight said: its findings, or its error, or why it was not asked."""

    found: Mapping[str, Any] | None = None
    error: DflashError | None = None
    not_asked: str = ""
    hint: str = ""

    def concerns(self, path: str) -> bool:
        """Whether the preflight failed, and of this path."""
        return self.error is not None and bool(path) and path in f"{self.error.error} {self.error.cause}"

    @property
    def about_space(self) -> bool:
        return self.error is not None and self.error.error.startswith("no space left")


def data_finding(text: str, verdict: Verdict) -> Finding:
    """Return the line about the data set at `text`. May raise OSError where it cannot be looked at."""
    if not text:
        return Finding("data", FAILED, "data_dir is not set", "name it with --data-dir")
    path = Path(text)
    if not path.exists():
        return Finding("data", FAILED, f"no data at {path}", "copy it there, or name its place with --data-dir")
    files = data_files(path)
    here = f"{path}: {_listed(path, files)}"
    if columns := first_columns(files[0]) if files else []:
        here += f", columns {', '.join(columns)}"
    if verdict.concerns(text) and verdict.error is not None:
        return failure("data", verdict.error)
    if verdict.found is not None:
        figures = [f"{_count(verdict.found, key)} {key}" for key in ("documents", "tokens", "steps")]
        return Finding("data", OK, f"{here}; {', '.join(figures)}")
    if verdict.about_space:
        # Space is judged after the last row was read.
        return Finding("data", OK, f"{here}; read whole")
    if verdict.error is not None:
        return Finding("data", WARNING, f"{here}; not read: the preflight failed before it", "mend that first")
    return Finding("data", WARNING, f"{here}; not read: {verdict.not_asked}", verdict.hint)


def _count(found: Mapping[str, Any], key: str) -> str:
    value = found.get(key)
    return f"{value:,}" if isinstance(value, int) else "?"


def data_files(path: Path) -> list[Path]:
    """Return the files that hold rows, in order: of a file itself, a directory, or one that `datasets` saved."""
    if path.is_file():
        return [path]
    # One level more for the splits of a saved DatasetDict.
    found = [each for pattern in ("*", "*/*") for each in path.glob(pattern) if each.name.endswith(_FORMS)]
    return sorted(each for each in found if each.is_file())


def _listed(path: Path, files: list[Path]) -> str:
    if not files:
        return f"no file that ends in {', '.join(_FORMS)}"
    total = gib(sum(file.stat().st_size for file in files))
    return total if files == [path] else f"{len(files)} file{'' if len(files) == 1 else 's'}, {total}"


def first_columns(file: Path) -> list[str]:
    """Return the columns of a JSONL file's first row; [] for other forms, or where that is no object."""
    if not file.name.endswith((".jsonl", ".jsonl.gz")):
        return []
    try:
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as stream:
            return [
                json.dumps(key, ensure_ascii=False)[1:-1] for key in list(loads_object(stream.readline(_ROW_LIMIT)))[:8]
            ]
    except (
        ValueError,
        EOFError,
        zlib.error,
        gzip.BadGzipFile,
    ):  # what is wrong with the file is the preflight's to say
        return []


def preflight_finding(verdict: Verdict, paths: tuple[str, ...]) -> Finding | None:
    """Return a line for a failure of the preflight that belongs to no other line: neither to `paths` nor to space."""
    if verdict.error is None or verdict.about_space or any(verdict.concerns(path) for path in paths):
        return None
    return failure("preflight", verdict.error)


def space_finding(root: Path, output_dir: str, ring: int, kept: int, verdict: Verdict) -> Finding:
    """Return the line about /dev/shm (for a ring of at most `ring` bytes) and the disks (for `kept` checkpoints)."""
    shm, disk = free_space(Path("/dev/shm")), free_space(Path(output_dir) if output_dir else root)
    parameters = (verdict.found or {}).get("drafter_parameters")
    # One more than is kept exists while the newest is written.
    need = _CHECKPOINT_BYTES * parameters * (min(kept, 2) + 1) if isinstance(parameters, int) else 0
    text = f"/dev/shm {gib(shm['free'])} of {gib(shm['total'])} free"
    text += f" (ring: at most {gib(ring)})" if ring else ""
    text += f"; {output_dir or root} {gib(disk['free'])} free"
    text += f" (checkpoints: {gib(need)})" if need else ""
    own = free_space(root)["free"]
    if output_dir:
        text += f"; {root} {gib(own)} free"
    if verdict.about_space and verdict.error is not None:
        return Finding("space", FAILED, f"{text}; {verdict.error.error}: {verdict.error.cause}", verdict.error.hint)
    if verdict.found is None and ring > shm["free"]:
        return Finding("space", WARNING, text, "lower ring_mib, or free shared memory")
    if own < _LOW_DISK:
        return Finding("space", WARNING, text, f"free some space under {root}: logs and events go there")
    return Finding("space", OK, text)
