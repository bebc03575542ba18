"""Terminals: which stream is one, what may be written to it, and colours. The only module that reads NO_COLOR and TERM."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from typing import TextIO

_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}

# C0 and C1 control characters but the tab: a log may hold escape sequences, which must not drive the operator's terminal.
_HARMLESS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 9}

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""What a write to a full disk, or over one's quota, fails with."""


class Stream:
    """stdout or stderr, looked up at each use so that a test may replace it."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def file(self) -> TextIO:
        """The text stream itself."""
        return getattr(sys, self._name)

    @property
    def live(self) -> bool:
        """Whether colours and moving bars are welcome. FORCE_COLOR does not bring them back where they are not."""
        return self.file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"

    def line(self, text: str = "") -> None:
        """Write one line and flush it: a reader behind a pipe sees it now. Raises BrokenPipeError when he has gone.

        Talk that finds no room (a full disk under stderr) is dropped: it must not end the work it tells of.
        """
        try:
            self.file.write(text + "\n")
            self.file.flush()
        except OSError as error:
            if self._name != "stderr" or error.errno not in NO_ROOM:
                raise
            self.silence()

    def raw(self, data: bytes) -> None:
        """Write bytes untouched and flush."""
        self.file.flush()
        self.file.buffer.write(data)
        self.file.buffer.flush()

    def silence(self) -> None:
        """Point the stream at nothing once it takes no more, so that the interpreter's last flush does not complain."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    def style(self, text: str, styles: str) -> str:
        """Return `text` in `styles` ("red bold"), or as it is where the stream is not live."""
        if not self.live or not text:
            return text
        codes = ";".join(str(_CODES[style]) for style in styles.split())
        return f"\x1b[{codes}m{text}\x1b[0m"


OUT = Stream("stdout")
ERR = Stream("stderr")


def width() -> int:
    """Return the columns there are, between 40 and 120: longer lines read badly."""
    return min(max(shutil.get_terminal_size().columns, 40), 120)


def one_line(text: str) -> str:
    """Return `text` for a cell of a table or one line of a card: control characters shown, the tab among them."""
    return harmless(text.replace("\t", "\\t"))


def harmless(text: str) -> str:
    """Return `text` with control characters shown instead of obeyed."""
    return text.translate(_HARMLESS)
