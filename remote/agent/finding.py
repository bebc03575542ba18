"""One line of the verb doctor: what was looked at, how it stands, the way out."""

from __future__ import annotations

from dataclasses import dataclass

from remote.protocol.errors import DflashError, ExitCode

OK, WARNING, FAILED = "ok", "warning", "failed"

_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """What the client shows as one line; `code` is what it exits with when this is the first line that failed."""

    name: str
    state: str
    text: str
    hint: str = ""
    code: int = int(ExitCode.PREFLIGHT)


def failure(name: str, error: DflashError) -> Finding:
    """Return a failed finding that says what `error` says."""
    return Finding(name, FAILED, f"{error.error}: {error.cause}" if error.cause else error.error, error.hint)


def gib(count: float) -> str:
    """Return bytes in GiB, or in MiB where that would read 0.0."""
    return f"{count / _GIB:,.1f} GiB" if count >= _GIB / 10 or count <= 0 else f"{count / (1 << 20):,.0f} MiB"
