"""How log bytes are shown: as they are, as JSON lines, as plain lines, or on a terminal with colours and a bar."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any

from dflashctl.console import ERR, OUT, harmless
from dflashctl.follow import LineAssembler
from dflashctl.results import LogEnd
from remote.protocol.codec import dumps, loads_object, plain
from remote.protocol.events import parse_line

# A rendered alarm in train.log, or one in events.jsonl.
_ALARM = re.compile(rb'^\S+Z alarm |^\{"kind":"alarm"')


class LogView(ABC):
    """Takes bytes; counts alarms. A context manager, for a bar must be taken down whatever happens."""

    def __init__(self) -> None:
        self.alarms = 0
        self._lines = LineAssembler()

    def __enter__(self) -> LogView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027  # most views put nothing up
        """Take down what was put up."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the log."""
        self._take(self._lines.feed(data))

    def finish(self) -> None:
        """Show a last line without a newline."""
        self._take(self._lines.finish())

    def _take(self, lines: list[bytes]) -> None:
        self.alarms += sum(1 for line in lines if _ALARM.match(line))
        self.show(lines)

    @abstractmethod
    def show(self, lines: list[bytes]) -> None:
        """Show complete lines."""

    def notice(self, text: str) -> None:
        """Say something about the log; never on stdout, which is the log."""
        ERR.line(f"-- {text}")

    def ended(self, end: LogEnd) -> None:
        """Say how the run ended."""
        OUT.line(end_line(end))


def end_line(end: LogEnd) -> str:
    """Return the last line of a followed log."""
    # Only now: it takes longer than the first lines of a log do.
    from dflashctl.views import not_applied_text

    line = f"run {end.run} {end.state}" if end.run else f"run {end.state}"
    if end.exit is not None and end.exit.last_step:
        line += f" at step {end.exit.last_step}"
    if end.exit is not None and end.exit.not_applied:
        line += f", {not_applied_text(end.exit.not_applied)} not applied"
    if end.exit is not None and end.exit.held_out is not None:
        line += f", held-out loss {end.exit.held_out.loss:.4f}"
    # Last: a path is copied, and what follows it would be copied with it.
    if end.exit is not None and end.exit.last_checkpoint:
        line += f", checkpoint {end.exit.last_checkpoint}"
    if end.exit is not None and (best := end.exit.best) is not None and best.checkpoint != end.exit.last_checkpoint:
        line += f", best (held-out loss {best.loss:.4f}) {best.checkpoint}"
    return line


class PipedView(LogView):
    """Bytes untouched: whoever reads a pipe wants the log, not our idea of it. How the run ended is its last line."""

    def feed(self, data: bytes) -> None:
        # Whole chunks, not lines: `logs | gzip` of gigabytes runs at the speed of the pipe.
        OUT.raw(data)
        self.alarms += sum(1 for line in self._lines.feed(data) if _ALARM.match(line))

    def show(self, lines: list[bytes]) -> None:
        """Everything was written by `feed` already."""


class RawView(PipedView):
    """Bytes of the log and nothing else."""

    def ended(self, end: LogEnd) -> None:
        ERR.line(end_line(end))


class PlainView(LogView):
    """Lines for a terminal without colours: control characters are shown, not obeyed."""

    def show(self, lines: list[bytes]) -> None:
        if lines:
            OUT.line("\n".join(readable(line) for line in lines))


def readable(line: bytes) -> str:
    """Return a log line as text: of a bar redrawn with carriage returns its last state, control characters harmless."""
    return harmless(line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", errors="replace"))


class JsonView(LogView):
    """One JSON object a line: an event's fields, or {"kind": "text", "line": ...}."""

    def show(self, lines: list[bytes]) -> None:
        for line in lines:
            OUT.line(dumps(_as_object(line.decode("utf-8", errors="replace"))))

    def ended(self, end: LogEnd) -> None:
        OUT.line(dumps({"kind": "end", **plain(end)}))


def _as_object(line: str) -> dict[str, Any]:
    if (fields := parse_line(line)) is not None:
        return fields
    if line.startswith('{"kind":'):
        try:
            return loads_object(line)
        except ValueError:
            pass  # a torn line of events.jsonl is text like any other
    return {"kind": "text", "line": line}


def choose_view(*, as_json: bool, raw: bool) -> LogView:
    """Return the view that fits stdout. rich is imported for a terminal only: it takes 0.1 s."""
    if as_json:
        return JsonView()
    if raw:
        return RawView()
    if not OUT.file.isatty():
        return PipedView()
    if not OUT.live:
        return PlainView()
    from dflashctl.liveview import LiveView

    return LiveView()
