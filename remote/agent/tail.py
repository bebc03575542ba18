"""Reading the ends of growing files: new events as they come, last lines without the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from remote.protocol.events import Event, read_events

_BLOCK = 1 << 16
_MOST_PER_POLL = 4 << 20


class EventTail:
    """Follows an events.jsonl that appears, grows, and may be truncated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def poll(self) -> list[Event]:
        """Return the events completed since the last call (from at most 4 MiB); a torn last line waits."""
        try:
            with self._path.open("rb") as file:
                # Somebody truncated it: begin anew rather than wait for it to grow back.
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                data = file.read(_MOST_PER_POLL)
        except OSError:  # not there yet, or the run's directory was deleted: no news
            return []
        self._offset += len(data)
        # A writer killed in mid-line leaves half of one; it is never parsed, and a next writer's newline ends it.
        complete, newline, self._rest = (self._rest + data).rpartition(b"\n")
        return list(read_events(complete + newline))


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 when there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_tail(path: Path, size: int) -> bytes:
    """Return the last `size` bytes of a file, less when it is shorter; nothing when there is no such file."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            # The first line of what we read is cut; read_events skips what is no event.
            file.seek(max(0, end - size))
            return file.read(size)
    except OSError:
        return b""


def last_events(path: Path, size: int = _BLOCK) -> Iterator[Event]:
    """Yield the events in the last `size` bytes of an events.jsonl, newest first."""
    yield from reversed(list(read_events(read_tail(path, size))))


def first_events(path: Path, size: int = 1 << 14) -> list[Event]:
    """Return the events in the first `size` bytes of an events.jsonl."""
    try:
        with path.open("rb") as file:
            return list(read_events(file.read(size)))
    except OSError:
        return []


def last_lines(path: Path, count: int, most_bytes: int = _BLOCK) -> str:
    """Return the last `count` lines of a log (of its last `most_bytes`), for a message to a person."""
    text = read_tail(path, most_bytes).decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-count:])


def line_start(descriptor: int, lines: int) -> int:
    """Return the offset where the last `lines` lines of a file begin, reading backwards in blocks.

    A last line without newline counts as one. O(what is shown), however long the file.
    """
    end = position = os.fstat(descriptor).st_size
    # The newline that ends the last line separates nothing.
    wanted = lines + 1 if end and os.pread(descriptor, 1, end - 1) == b"\n" else lines
    # --tail 0: only what is new.
    if lines <= 0:
        return end
    while position > 0:
        start = max(0, position - _BLOCK)
        block = os.pread(descriptor, position - start, start)
        at = len(block)
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            wanted -= 1
            if wanted == 0:
                return start + at + 1
        position = start
    return 0
