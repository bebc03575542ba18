"""One command at the far end of an ssh connection: both its streams and its input, served from one place."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable

import paramiko

from dflashctl.transport.base import ChannelClosed, Silence
from dflashctl.transport.explain import CONNECTION_LOST
from dflashctl.transport.sshline import Patience

_PIECE = 1 << 18
_STDERR_KEPT = 4096
_MOST_HELD = 16 << 20
"""Bytes taken in while something is sent: from a far end that never stops talking, no more."""
_GLANCE = 0.05
"""Seconds a send waits for room before it looks at what came in: a far end that is full reads nothing until it is emptied."""
_LAST_WORDS = 0.1
_LAST_WORDS_AT_MOST = 1.0
_CLOSE_PATIENCE = 1.0

LOST = (OSError, EOFError, paramiko.SSHException)
"""What paramiko raises once a connection is gone; TimeoutError, an OSError, stands for no progress."""


class SshChannel:
    """A channel whose command was started. `on_silence` hears of a wait that ended without a byte, `on_close` of the end."""

    def __init__(
        self,
        channel: paramiko.Channel,
        patience: Patience,
        on_silence: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._patience = patience
        self._on_silence = on_silence
        self._on_close = on_close
        channel.settimeout(_GLANCE)
        self._selector = selectors.DefaultSelector()
        # Readable whenever either stream has something, or has ended.
        self._selector.register(channel.fileno(), selectors.EVENT_READ)
        self._received = bytearray()
        self._errors = b""
        self._ended = self._closed = False

    def send(self, data: bytes, timeout: float) -> None:
        left = memoryview(data)
        self._patience.seconds = timeout
        deadline = time.monotonic() + timeout
        while left:
            # Taken in, or a far end that cannot get rid of its answer would never read on.
            while len(self._received) < _MOST_HELD and self._take_in():
                pass
            sent = self._send_piece(bytes(left[:_PIECE]))
            if sent:
                left = left[sent:]
                # The time-out counts from the last progress, so that a slow line is no dead one.
                deadline = time.monotonic() + timeout
            elif time.monotonic() > deadline:
                raise self._silence()

    def _send_piece(self, piece: bytes) -> int:
        """Send the beginning of `piece`; returns its length, 0 when there was no room."""
        began = time.monotonic()
        try:
            sent = self._channel.send(piece)
        except TimeoutError:
            return 0
        except LOST:
            # Either the far end closed the channel, or the line below took nothing for the whole time-out.
            if time.monotonic() - began >= self._patience.seconds:
                raise self._silence() from None
            raise ChannelClosed from None
        if not sent:
            raise ChannelClosed
        return sent

    def finish(self) -> None:
        # If the connection is gone, whoever reads on sees that.
        with contextlib.suppress(*LOST):
            self._channel.shutdown_write()

    def receive(self, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while not self._received and not self._ended:
            if (
                not self._take_in()
                and not self._ended
                and not self._selector.select(max(deadline - time.monotonic(), 0))
            ):
                raise self._silence()
        data = bytes(self._received)
        self._received.clear()
        return data

    def _take_in(self) -> bool:
        """Take what is there of both streams without waiting; return whether stdout had something."""
        # In this order: all data came before the end was noted, so an empty buffer after it is really empty.
        is_over = bool(self._channel.eof_received or self._channel.closed)
        try:
            while self._channel.recv_stderr_ready():
                self._errors = (self._errors + self._channel.recv_stderr(_PIECE))[-_STDERR_KEPT:]
            if self._channel.recv_ready():
                self._received += self._channel.recv(_PIECE)
                return True
        except LOST:
            # The far end could not be told that there is room again: nothing more will come.
            is_over = True
        self._ended = self._ended or is_over
        return False

    def _silence(self) -> Silence:
        self._on_silence()
        return Silence()

    def diagnostics(self) -> str:
        # What a dying command said last may still be on its way. Bounded twice: it may say nothing, or never stop talking.
        deadline = time.monotonic() + _LAST_WORDS_AT_MOST
        while not self._closed and not self._ended and time.monotonic() < deadline:
            if not self._take_in() and not self._ended and not self._selector.select(_LAST_WORDS):
                break
        said = self._errors.decode("utf-8", errors="replace").strip()
        return f"{said}\n{CONNECTION_LOST}".lstrip() if self._is_lost else said

    @property
    def _is_lost(self) -> bool:
        # An sshd says that the output has ended, and how the command did, before it closes a channel.
        ended = self._channel.eof_received or self._channel.exit_status >= 0
        return self._ended and not ended and not self._closed

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._selector.close()
        self._patience.seconds = _CLOSE_PATIENCE
        with contextlib.suppress(*LOST):
            self._channel.close()
        self._on_close()
