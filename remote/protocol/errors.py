"""The one shape of a failure that a person is meant to read: `error:` what, `cause:` why, `hint:` the way out."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, cast


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

    `detail` is text of many lines that belongs to it: a traceback, the last lines of a log. `problems` are the failures
    that this one sums up, none for one that stands for itself.
    """

    def __init__(
        self,
        error: str,
        *,
        cause: str = "",
        hint: str = "",
        code: ExitCode = ExitCode.FAILED,
        detail: str = "",
        problems: Sequence[DflashError] = (),
    ) -> None:
        super().__init__(error)
        self.error = error
        self.cause = cause
        self.hint = hint
        self.code = code
        self.detail = detail
        self.problems = tuple(problems)

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
        data: dict[str, Any] = {
            "error": self.error,
            "cause": self.cause,
            "hint": self.hint,
            "code": int(self.code),
            "detail": self.detail,
        }
        return data | ({"problems": [problem.to_json() for problem in self.problems]} if self.problems else {})

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DflashError:
        """Rebuild an error from an `error` frame; unknown codes of a newer far end become FAILED."""
        error = cls._single(data)
        listed = data.get("problems")
        parts = cast("list[Any]", listed) if isinstance(listed, list) else []
        # One level: nothing sums up sums, and a hostile far end could nest them beyond Python's recursion limit.
        error.problems = tuple(cls._single(cast("dict[str, Any]", part)) for part in parts if isinstance(part, dict))
        return error

    @classmethod
    def _single(cls, data: dict[str, Any]) -> DflashError:
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


def together(errors: Sequence[DflashError]) -> DflashError:
    """Return one error for several that were found at once, so that they can be mended at once; a single one stays itself.

    `errors` holds at least one. What already sums others up is taken apart first.
    """
    problems = [problem for error in errors for problem in (error.problems or (error,))]
    if len(problems) == 1:
        return problems[0]
    lines = [f"{number}. {problem.render()}" for number, problem in enumerate(problems, 1)]
    return DflashError(
        f"{len(problems)} things are in the way of this run",
        cause="; ".join(problem.error for problem in problems),
        hint="mend them all; each has its own cause and hint below",
        # What the far end alone could know outweighs what the operator could have.
        code=max((problem.code for problem in problems), key=lambda code: code is ExitCode.PREFLIGHT),
        detail="\n".join([*lines, *(problem.detail for problem in problems if problem.detail)]),
        problems=problems,
    )


def usage_error(error: str, *, cause: str = "", hint: str = "") -> DflashError:
    """Return the error for what can be judged without contact to the far end (exit code 2)."""
    return DflashError(error, cause=cause, hint=hint, code=ExitCode.USAGE)


def preflight_error(error: str, *, cause: str = "", hint: str = "", detail: str = "") -> DflashError:
    """Return the error for what the far end judges before anything is launched (exit code 7)."""
    return DflashError(error, cause=cause, hint=hint, code=ExitCode.PREFLIGHT, detail=detail)
