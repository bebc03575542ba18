"""Asking the trainer, in the release that is about to run, whether it can: exit code 7 before anything is launched."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from remote.agent.wire import Answer
from remote.protocol.codec import dumps, loads_object
from remote.protocol.errors import DflashError, preflight_error

_POLL_SECONDS = 0.2
_TAIL_LINES = 30

SKIP_DEVICES = "--skip-devices"
"""Flag of `python -m trainer preflight` for who has looked at the GPUs himself."""

NO_VERDICT = "the preflight failed"
"""The error of a preflight that ended without saying what is wrong with the configuration: nothing was judged."""


def run_trainer_verb(
    command: list[str],
    environment: Mapping[str, str],
    output: IO[bytes],
    errors: IO[bytes],
    answer: Answer,
    look: Callable[[], None] = lambda: None,
) -> int:
    """Run a short verb of the trainer to its end and return its exit code; ends it when the client is gone.

    `look` is called a few times a second meanwhile.
    """
    process = subprocess.Popen(
        # Files, not pipes: a child that prints more than a pipe holds would wait for us for ever.
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env=dict(environment),
        start_new_session=True,
    )
    try:
        while True:
            try:
                return process.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                look()
                answer.check()
    finally:
        # The client is gone: nobody needs the verdict, and torch holds memory while it imports.
        if process.poll() is None:
            process.kill()
            process.wait()


def json_lines(text: str) -> list[dict[str, Any]]:
    """Return the lines of `text` that are JSON objects; a library that prints to stdout does no harm."""
    found: list[dict[str, Any]] = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found.append(loads_object(line))
    return found


@contextlib.contextmanager
def _config_file(config: Mapping[str, Any]) -> Generator[str]:
    # Not in the run's directory: that exists only once the start is decided.
    descriptor, name = tempfile.mkstemp(prefix="dflash-preflight-", suffix=".json")
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(dumps(config))
        yield name
    finally:
        Path(name).unlink(missing_ok=True)


def preflight(
    python: str,
    environment: Mapping[str, str],
    config: Mapping[str, Any],
    answer: Answer,
    flags: Sequence[str] = (),
    look: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run `python -m trainer preflight` on a configuration; return what it found. Raises the DflashError that it reports.

    `flags` are further ones of that command; `look` is called a few times a second meanwhile.
    """
    with _config_file(config) as path, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        command = [python, "-m", "trainer", "preflight", "--config-json", path, "--json", *flags]
        code = run_trainer_verb(command, environment, output, errors, answer, look)
        if code != 0:
            raise _reported(code, content_of(output), content_of(errors))
        return (json_lines(content_of(output)) or [{}])[-1]


def content_of(file: IO[bytes]) -> str:
    """Return what was written to a temporary file, as text."""
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")


def _reported(code: int, output: str, errors: str) -> DflashError:
    said = [line for line in json_lines(output) if "error" in line]
    # Its own exit code is the fallback: 2 for what the operator could have known, 7 for what only this machine knows.
    if said:
        return DflashError.from_json({"code": code, **said[-1]})
    return preflight_error(
        NO_VERDICT,
        cause=f"`python -m trainer preflight` ended with code {code}",
        hint="the last lines of its output say why",
        detail="\n".join((output + errors).splitlines()[-_TAIL_LINES:]),
    )
