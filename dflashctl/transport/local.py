"""This very machine: an agent is a child process on three pipes. Linux only, like the far end itself."""

from __future__ import annotations

import os
import pwd
import selectors
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import IO

from dflashctl.errors import NoProgram
from dflashctl.transport.base import ChannelClosed, Finding, Silence
from remote.protocol.errors import DflashError

# A pipe holds 64 KiB on Linux: one read empties it, and more than that is never written at once.
_PIECE = 1 << 16
_STDERR_KEPT = 4096
_LAST_WORDS = 0.1
_LAST_WORDS_AT_MOST = 1.0
_CLOSE_PATIENCE = 2.5
"""Seconds a child gets to end by itself after its pipes were closed."""


class LocalChannel:
    """A child process. All three pipes are served by one selector, so a full one never blocks the others."""

    def __init__(self, argv: Sequence[str]) -> None:
        # A session of its own: Ctrl-C at the terminal interrupts this client, never the agent in the middle of a launch.
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        self._stdin: IO[bytes] | None = self._process.stdin
        self._stdout, self._stderr = self._process.stdout, self._process.stderr
        self._selector = selectors.DefaultSelector()
        for pipe in (self._stdout, self._stderr):
            self._selector.register(pipe, selectors.EVENT_READ)
        # Only stdin: a write of 64 KiB into a pipe that has room for one byte would block in spite of the selector.
        os.set_blocking(self._process.stdin.fileno(), False)
        self._received = bytearray()
        self._errors = b""
        self._ended = False

    def send(self, data: bytes, timeout: float) -> None:
        left = memoryview(data)
        deadline = time.monotonic() + timeout
        while left:
            stdin = self._stdin
            if stdin is None:
                raise ChannelClosed
            # Registered only while there is something to send: an empty pipe is always ready, and receive would spin.
            self._selector.register(stdin, selectors.EVENT_WRITE)
            try:
                writable = self._pump(deadline - time.monotonic())
            finally:
                self._selector.unregister(stdin)
            if writable:
                left = left[self._write(stdin, left[:_PIECE]) :]
                # The time-out counts from the last progress, so that a slow line is no dead one.
                deadline = time.monotonic() + timeout

    def _write(self, stdin: IO[bytes], piece: memoryview) -> int:
        try:
            return os.write(stdin.fileno(), piece)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            self.finish()
            raise ChannelClosed from None

    def finish(self) -> None:
        if self._stdin is not None:
            self._stdin.close()
            self._stdin = None

    def receive(self, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while not self._received and not self._ended:
            self._pump(deadline - time.monotonic())
        data = bytes(self._received)
        self._received.clear()
        return data

    def _pump(self, timeout: float) -> bool:
        """Take in whatever is there, waiting up to `timeout`; return whether stdin can be written."""
        ready = self._selector.select(max(timeout, 0))
        if not ready:
            raise Silence
        writable = False
        for key, _ in ready:
            if key.fileobj is self._stdin:
                writable = True
            else:
                self._take(key.fd, is_stdout=key.fileobj is self._stdout)
        return writable

    def _take(self, descriptor: int, *, is_stdout: bool) -> None:
        data = os.read(descriptor, _PIECE)
        if not data:
            self._selector.unregister(self._stdout if is_stdout else self._stderr)
            self._ended = self._ended or is_stdout
        elif is_stdout:
            self._received += data
        else:
            self._errors = (self._errors + data)[-_STDERR_KEPT:]

    def diagnostics(self) -> str:
        # What a dying child said last may still lie in the pipe. Bounded twice: a grandchild may hold the pipe open and
        # say nothing, and a child may never stop talking.
        deadline = time.monotonic() + _LAST_WORDS_AT_MOST
        while time.monotonic() < deadline and self._stderr_ready():
            self._take(self._stderr.fileno(), is_stdout=False)
        return self._errors.decode("utf-8", errors="replace").strip()

    def _stderr_ready(self) -> bool:
        return any(key.fileobj is self._stderr for key, _ in self._selector.select(_LAST_WORDS))

    def close(self) -> None:
        if self._process.returncode is not None:
            return
        # With its pipes gone an agent ends by itself: its next heartbeat, two seconds at most, finds nobody.
        self.finish()
        self._selector.close()
        self._stdout.close()
        self._stderr.close()
        try:
            self._process.wait(_CLOSE_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Local:
    """Runs agents on this machine."""

    name = "local"

    @property
    def user(self) -> str:
        """Who runs what is opened here; an id without a name as sudoers writes it, `#1000`."""
        if os.geteuid() == 0:
            return "root"
        try:
            return pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            return f"#{os.geteuid()}"

    def open(self, argv: Sequence[str]) -> LocalChannel:
        try:
            return LocalChannel(argv)
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise NoProgram(
                f"cannot run {argv[0]} on this machine",
                cause=error.strerror or str(error),
                hint="name a Python 3.11 or newer with --python PATH",
            ) from error

    def explain(self, said: str, *, silent: bool = False) -> DflashError | None:
        """There is no hop between this process and the agent: what it said last is the agent's own."""

    def examine(self) -> Iterator[Finding]:
        yield from ()

    def close(self) -> None:
        """Nothing is kept open between calls."""
