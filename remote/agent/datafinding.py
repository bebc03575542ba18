"""The lines of doctor about the data set and about space, both judged by the trainer's own preflight where there is one."""

from __future__ import annotations

import gzip
import json
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote.agent.finding import FAILED, OK, WARNING, Finding, failure, gib
from remote.agent.preflight import NO_VERDICT
from remote.protocol.codec import loads_object
from remote.protocol.errors import DflashError, ExitCode

_FORMS = (".jsonl", ".jsonl.gz", ".parquet", ".arrow")
_ROW_LIMIT = 16 << 20
_CHECKPOINT_BYTES = 12
"""A parameter in a checkpoint: float32 weight and two moments of AdamW."""

_LOW_DISK = 1 << 30
"""Bytes below which logs and events of a long run are in danger."""


@dataclass(frozen=True)
class Verdict:
    """What the preflight said: what it found, else its problems. `not_read`: why it did not come to the data, if so."""

    found: Mapping[str, Any] | None = None
    problems: tuple[DflashError, ...] = ()
    not_read: str = ""
    hint: str = ""

    @classmethod
    def of(cls, error: DflashError) -> Verdict:
        """Take the preflight's error apart; it tells of everything that is wrong at once."""
        problems = error.problems or (error,)
        # A configuration that it cannot read at all ends it before the first look.
        judged = error.error != NO_VERDICT and any(problem.code is ExitCode.PREFLIGHT for problem in problems)
        return cls(None, problems, "" if judged else "the preflight ended before that", "mend that first")

    def about(self, path: str) -> list[DflashError]:
        """Return the problems that name `path`."""
        return [each for each in self.problems if path and path in f"{each.error} {each.cause}"]

    @property
    def about_space(self) -> list[DflashError]:
        return [each for each in self.problems if each.error.startswith("no space left")]


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
    if problems := verdict.about(text):
        return failure("data", problems[0])
    if verdict.not_read:
        return Finding("data", WARNING, f"{here}; not read: {verdict.not_read}", verdict.hint)
    if verdict.found is None:
        return Finding("data", OK, f"{here}; read whole")
    figures = [f"{_count(verdict.found, key)} {key}" for key in ("documents", "tokens", "steps")]
    return Finding("data", OK, f"{here}; {', '.join(figures)}")


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


def other_findings(verdict: Verdict, paths: Sequence[str]) -> list[Finding]:
    """Return a line for each problem of the preflight that belongs to no other line: neither to `paths` nor to space."""
    told = [each for path in paths for each in verdict.about(path)] + verdict.about_space
    return [failure("preflight", problem) for problem in verdict.problems if problem not in told]


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
    if problems := verdict.about_space:
        return Finding("space", FAILED, f"{text}; {problems[0].error}: {problems[0].cause}", problems[0].hint)
    if verdict.found is None and ring > shm["free"]:
        return Finding("space", WARNING, text, "lower ring_mib, or free shared memory")
    if own < _LOW_DISK:
        return Finding("space", WARNING, text, f"free some space under {root}: logs and events go there")
    return Finding("space", OK, text)


def free_space(path: Path) -> dict[str, int]:
    """Return total and free bytes where `path` lies or would be created; zeros when that cannot be asked."""
    # Before the first deploy ROOT does not exist; the disk it will be on does.
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return {"total": 0, "free": 0}
    return {"total": usage.total, "free": usage.free}
