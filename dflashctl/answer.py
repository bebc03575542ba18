"""One answer of the agent at the far end: hello, then events, data and heartbeats, then exactly one result or error.

Every wait is bounded by silence, not by length: an agent that works sends a heartbeat every two seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from dflashctl.errors import ConnectionLost, NoAnswer
from dflashctl.transport import Channel, ChannelClosed, Silence
from remote.protocol.errors import DflashError
from remote.protocol.frames import MAX_DATA, Frame, FrameError, FrameParser, Kind

PROTOCOL = 1
UPLOAD_SILENCE = 30.0
"""Seconds without progress after which an upload is given up."""


class NoHello(Exception):
    """The command ended, or only talked, before the agent said hello."""


class Answer:
    """The answer to one request, read frame by frame. Use as a context manager."""

    def __init__(self, channel: Channel, nonce: str, name: str, silence: float) -> None:
        self.result: dict[str, Any] = {}
        self.hello: dict[str, Any] = {}
        self._channel = channel
        self._nonce = nonce
        self._name = name
        self._silence = silence
        self._parser = FrameParser(nonce)
        self._waiting: list[Frame] = []
        self._heard = b""

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
            raise ConnectionLost(
                f"{self._name} takes no more data",
                cause=f"nothing could be sent for {timeout:.0f} s",
                hint="check the connection and repeat the command; it goes on where it was",
            ) from None

    def upload(self, content: bytes) -> None:
        """Send `content` as data frames of at most 1 MiB."""
        for start in range(0, len(content), MAX_DATA):
            self.send(Frame(self._nonce, Kind.DATA, content[start : start + MAX_DATA]).encode(), UPLOAD_SILENCE)

    def end(self) -> None:
        """Say that no more input comes."""
        self.send(Frame(self._nonce, Kind.END).encode(), self._silence)
        self._channel.finish()

    def expect_hello(self) -> None:
        """Wait for the agent's first frame. Raises NoHello at the end of the stream, NoAnswer on silence."""
        try:
            frame = self._next_frame()
        except Silence:
            raise NoAnswer(
                f"no answer from {self._name}",
                cause=self._said(f"silence for {self._silence:.0f} s"),
                hint=NO_ANSWER_HINT,
            ) from None
        except FrameError as error:
            raise NoAnswer(f"no sensible answer from {self._name}", cause=str(error), hint=NO_ANSWER_HINT) from error
        if frame is not None and frame.kind is Kind.ERROR:
            raise _far_end_error(self._object(frame))
        if frame is None or frame.kind is not Kind.HELLO:
            raise NoHello(self._said("it ended without a word"))
        self.hello = self._object(frame)
        if self.hello.get("protocol") != PROTOCOL:
            raise NoAnswer(
                f"the agent on {self._name} speaks another protocol",
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
                raise self._lost(f"silence for {self._silence:.0f} s") from None
            except FrameError as error:
                raise self._lost(str(error)) from error
            if frame is None:
                raise self._lost("the answer was torn" if self._parser.pending else "it ended without a result")
            yield frame

    def _object(self, frame: Frame) -> dict[str, Any]:
        try:
            return frame.json()
        except FrameError as error:
            raise self._lost(str(error)) from error

    def _next_frame(self) -> Frame | None:
        while not self._waiting:
            data = self._channel.receive(self._silence)
            if not data:
                return None
            # Kept beside the parser, which holds back the last bytes: the end of a header may still come.
            if not self.hello:
                self._heard = (self._heard + data)[-FrameParser.NOISE_KEPT :]
            self._waiting.extend(self._parser.feed(data))
        return self._waiting.pop(0)

    def _said(self, otherwise: str) -> str:
        # What came before hello is whatever a login shell prints; once hello is there it explains nothing.
        said = "" if self.hello else self._heard.decode("utf-8", errors="replace").strip()
        return " | ".join(part for part in (said[-500:], self._channel.diagnostics()[-500:]) if part) or otherwise

    def _lost(self, what: str) -> ConnectionLost:
        return ConnectionLost(
            f"the connection to {self._name} broke off in mid-answer",
            cause=self._said(what),
            hint="repeat the command; what runs over there goes on",
        )


NO_ANSWER_HINT = (
    "check the destination (`dflashctl config show --origin`) and that --python names a Python 3.11 or newer there"
)


def _far_end_error(data: dict[str, Any]) -> DflashError:
    error = DflashError.from_json(data)
    if data.get("debug"):
        error.add_note(f"at the far end:\n{data['debug']}")
    return error
