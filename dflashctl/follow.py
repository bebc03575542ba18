"""Following a log across lost connections: position is (device, inode, offset), so no byte is lost or shown twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dflashctl.agent_client import AgentClient
from dflashctl.errors import ConnectionLost, NoAnswer
from dflashctl.results import LogEnd, Position, parse

_BACK_OFF = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0)
"""Pauses in seconds between attempts; more than a minute without an answer and the command ends with exit code 8."""


@dataclass(frozen=True)
class LogRequest:
    """Which log, from where. `tail`: so many last lines, None for all of it; `run`: "" for the live or last one."""

    run: str = ""
    file: str = "train"
    tail: int | None = None
    follow: bool = False


@dataclass(frozen=True)
class Notice:
    """Something about the log that is no line of it: it was truncated, the connection was lost."""

    text: str


class Follower:
    """Yields the bytes of a log as they come; `run_id` and position survive a lost connection."""

    def __init__(self, client: AgentClient, request: LogRequest, sleep: Callable[[float], None] = time.sleep) -> None:
        self._client = client
        self._request = request
        self._sleep = sleep
        self._run = request.run
        self._position: Position | None = None
        self._attempt = 0

    def __iter__(self) -> Iterator[bytes | Notice | LogEnd]:
        """Yield until the log, or with `follow` the run, has ended.

        Raises the agent's own errors, and NoAnswer when the connection cannot be had back for a minute.
        """
        while True:
            try:
                yield from self._one_connection()
                return
            except NoAnswer as error:
                # Only what was lost in mid-answer is asked again; a destination that never answered is an error at once.
                if not self._request.follow or not (isinstance(error, ConnectionLost) or self._position is not None):
                    raise
                if self._attempt >= len(_BACK_OFF):
                    raise
                yield Notice(f"{error.error}: {error.cause}; reconnecting")
                self._sleep(_BACK_OFF[self._attempt])
                self._attempt += 1

    def _one_connection(self) -> Iterator[bytes | Notice | LogEnd]:
        body: dict[str, Any] = {"run": self._run, "file": self._request.file, "follow": self._request.follow}
        if self._position is None:
            body["tail"] = self._request.tail
        else:
            body |= {key: getattr(self._position, key) for key in ("device", "inode", "offset")}
        with self._client.call("logs", body) as answer:
            for item in answer:
                if isinstance(item, bytes):
                    self._attempt = 0
                    if self._position is not None:
                        self._position = self._position.after(len(item))
                    yield item
                else:
                    yield from self._take_position(item)
            yield parse(LogEnd, answer.result)

    def _take_position(self, event: dict[str, Any]) -> Iterator[Notice]:
        if "offset" not in event:
            return
        self._position = parse(Position, event)
        # From now on this very run: a newer one must not slip in behind a reconnect.
        self._run = self._position.run or self._run
        if self._position.notice:
            yield Notice(self._position.notice)


class LineAssembler:
    """Cuts bytes into lines; a line of unbounded length comes in pieces, so memory stays flat."""

    LONGEST = 1 << 16

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without their newline."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > self.LONGEST:
            lines.append(self._rest[: self.LONGEST])
            self._rest = self._rest[self.LONGEST :]
        return lines

    def finish(self) -> list[bytes]:
        """Return what is left at the end of the log, if anything."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []
