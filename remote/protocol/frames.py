"""Framing of every request and answer: `<nonce> <kind> <length>\\n` and then `length` bytes.

The nonce (16 hex digits, drawn by the client, echoed by the agent) tells our frames from whatever a chatty login shell
prints first: bytes before the first frame are skipped, bytes between frames are an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from remote.protocol.codec import dumps, loads_object

MAX_DATA = 1 << 20
"""Largest payload of a `data` frame in bytes: bounds what either end must hold."""

MAX_PAYLOAD = 16 << 20
"""Largest payload of any frame in bytes; a longer header is garbage, not a message."""

_HEADER = re.compile(rb"([0-9a-f]{16}) ([a-z]{1,16}) (0|[1-9][0-9]{0,8})\n")
# 16 hex digits, a kind of at most 16 letters, 9 digits, two spaces, newline.
_MAX_HEADER = 16 + 1 + 16 + 1 + 9 + 1


class Kind(StrEnum):
    """Frame kinds; the first three go to the agent, the rest come back (`data` goes both ways)."""

    REQUEST = "request"
    DATA = "data"
    END = "end"
    HELLO = "hello"
    EVENT = "event"
    HEARTBEAT = "heartbeat"
    RESULT = "result"
    ERROR = "error"


class FrameError(ValueError):
    """The bytes are not a sequence of frames: garbage between frames, an unknown kind, an over-long payload."""


@dataclass(frozen=True)
class Frame:
    """One frame. `payload` of data frames is raw bytes; of all others a JSON object."""

    nonce: str
    kind: Kind
    payload: bytes = b""

    def encode(self) -> bytes:
        """Return the frame's bytes on the wire. Raises FrameError when the payload is over its bound."""
        # The reader would refuse it: better here, where the traceback names who made it.
        if len(self.payload) > (MAX_DATA if self.kind is Kind.DATA else MAX_PAYLOAD):
            raise FrameError(f"{self.kind} frame of {len(self.payload)} bytes is over the bound")
        return f"{self.nonce} {self.kind} {len(self.payload)}\n".encode("ascii") + self.payload

    def json(self) -> dict[str, Any]:
        """Return the payload as a JSON object. Raises FrameError when it is none."""
        try:
            return loads_object(self.payload)
        except ValueError as error:
            raise FrameError(f"{self.kind} frame without a JSON object: {error}") from error


def new_nonce() -> str:
    """Draw a nonce for one request."""
    # os.urandom, not secrets: that module takes 10 ms to import, a tenth of what status may cost.
    return os.urandom(8).hex()


def json_frame(nonce: str, kind: Kind, value: Any) -> Frame:
    """Return a frame whose payload is the JSON of `value`."""
    return Frame(nonce, kind, dumps(value).encode("ascii"))


class FrameParser:
    """Cuts a byte stream into frames, incrementally.

    Noise before the first frame is skipped and its tail kept in `noise`, so that an error can show what the far end said
    instead. With a `nonce` the first frame is the first that carries it; without one (the agent's side, which learns the
    nonce from the request) it is the first request.
    """

    NOISE_KEPT = 4096

    def __init__(self, nonce: str | None = None) -> None:
        self.nonce = nonce
        self.noise = b""
        self._buffer = bytearray()
        self._started = False

    @property
    def pending(self) -> bool:
        """Whether an incomplete frame is buffered: at end of stream this means a torn frame."""
        return self._started and bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take bytes and yield the frames they complete. Raises FrameError on garbage between frames."""
        self._buffer += data
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Frame | None:
        if not self._started and not self._find_start():
            return None
        match = _HEADER.match(self._buffer)
        if match is None:
            if len(self._buffer) >= _MAX_HEADER or b"\n" in self._buffer:
                raise FrameError(f"garbage between frames: {bytes(self._buffer[:80])!r}")
            return None
        frame_end = match.end() + self._checked_length(match)
        if len(self._buffer) < frame_end:
            return None
        frame = Frame(
            match[1].decode("ascii"), Kind(match[2].decode("ascii")), bytes(self._buffer[match.end() : frame_end])
        )
        del self._buffer[:frame_end]
        return frame

    def _find_start(self) -> bool:
        position = 0
        # search, not finditer: its iterator keeps the buffer from being cut.
        while (match := _HEADER.search(self._buffer, position)) is not None:
            position = match.end()
            if self._is_start(match):
                self.nonce = match[1].decode("ascii")
                self._started = True
                self._drop_noise(match.start())
                return True
        # A header may still be arriving in the last bytes; everything before it is noise for good.
        self._drop_noise(max(0, len(self._buffer) - _MAX_HEADER))
        return False

    def _is_start(self, match: re.Match[bytes]) -> bool:
        if self.nonce is None:
            return match[2] == b"request"
        return match[1] == self.nonce.encode("ascii")

    def _drop_noise(self, length: int) -> None:
        self.noise = (self.noise + bytes(self._buffer[:length]))[-self.NOISE_KEPT :]
        del self._buffer[:length]

    def _checked_length(self, match: re.Match[bytes]) -> int:
        # The nonce of an earlier answer, or a forged frame in noise: neither is ours.
        if self.nonce is None or match[1] != self.nonce.encode("ascii"):
            raise FrameError(f"frame of another request: {match[0]!r}")
        try:
            kind = Kind(match[2].decode("ascii"))
        except ValueError:
            raise FrameError(f"unknown frame kind: {match[0]!r}") from None
        length = int(match[3])
        if length > (MAX_DATA if kind is Kind.DATA else MAX_PAYLOAD):
            raise FrameError(f"{kind} frame of {length} bytes is over the bound")
        return length
