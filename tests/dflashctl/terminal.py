"""A pseudo-terminal to run a command on, as a person would see it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path


def on_terminal(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    columns: int = 120,
    typed: str | None = None,
) -> tuple[int, str]:
    """Run `command` with stdout on a terminal; return its exit code and what the terminal got.

    With `typed`, which is there before it asks, stdin and stderr are the terminal as well.
    """
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    stdin, stderr = (None, subprocess.DEVNULL) if typed is None else (theirs, theirs)
    if typed is not None:
        os.write(mine, typed.encode())
    with subprocess.Popen(
        command, stdin=stdin, stdout=theirs, stderr=stderr, env=dict(environment), cwd=directory
    ) as process:
        os.close(theirs)
        seen = b""
        try:
            while piece := os.read(mine, 1 << 16):
                seen += piece
        except OSError:  # Linux says EIO where the last writer has gone
            pass
        os.close(mine)
    return process.returncode, seen.decode("utf-8", errors="replace")
