"""The agent's two ends of the wire: the request on stdin, the answer on stdout."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from remote.protocol.errors import DflashError, usage_error
from remote.protocol.events import Event, Message, Phase
from remote.protocol.frames import Frame, FrameError, FrameParser, Kind, json_frame
from remote.protocol.identity import boot_id

PROTOCOL = 1

HEARTBEAT_SECONDS = 2.0
"""Pause between heartbeats: the client takes some of them missing for a dead far end."""

UPLOAD_SILENCE = 30.0
"""Seconds without a byte after which an upload is given up, so that a frozen client leaves no agent behind."""

_READ_BYTES = 1 << 16

_STUCK_SECONDS = 5.0
"""How long work that outlives its client waits for a reader before it goes on without one."""


class ClientGone(Exception):
    """Nobody reads the answer any more. The verb ends quietly; a run that was launched goes on."""


class Request:
    """The one request of a call. `root` is set once it is resolved."""

    def __init__(self, nonce: str, body: dict[str, Any], frames: Iterator[Frame]) -> None:
        self.nonce = nonce
        self.root = Path()
        self._body = body
        self._frames = frames

    @classmethod
    def read(cls, descriptor: int) -> Request:
        """Read the request frame. Raises FrameError when the stream ends before it or holds something else."""
        frames = _frames(descriptor)
        first = next(frames, None)
        if first is None:
            raise FrameError("no request on standard input")
        return cls(first.nonce, first.json(), frames)

    def data(self) -> Iterator[bytes]:
        """Yield the payloads of the data frames up to `end`. Raises FrameError when the stream ends or stalls before."""
        for frame in self._frames:
            if frame.kind is Kind.END:
                return
            if frame.kind is not Kind.DATA:
                raise FrameError(f"expected data, found {frame.kind}")
            yield frame.payload
        raise FrameError("the upload ended early")

    def text(self, key: str, default: str) -> str:
        return cast("str", self._field(key, default, (str,)))

    def flag(self, key: str, default: bool) -> bool:
        return cast("bool", self._field(key, default, (bool,)))

    def number(self, key: str, default: float) -> float:
        value = cast("float", self._field(key, default, (int, float)))
        # A grace of NaN would never end; 1e9 s are thirty years.
        if not abs(value) <= 1e9:
            raise usage_error(f"request field {key!r} is out of range: {value}")
        return float(value)

    def count(self, key: str) -> int | None:
        """Return a whole number >= 0, or None when it is not given."""
        value = self._field(key, None, (int,))
        if value is not None and value < 0:
            raise usage_error(f"{key} must not be negative")
        return cast("int | None", value)

    def object(self, key: str) -> dict[str, Any]:
        return cast("dict[str, Any]", self._field(key, {}, (dict,)))

    def words(self, key: str) -> list[str]:
        value = cast("list[Any]", self._field(key, [], (list,)))
        if not all(isinstance(item, str) for item in value):
            raise usage_error(f"request field {key!r} holds something that is no text")
        return cast("list[str]", value)

    def _field(self, key: str, default: Any, types: tuple[type, ...]) -> Any:
        value = self._body.get(key)
        if value is None:
            return default
        # True is an int to Python, not to a person who wrote a request.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            found = type(value).__name__
            raise usage_error(f"request field {key!r} is {found}", cause=f"expected {types[0].__name__}")
        return value


def _frames(descriptor: int) -> Iterator[Frame]:
    parser = FrameParser()
    while True:
        # A frozen client holds its end open: without a bound its agent would wait for ever.
        # poll, not select: descriptors above 1023 are legal, and a plain file is always ready for both.
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if not poller.poll(UPLOAD_SILENCE * 1000):
            raise FrameError(f"no byte arrived for {UPLOAD_SILENCE:.0f} s")
        data = os.read(descriptor, _READ_BYTES)
        if not data:
            return
        yield from parser.feed(data)


class Answer:
    """Writes frames; a thread of its own keeps the heartbeat while the verb is busy. Close it: `with` does."""

    def __init__(self, nonce: str, descriptor: int) -> None:
        self._nonce = nonce
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._gone = threading.Event()
        self._outlives = False
        self._thread = self._heart()

    def _heart(self) -> threading.Thread:
        return threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Answer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        # A beat may be stuck in a full pipe nobody reads; the thread is a daemon, so it does not outlive the process.
        self._thread.join(timeout=1.0)

    def check(self) -> None:
        """Raise ClientGone when a heartbeat could not be delivered. Long waits call this: they write nothing themselves."""
        if self._gone.is_set() and not self._outlives:
            raise ClientGone

    def outlive_client(self, outlives: bool = True) -> None:
        """From now on the work matters more than the answer: a client that goes away ends nothing."""
        self._outlives = outlives

    def survive(self) -> None:
        """Go on in a child of its own session, which outlives the client and whatever ends the process that it began.

        A client on this machine kills an agent that does not end when it closes its pipes, and a host may end a
        `pct exec`. The caller goes on in the child; the first process waits for it and ends with its exit code.
        """
        # No thread may be in the middle of a frame when we fork; one that is stuck in a full pipe is left behind.
        self._closed.set()
        self._thread.join(timeout=_STUCK_SECONDS)
        if child := os.fork():
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
        os.setsid()
        self._closed.clear()
        # A thread that was left behind holds the old one for ever.
        self._lock = threading.Lock()
        self._thread = self._heart()
        self._thread.start()
        self.outlive_client()

    def hello(self, release: str, root: Path) -> None:
        version = ".".join(str(part) for part in sys.version_info[:3])
        self._json(
            Kind.HELLO,
            {
                "protocol": PROTOCOL,
                "agent": release,
                "python": version,
                "boot_id": boot_id(),
                "root": str(root),
                "time": time.time(),
            },
        )

    def event(self, event: Event) -> None:
        """Send an event of the run, or of the verb itself."""
        self.note({"kind": event.kind, **vars(event)})

    def phase(self, phase: str, detail: str = "", seconds: float = 0.0) -> None:
        """Send a phase of the verb itself (role: agent)."""
        self.event(Phase(time=time.time(), role="agent", phase=phase, detail=detail, seconds=seconds))

    def say(self, text: str, level: str = "info") -> None:
        """Send a message of the verb itself."""
        self.event(Message(time=time.time(), level=level, text=text))

    def note(self, value: dict[str, Any]) -> None:
        """Send an event frame that is no Event: deploy's question, a position of logs."""
        self._json(Kind.EVENT, value)

    def data(self, payload: bytes) -> None:
        self._write(Frame(self._nonce, Kind.DATA, payload))

    def result(self, value: dict[str, Any]) -> None:
        self._json(Kind.RESULT, value)

    def error(self, error: DflashError, *, debug: str = "") -> None:
        self._json(Kind.ERROR, {**error.to_json(), "debug": debug})

    def _json(self, kind: Kind, value: Any) -> None:
        self._write(json_frame(self._nonce, kind, value))

    def _write(self, frame: Frame) -> None:
        """Write one whole frame. Raises ClientGone when nobody reads."""
        # A pipe takes 64 KiB at a time: the rest must not be copied each time.
        rest = memoryview(frame.encode())
        # Heartbeats come from another thread; a frame must go out whole.
        with self._lock:
            try:
                while rest and not self._gone.is_set():
                    rest = rest[self._write_some(rest) :]
            except (BrokenPipeError, ConnectionResetError):
                self._gone.set()
        self.check()

    def _write_some(self, rest: memoryview) -> int:
        if not self._outlives:
            return os.write(self._descriptor, rest)
        # A frozen client reads nothing and closes nothing: its full pipe must not hold up what has to be done.
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        if not poller.poll(_STUCK_SECONDS * 1000):
            self._gone.set()
            return 0
        return os.write(self._descriptor, rest[: select.PIPE_BUF])

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(ClientGone):
                self._json(Kind.HEARTBEAT, {"time": time.time()})
