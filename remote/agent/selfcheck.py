"""Running the new release's own check before anything uses it, once per (release, interpreter, packages)."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import IO, Any

from remote.agent.environment import trainer_environment
from remote.agent.interpreters import Interpreter, packages_of
from remote.agent.preflight import content_of, json_lines, run_trainer_verb
from remote.agent.pythonfinding import lacking
from remote.agent.wire import Answer
from remote.protocol.errors import DflashError, preflight_error
from remote.protocol.files import read_json, write_json
from remote.protocol.layout import RootLayout

_TAIL_LINES = 40


def selfcheck(root: RootLayout, release: str, python: str, answer: Answer) -> dict[str, Any]:
    """Return the stored result of a passed check, else run `python -m trainer selfcheck --json` and store what it says.

    Raises a preflight error with the end of its output when it fails. A failure is never reused: it may have been the
    machine's.
    """
    interpreter = packages_of(python)
    path = _place(root, release, interpreter)
    kept = kept_check(root, release, interpreter)
    # Twenty seconds of torch import and two toy steps: not for every deploy of the same tree.
    if kept.get("ok") is True:
        return kept
    answer.phase("selfcheck")
    began = time.monotonic()
    directory = root.release(release)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        relay = _Relay(output, answer)
        command = [python, "-m", "trainer", "selfcheck", "--json"]
        environment = trainer_environment(python, root.path, directory)
        code = run_trainer_verb(command, environment, output, errors, answer, relay.poll)
        # What it printed between our last look and its end.
        relay.poll()
        said = [line for line in json_lines(content_of(output)) if "kind" not in line]
        seconds = time.monotonic() - began
        last = (said or [{}])[-1]
        result: dict[str, Any] = {"ok": code == 0, "code": code, "seconds": seconds, "python": python, "result": last}
        path.parent.mkdir(exist_ok=True)
        write_json(path, result)
        if code != 0:
            # Only now: a trainer of one's own may need none of what ours does.
            raise lacking(interpreter) or _failed(release, code, last, content_of(output) + content_of(errors))
    answer.phase("selfcheck", "passed", seconds)
    return result


def _place(root: RootLayout, release: str, interpreter: Interpreter) -> Path:
    return root.selfchecks / f"{release}-{interpreter.fingerprint}.json"


def kept_check(root: RootLayout, release: str, interpreter: Interpreter) -> dict[str, Any]:
    """Return the stored result of a release's check with an interpreter and its packages, {} when it was never checked."""
    return _kept(_place(root, release, interpreter))


def _kept(path: Path) -> dict[str, Any]:
    try:
        return read_json(path) or {}
    except ValueError:  # cut short by a crash: check again
        return {}


def forget_failed_checks(root: RootLayout, release: str) -> None:
    """Remove the stored failures of a release: somebody deploys it all the same, and means it."""
    for path in root.selfchecks.glob(f"{release}-*.json"):
        if _kept(path).get("ok") is not True:
            path.unlink(missing_ok=True)


class _Relay:
    """Passes the check's events on while it runs."""

    def __init__(self, output: IO[bytes], answer: Answer) -> None:
        self._path = Path(f"/proc/self/fd/{output.fileno()}")
        self._answer = answer
        self._passed = 0

    def poll(self) -> None:
        # Opened anew: the descriptor's own offset is shared with the process that writes.
        complete = self._path.read_bytes().rpartition(b"\n")[0].decode("utf-8", errors="replace")
        events = [line for line in json_lines(complete) if "kind" in line]
        for event in events[self._passed :]:
            self._answer.note(event)
        self._passed = len(events)


def _failed(release: str, code: int, said: dict[str, Any], output: str) -> DflashError:
    return preflight_error(
        f"the selfcheck of release {release} failed",
        cause=str(said.get("cause") or said.get("error") or f"`python -m trainer selfcheck` ended with code {code}"),
        hint=str(said.get("hint") or "mend it and deploy again; `current` is unchanged"),
        detail=_detail(said, output),
    )


def _detail(said: dict[str, Any], output: str) -> str:
    """Return the traceback that the check reported, else the last lines it printed for people."""
    # Events and the report itself are JSON lines: the operator has seen the one and gets the other as cause and hint.
    printed = [line for line in output.splitlines() if line.strip() and not json_lines(line)]
    lines = str(said.get("detail") or "").splitlines() or printed
    return "\n".join(lines[-_TAIL_LINES:])
