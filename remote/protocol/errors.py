"""The one shape of a failure that a person is meant to read: `error:` what, `cause:` why, `hint:` the way out."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of `dflashctl`; those that `python -m trainer` uses (0, 1, 2, 7, 130) mean the same there."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_RUN = 3
    ALREADY_RUNNING = 4
    CRASHED_AT_START = 5
    NOT_READY = 6
    PREFLIGHT = 7
    NO_ANSWER = 8
    STOP_INCOMPLETE = 9
    ALARM = 10
    INTERRUPTED = 130


class DflashError(Exception):
    """A failure with its cause, its way out and its exit code; everything else that is raised is a bug and propagates.

    `detail` is text of many lines that belongs to it: a traceback, the last lines of a log.
    """

    def __init__(
        self, error: str, *, cause: str = "", hint: str = "", code: ExitCode = ExitCode.FAILED, detail: str = ""
    ) -> None:
        super().__init__(error)
        self.error = error
        self.cause = cause
        self.hint = hint
        self.code = code
        self.detail = detail

    def render(self) -> str:
        """Return the lines shown to a person, without `detail` and without a trailing newline."""
        lines = [f"error: {self.error}"]
        if self.cause:
            lines.append(f"  cause: {self.cause}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that an `error` frame carries."""
        return {
            "error": self.error,
            "cause": self.cause,
            "hint": self.hint,
            "code": int(self.code),
            "detail": self.detail,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DflashError:
        """Rebuild an error from an `error` frame; unknown codes of a newer far end become FAILED."""
        code = data.get("code")
        # The far end may be newer than we are.
        known = isinstance(code, int) and code in {int(member) for member in ExitCode}
        return cls(
            str(data.get("error", "unknown error")),
            cause=str(data.get("cause", "")),
            hint=str(data.get("hint", "")),
            code=ExitCode(code) if known else ExitCode.FAILED,
            detail=str(data.get("detail", "")),
        )


def usage_error(error: str, *, cause: str = "", hint: str = "") -> DflashError:
    """Return the error for what can be judged without contact to the far end (exit code 2)."""
    return DflashError(error, cause=cause, hint=hint, code=ExitCode.USAGE)


def preflight_error(error: str, *, cause: str = "", hint: str = "", detail: str = "") -> DflashError:
    """Return the error for what the far end judges before anything is launched (exit code 7)."""
    return DflashError(error, cause=cause, hint=hint, code=ExitCode.PREFLIGHT, detail=detail)
