"""A destination in this process, for tests: a handler plays the far end and answers with bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from dflashctl.transport.base import ChannelClosed, Finding, Silence
from remote.protocol.errors import DflashError

Handler = Callable[[Sequence[str], bytes], Iterable[bytes | Exception]]
"""Gets argv and the input sent so far when the client begins to read; yields pieces of the answer, or an exception to raise."""


class MemoryChannel:
    """Keeps what was sent and plays what the handler yields. A handler that reads on later sees `sent` grow."""

    def __init__(self, handler: Handler, argv: Sequence[str]) -> None:
        self.argv = list(argv)
        self.sent = bytearray()
        self.finished = False
        self.closed = False
        self.stderr = ""
        self._handler = handler
        self._answer: Iterator[bytes | Exception] | None = None

    def send(self, data: bytes, timeout: float) -> None:
        if self.finished:
            raise ChannelClosed
        self.sent += data

    def finish(self) -> None:
        self.finished = True

    def receive(self, timeout: float) -> bytes:
        if self._answer is None:
            self._answer = iter(self._handler(self.argv, bytes(self.sent)))
        piece = next(self._answer, b"")
        if isinstance(piece, Exception):
            raise piece
        return piece

    def diagnostics(self) -> str:
        return self.stderr

    def close(self) -> None:
        self.closed = True


class Memory:
    """Opens MemoryChannels and remembers them all."""

    name = "memory"

    def __init__(self, handler: Handler, *, stderr: str = "", user: str = "root") -> None:
        self.channels: list[MemoryChannel] = []
        self.user = user
        self._handler = handler
        self._stderr = stderr

    def open(self, argv: Sequence[str]) -> MemoryChannel:
        channel = MemoryChannel(self._handler, argv)
        channel.stderr = self._stderr
        self.channels.append(channel)
        return channel

    def explain(self, said: str, *, silent: bool = False) -> DflashError | None:
        """No hop, nothing to explain."""

    def examine(self) -> Iterator[Finding]:
        yield from ()

    def close(self) -> None:
        """Nothing is held."""


__all__ = ["Handler", "Memory", "MemoryChannel", "Silence"]
