"""One answer of the agent at the far end: hello, then events, data and heartbeats, then exactly one result or error.

Every wait is bounded by silence, not by length: an agent that works sends a heartbeat every two seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from dflashctl.errors import ConnectionLost, NoAnswer
from dflashctl.transport import Channel, ChannelClosed, Silence, Transport
from dflashctl.transport.explain import broke_off, python_spoke
from remote.protocol.errors import DflashError
from remote.protocol.frames import MAX_DATA, Frame, FrameError, FrameParser, Kind

PROTOCOL = 1
UPLOAD_SILENCE = 30.0
"""Seconds without progress after which an upload is given up."""

_ALIVE_SECONDS = 3.0
"""An agent that was heard so lately lives: its heartbeats are two seconds apart."""

_MOST_NOISE = 1 << 20
"""Bytes before hello after which no answer is expected any more: silence alone does not end a far end that never stops."""

_TASTE = 40
_SHOWN = 500
"""Characters of a far end's own words that a person is shown."""


class _NeverQuiet(Exception):
    """More was said before hello than any greeting is long."""


class NoHello(Exception):
    """The command ended, or only talked, before the agent said hello. `said`: all that it said, "" for nothing.

    `known`: what that means, where a hop knows it.
    """

    def __init__(self, said: str, known: DflashError | None) -> None:
        super().__init__(said)
        self.said = said
        self.known = known


@dataclass(frozen=True)
class Patience:
    """How long an answer is waited for: `silence` seconds without a byte, and no longer than `deadline` (monotonic) in all."""

    silence: float
    deadline: float = math.inf

    def left(self) -> float:
        """Return how many seconds the next byte may take."""
        return max(0.0, min(self.silence, self.deadline - time.monotonic()))


class Answer:
    """The answer to one request, read frame by frame. Use as a context manager."""

    def __init__(self, channel: Channel, nonce: str, transport: Transport, patience: Patience) -> None:
        self.result: dict[str, Any] = {}
        self.hello: dict[str, Any] = {}
        self._channel = channel
        self._nonce = nonce
        self._transport = transport
        self._patience = patience
        self._parser = FrameParser(nonce)
        self._waiting: list[Frame] = []
        self._heard = b""
        self._noise = 0
        self._heard_at = time.monotonic()

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def send(self, payload: bytes, timeout: float) -> None:
        """Send bytes to the agent; an agent that no longer reads has its reason in the frames that follow."""
        try:
            self._channel.send(payload, timeout)
        except ChannelClosed:
            # An agent that refuses an upload stops reading and says why: the error frame is worth more than ours.
            return
        except Silence:
            known = self._known(silent=True)
            if known is not None and not self.hello:
                raise known from None
            raise ConnectionLost(
                f"{self._transport.name} takes no more data",
                cause=known.error if known else f"nothing could be sent for {timeout:.0f} s",
                hint=known.hint if known else "check the connection and repeat the command; it goes on where it was",
            ) from None

    def upload(self, content: bytes) -> None:
        """Send `content` as data frames of at most 1 MiB."""
        for start in range(0, len(content), MAX_DATA):
            self.send(Frame(self._nonce, Kind.DATA, content[start : start + MAX_DATA]).encode(), UPLOAD_SILENCE)

    def end(self) -> None:
        """Say that no more input comes."""
        self.send(Frame(self._nonce, Kind.END).encode(), self._patience.silence)
        self._channel.finish()

    def expect_hello(self) -> None:
        """Wait for the agent's first frame. Raises NoHello at the end of the stream, NoAnswer on silence, explained."""
        name = self._transport.name
        try:
            frame = self._next_frame()
        except Silence:
            raise self._known(silent=True) or NoAnswer(
                f"no answer from {name}", cause=self._said(self._quiet()), hint=NO_ANSWER_HINT
            ) from None
        except FrameError as error:
            raise NoAnswer(f"no sensible answer from {name}", cause=str(error), hint=NO_ANSWER_HINT) from error
        except _NeverQuiet:
            raise NoAnswer(
                f"no sensible answer from {name}",
                cause=f"it said more than {_MOST_NOISE >> 20} MiB and no answer, at last {shortened(self._words()[-_TASTE:])!r}",
                hint="a login script there may never end: `ssh HOST true` must say nothing and come back",
            ) from None
        if frame is not None and frame.kind is Kind.ERROR:
            raise _far_end_error(self._object(frame))
        if frame is None or frame.kind is not Kind.HELLO:
            raise NoHello(self._words(), self._known())
        self.hello = self._object(frame)
        if self.hello.get("protocol") != PROTOCOL:
            raise NoAnswer(
                f"the agent on {name} speaks another protocol",
                cause=f"protocol {self.hello.get('protocol')!r}, this dflashctl speaks {PROTOCOL}",
                hint="run `dflashctl deploy` to ship the agent that fits",
            )

    def __iter__(self) -> Iterator[dict[str, Any] | bytes]:
        """Yield events as objects and data as bytes until the result is there.

        Raises the agent's own error; ConnectionLost when the stream falls silent, tears or ends early.
        """
        for frame in self._frames():
            if frame.kind is Kind.EVENT:
                yield self._object(frame)
            elif frame.kind is Kind.DATA:
                yield frame.payload
            # Heartbeats have done their work: they ended the wait for the next byte.
            elif frame.kind is Kind.RESULT:
                self.result = self._object(frame)
                return
            elif frame.kind is Kind.ERROR:
                raise _far_end_error(self._object(frame))

    def drain(self, on_event: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Read to the end, handing events on; return the result."""
        for item in self:
            if on_event is not None and isinstance(item, dict):
                on_event(item)
        return self.result

    def _frames(self) -> Iterator[Frame]:
        while True:
            try:
                frame = self._next_frame()
            except Silence:
                raise self._unfinished() from None
            except FrameError as error:
                raise self._lost(str(error)) from error
            if frame is None:
                what = "the answer was torn" if self._parser.pending else "it ended without a result"
                raise self._lost(what, self._known()) from None
            yield frame

    def _object(self, frame: Frame) -> dict[str, Any]:
        try:
            return frame.json()
        except FrameError as error:
            raise self._lost(str(error)) from error

    def _next_frame(self) -> Frame | None:
        while not self._waiting:
            data = self._channel.receive(self._patience.left())
            if not data:
                return None
            self._heard_at = time.monotonic()
            # Kept beside the parser, which holds back the last bytes: the end of a header may still come.
            if not self.hello:
                self._heard = (self._heard + data)[-FrameParser.NOISE_KEPT :]
                self._noise += len(data)
            self._waiting.extend(self._parser.feed(data))
            if not self._waiting and self._noise > _MOST_NOISE:
                raise _NeverQuiet
        return self._waiting.pop(0)

    def _words(self) -> str:
        """Return what was said that is no frame: on stderr and, before hello, on stdout."""
        # What came before hello is whatever a login shell prints; once hello is there it explains nothing.
        said = "" if self.hello else self._heard.decode("utf-8", errors="replace").strip()
        return "\n".join(part for part in (said, self._channel.diagnostics()) if part)

    def _known(self, *, silent: bool = False) -> DflashError | None:
        """Return what the hops know of why there is no answer, or no more of it."""
        words = self._words()
        # A Python that spoke proves that every hop is well: asking them would cost a call and find noise at best.
        if python_spoke(words) and not silent:
            return None
        # Whoever carried it knows best, and asking the hops again takes a new connection.
        return broke_off(words, self._transport.name) or self._transport.explain(words, silent=silent)

    def _said(self, otherwise: str) -> str:
        return shortened(self._words()) or otherwise

    def _quiet(self) -> str:
        return f"silence for {time.monotonic() - self._heard_at:.0f} s"

    def _unfinished(self) -> NoAnswer:
        """Return the error for an answer that did not come to its end in time."""
        # Its heartbeats came until now: it is well, and what it looks at is not.
        if self._heard_at + _ALIVE_SECONDS > time.monotonic() >= self._patience.deadline:
            return NoAnswer(
                f"{self._transport.name} takes too long to answer",
                cause="its agent is alive, but what it looks at did not answer in time",
                hint="a disk, a network file system or a GPU driver may hang over there; repeat the command",
            )
        return self._lost(self._quiet(), self._known(silent=True))

    def _lost(self, what: str, known: DflashError | None = None) -> ConnectionLost:
        if isinstance(known, ConnectionLost):
            known = DflashError(what, hint=known.hint)
        return ConnectionLost(
            f"the connection to {self._transport.name} broke off in mid-answer",
            cause=known.error if known else self._said(what),
            hint=known.hint if known else "repeat the command; what runs over there goes on",
        )


def shortened(said: str) -> str:
    """Return the end of `said` on one line: a person is shown the last words, not a whole greeting."""
    return " | ".join(line.strip() for line in said[-_SHOWN:].splitlines() if line.strip())


NO_ANSWER_HINT = (
    "check the destination (`dflashctl config show --origin`) and that --python names a Python 3.11 or newer there"
)


def _far_end_error(data: dict[str, Any]) -> DflashError:
    error = DflashError.from_json(data)
    if data.get("debug"):
        error.add_note(f"at the far end:\n{data['debug']}")
    return error
