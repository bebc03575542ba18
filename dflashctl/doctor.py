"""What `doctor` looks at, from the nearest hop to the model's last file, and how a finding becomes lines."""

from __future__ import annotations

import dataclasses
import statistics
import textwrap
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from dflashctl.agent_client import AgentClient
from dflashctl.answer import Answer
from dflashctl.console import Stream, one_line
from dflashctl.results import AgentFinding, parse
from dflashctl.session import Session
from dflashctl.talk import Talk
from dflashctl.training import Training, resolve_training
from dflashctl.transport import Finding
from remote.protocol.errors import DflashError, ExitCode

_PROBES = 3
"""Calls that the round trip is the median of: with pct's 0.7 s each, more would be what doctor spends its time on."""

_SLOW = 2.0
"""Seconds a call from which on every verb feels broken."""

_NARROW = 60
_NAME = 11
_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "red bold")}


class Examination:
    """One round of doctor at a session's destination. Iterating yields each finding as soon as it is known.

    `again` opens a second session at the same place, whose first call has to connect.
    """

    def __init__(self, session: Session, talk: Talk, again: Callable[[], Session] | None = None) -> None:
        self._session = session
        self._talk = talk
        self._again = again or (lambda: dataclasses.replace(session))
        self.training: Training | None = None
        """The configuration that a start would use; None when it cannot be resolved, which is a finding of its own."""

    def __iter__(self) -> Iterator[Finding]:
        try:
            yield from self._resolve()
            # Nothing behind a hop that failed can be seen.
            if not (yield from self._hops()):
                return
            yield from self._far_findings()
        except DflashError as error:
            yield failed("agent", error)
            return
        yield round_trip(self._again(), deployed=bool(self._session.release))

    def _resolve(self) -> Iterator[Finding]:
        session = self._session
        try:
            self.training = resolve_training(session.settings, session.remembered, session.deployed_source, ())
        except DflashError as error:
            # No reason not to look at the rest: what `start` lacks may be over there as well.
            yield failed("config", error)
        else:
            self._talk.say(f"configuration {self.training.base} ({self.training.base_origin})")

    def _hops(self) -> Generator[Finding, None, bool]:
        """Yield what the transport finds; return whether the way to the far end is open."""
        findings: list[Finding] = []
        for finding in self._session.transport.examine():
            findings.append(finding)
            yield finding
        if not findings:
            yield Finding("machine", "ok", "the local one")
        return all(finding.state != "failed" for finding in findings)

    def _far_findings(self) -> Iterator[Finding]:
        session, training = self._session, self.training
        config = {} if training is None else training.config.to_dict()
        request = {"python": session.python, "release": session.release, "config": config}
        # One call for all of it; events, so that a slow look does not hold back what is known.
        with session.client.call("doctor", request) as answer:
            yield from self._told(answer)

    def _told(self, answer: Answer) -> Iterator[Finding]:
        for item in answer:
            if isinstance(item, dict) and "finding" in item:
                yield parse(AgentFinding, item["finding"]).finding
            elif isinstance(item, dict):
                self._talk(item)


def failed(name: str, error: DflashError) -> Finding:
    """Return a failed finding that says what `error` says and ends doctor with its code."""
    text = f"{error.error}: {error.cause}" if error.cause else error.error
    return Finding(name, "failed", text, error.hint, error.code)


def round_trip(session: Session, *, deployed: bool) -> Finding:
    """Return the line about time: what a call costs over an open connection, and what opening one adds.

    `session` has not been used yet, and is closed again.
    """
    try:
        first, *rest = [_timed(session.client) for _ in range(_PROBES + 1)]
    except DflashError as error:
        return failed("round trip", error)
    finally:
        session.transport.close()
    once = statistics.median(rest)
    text = f"{_milliseconds(once)} for a call of the agent"
    if session.settings["host"] != "local":
        text += f", {_milliseconds(max(first - once, 0.0))} to connect before the first"
    if not deployed:
        text += "; until the first deploy it travels along"
    if once > _SLOW:
        return Finding("round trip", "warning", text, "look at the host's load: `pct exec` alone takes up to a second")
    return Finding("round trip", "ok", text)


def _timed(client: AgentClient) -> float:
    began = time.monotonic()
    # The agent's cheapest verb: it lists a directory.
    client.releases()
    return time.monotonic() - began


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """Return the code of the first finding that failed, OK when none did."""
    return next((finding.code for finding in findings if finding.state == "failed"), ExitCode.OK)


def finding_lines(finding: Finding, out: Stream, columns: int) -> list[str]:
    """Return one finding in lines of at most `columns`, but for a word (a path) that alone is longer.

    Beside its mark and name where there is room, else below them; the hint, if any, comes last.
    """
    sign, style = _mark(finding.state, out)
    name = one_line(finding.name)
    head = f"{out.style(sign, style)} {out.style(f'{name:<{_NAME}}', 'bold')}"
    wide = columns >= _NARROW
    indent = len(sign) + 1 + max(_NAME, len(name)) + 1 if wide else 2
    text = _wrapped(one_line(finding.text), columns - indent)
    # Colours do not count: text is wrapped before they are put on.
    lines = [f"{head} {text[0]}"] if wide else [head.rstrip(), f"  {text[0]}"]
    lines += [" " * indent + line for line in text[1:]]
    if finding.hint and finding.state != "ok":
        hint = _wrapped(f"hint: {one_line(finding.hint)}", columns - indent)
        lines += [" " * indent + out.style(line, "dim") for line in hint]
    return lines


def _mark(state: str, out: Stream) -> tuple[str, str]:
    """Return mark and style: a sign on a terminal that can show it, else the word, padded to the longest."""
    sign, style = _SIGNS[state]
    encoding = (out.file.encoding or "ascii").lower().replace("-", "")
    return (sign, style) if out.live and encoding == "utf8" else (f"{state:<7}", style)


def _wrapped(text: str, columns: int) -> list[str]:
    # Paths and commands stay whole, hyphens and all: they are there to be copied.
    return textwrap.wrap(text, max(columns, 10), break_long_words=False, break_on_hyphens=False) or [""]


def as_json(findings: Iterable[Finding], training: Training | None) -> dict[str, Any]:
    """Return what `doctor --json` prints."""
    listed = [dataclasses.asdict(finding) | {"code": int(finding.code)} for finding in findings]
    config = {} if training is None else {"file": training.base, "origin": training.base_origin}
    return {"findings": listed, "code": int(exit_code(findings)), "configuration": config}
