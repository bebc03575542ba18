"""Events from every rank to one file, and the clock that knows who waits.

The first drafter rank alone writes events.jsonl and prints the log line of each event; every other rank sends its events
to it over a datagram socket, from its first line on. Nothing here imports torch: even that import is a reported phase.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from remote.protocol import events as ev
from trainer.pipeline.pulse import Pulse

EventSink = Callable[[ev.Event], None]

# Not bound yet, or the writer has ended: the kernel refuses once, then it has forgotten the peer.
_NOBODY_LISTENS = (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTCONN)


class Telemetry(Protocol):
    """Where a rank's events go."""

    def emit(self, event: ev.Event) -> None: ...

    def close(self) -> None: ...


class EventWriter:
    """The writing end: appends to events.jsonl, prints the line, and receives what the other ranks send.

    A disk that is full must not end a run that trains well: the line is printed, the loss of the event is said once.
    """

    def __init__(self, events_file: Path, address: Path | None, *, observer: EventSink | None = None) -> None:
        self._file = os.open(events_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._write_lock = threading.Lock()
        self._write_failed = False
        self._torn = False
        self._observer = observer
        self._wake_read, self._wake_write = os.pipe()
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        if address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(str(address))
            self._thread = threading.Thread(target=self._receive, name="events", daemon=True)
            self._thread.start()

    def observe(self, observer: EventSink) -> None:
        """Call `observer` for every event from now on (from the receiving thread too)."""
        self._observer = observer

    def emit(self, event: ev.Event) -> None:
        line = ev.encode(event)
        # The log may lie on the same full disk; then there is nowhere left to say so.
        with self._write_lock, contextlib.suppress(OSError):
            self._append(line)
            # One write call: the ranks share the log file, and O_APPEND keeps lines of one write whole.
            sys.stdout.write(ev.render_line(event) + "\n")
            sys.stdout.flush()
        if self._observer is not None:
            self._observer(event)

    def _append(self, line: str) -> None:
        # Behind half a line a new one begins: else the first event after the disk has room again would be lost with it.
        data = (b"\n" if self._torn else b"") + line.encode("ascii") + b"\n"
        failed_before = self._write_failed
        try:
            self._torn = os.write(self._file, data) < len(data)
            self._write_failed = self._torn
            reason = "a line was cut short"
        except OSError as error:
            self._write_failed = True
            reason = str(error.strerror)
        if self._write_failed and not failed_before:
            print(f"events.jsonl cannot be written: {reason}", file=sys.stderr, flush=True)

    def _receive(self) -> None:
        assert self._socket is not None
        while True:
            ready, _, _ = select.select([self._socket, self._wake_read], [], [])
            if self._socket in ready:
                event = ev.decode(self._socket.recv(1 << 16))
                if event is not None:
                    self.emit(event)
            elif self._wake_read in ready:  # Only once the socket is drained.
                return

    def close(self) -> None:
        """Write what has arrived, end the thread, close the file."""
        if self._thread is not None and self._socket is not None:
            os.write(self._wake_write, b"x")
            self._thread.join()
            self._socket.close()
        for descriptor in (self._file, self._wake_read, self._wake_write):
            os.close(descriptor)


class EventSender:
    """The sending end of every other rank. Events wait here until the writer has bound its socket."""

    def __init__(self, address: Path) -> None:
        self._address = str(address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._connected = False
        self._waiting: deque[bytes] = deque(maxlen=1000)
        self._lock = threading.Lock()

    def emit(self, event: ev.Event) -> None:
        with self._lock:
            self._waiting.append(ev.encode(event).encode("ascii"))
            self._flush()

    def _flush(self) -> None:
        # Connecting once keeps the socket usable after its directory has been removed.
        try:
            if not self._connected:
                self._socket.connect(self._address)
                self._connected = True
            while self._waiting:
                self._socket.send(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if error.errno not in _NOBODY_LISTENS:
                raise
            self._connected = False  # The next event tries again.

    def close(self) -> None:
        with self._lock:
            self._flush()
            self._socket.close()


class Timeline(Protocol):
    """How moments of a rank's work are taken. On a GPU that is no host clock: what a launch takes says nothing of the work."""

    def now(self) -> Any:
        """Return the moment at which everything that the calling thread has asked for so far is done."""
        ...

    def seconds(self, start: Any, end: Any) -> float | None:
        """Return what lies between two moments, None while `end` is to come. Never waits."""
        ...

    def forget(self, moment: Any) -> None:
        """Take back a moment that nobody asks about any more."""
        ...


class HostTimeline:
    """The host's clock: on a CPU work is done when the call returns."""

    def now(self) -> float:
        return time.monotonic()

    def seconds(self, start: float, end: float) -> float | None:
        return end - start

    def forget(self, moment: float) -> None:
        return


WORK_STAGES = frozenset(("target_forward", "pack", "forward", "backward", "optimizer", "held_out"))
"""Stages in which the device computes; in the others it waits for the host, for the data or for another rank."""


@dataclass
class _Segment:
    """A piece of a rank's time, whole and without overlap: one stage, from a moment to the next."""

    stage: str
    start: Any
    end: Any
    tokens: int
    flops: float


class StageClock:
    """Where the time of one rank goes: read and reset once per profile interval.

    One thread works through stages; each switch is a moment of the timeline, so that stages never overlap and add up to
    the interval, with what lies outside of all. On a GPU a moment passes when the device gets there. A wait of the host is
    then what the device stood idle for, nothing where it still had work; and an interval ends at the last moment that has
    passed, up to a step behind the host. Copies run beside all this and are counted apart.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline: Timeline = timeline or HostTimeline()
        self._lock = threading.RLock()
        self.ring_bytes = 0
        """Newest fill of this target's share of the ring."""
        self.annotate: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        """Entered with each stage's name; a trace marks the stages so."""
        self.pulse = Pulse()
        """Told of every stage that begins: what the rank's watchdog goes by."""
        self.current = ""
        """The stage that the rank is in, empty outside of all; one that failed stays until the next."""
        self._around: list[str] = []
        self._segments: deque[_Segment] = deque()
        self.begin()

    def begin(self) -> None:
        """Start the first interval now, whatever went before."""
        with self._lock:
            self._segments.clear()
            self._last = self._timeline.now()
            self._tokens, self._flops = 0, 0.0
            self._reset()

    def _reset(self) -> None:
        self._seconds: dict[str, float] = {}
        self._copies: dict[str, float] = {}
        self._elapsed, self._done_tokens, self._done_flops = 0.0, 0, 0.0

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`; that of a stage inside it under the inner one's."""
        self._around.append(name)
        try:
            self.turn_to(name)
            with self.annotate(name):
                yield
        finally:
            self._around.pop()
        # Not after a failure: on a GPU that is out of order taking the time would fail as well, and hide the cause.
        self.turn_to(self._around[-1] if self._around else "")

    def turn_to(self, name: str) -> None:
        """Count under `name` from now on. A stage turns back to the one around it at its own end."""
        with self._lock:
            self._cut()
            self.current = name
            self.pulse.turn_to(name)

    def _cut(self) -> None:
        moment = self._timeline.now()
        self._segments.append(_Segment(self.current, self._last, moment, self._tokens, self._flops))
        self._last, self._tokens, self._flops = moment, 0, 0.0
        self._settle()

    def _settle(self) -> None:
        while self._segments:
            done = self._segments[0]
            seconds = self._timeline.seconds(done.start, done.end)
            if seconds is None:
                return
            self._segments.popleft()
            self._timeline.forget(done.start)
            self._elapsed += seconds
            if done.stage:
                self._seconds[done.stage] = self._seconds.get(done.stage, 0.0) + seconds
            self._done_tokens += done.tokens
            self._done_flops += done.flops

    def copied(self, name: str, seconds: float) -> None:
        """Count what a copy took beside the stages (from any thread)."""
        with self._lock:
            self._copies[name] = self._copies.get(name, 0.0) + seconds

    def add_tokens(self, tokens: int) -> None:
        """Count non-padding tokens."""
        with self._lock:
            self._tokens += tokens

    def add_flops(self, flops: float) -> None:
        """Count floating-point operations that the model's matrix products need."""
        with self._lock:
            self._flops += flops

    def read(self, *, role: str, device: str, rank: int) -> ev.StageProfile:
        """Return the interval's profile and begin the next interval."""
        with self._lock:
            self._cut()
            length = max(self._elapsed, 1e-9)
            profile = ev.StageProfile(
                time=time.time(),
                rank=rank,
                role=role,
                device=device,
                interval=self._elapsed,
                tokens=self._done_tokens,
                stages=dict(self._seconds),
                copy_out=self._copies.get("copy_out", 0.0),
                copy_in=self._copies.get("copy_in", 0.0),
                busy=sum(s for name, s in self._seconds.items() if name in WORK_STAGES) / length,
                flops_per_second=self._done_flops / length,
                ring_bytes=self.ring_bytes,
            )
            self._reset()
            return profile


class PhaseLog:
    """Reports the phases of a rank and remembers the current one, which a crash is filed under."""

    def __init__(self, telemetry: Telemetry, *, role: str, rank: int) -> None:
        self._telemetry = telemetry
        self._role = role
        self._rank = rank
        self.current = "starting"
        self.detail = ""
        """What exactly is done in the current phase, empty where that was not said."""

    @contextlib.contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        """Report the phase at its beginning and, with its seconds, at its end; with what `detail` says by then."""
        self.current, self.detail = name, detail
        self._report(name, detail, 0.0)
        start = time.monotonic()
        yield
        detail, self.detail = self.detail, ""
        self._report(name, detail, time.monotonic() - start)

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Be in a phase that comes often, or late, and is not reported; what fails in it is filed under it."""
        before, self.current = self.current, name
        yield
        self.current = before

    def _report(self, name: str, detail: str, seconds: float) -> None:
        self._telemetry.emit(
            ev.Phase(time=time.time(), rank=self._rank, role=self._role, phase=name, detail=detail, seconds=seconds)
        )
