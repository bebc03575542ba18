"""Progress of long preparation verbs on stderr: a bar where a person looks, else a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from typing import Self

_BAR_CELLS = 24
# Often enough to look alive, seldom enough to cost nothing.
_BAR_EVERY_S = 0.2


class Progress:
    """Counts items and tokens inside a with block, whose end says the last line.

    With a `total` of items, or with the share that the caller knows, there is an estimate too.
    """

    def __init__(self, what: str, total: int | None = None, *, every_s: float = 5.0) -> None:
        self._what = what
        self._total = total
        self._live = sys.stderr.isatty()
        self._every_s = min(every_s, _BAR_EVERY_S) if self._live else every_s
        self._started = self._said = time.monotonic()
        self._items = 0
        self._tokens = 0
        self._share: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.say()
        if self._live:
            print(file=sys.stderr)

    def add(self, items: int, tokens: int, *, share: float | None = None) -> None:
        """Count, and say so when the last line is old enough; `share` of the work is 0..1, by default that of items."""
        self._items += items
        self._tokens += tokens
        self._share = self._items / self._total if share is None and self._total else share
        if time.monotonic() - self._said >= self._every_s:
            self.say()

    def say(self) -> None:
        """Print the line now."""
        self._said = time.monotonic()
        elapsed = max(self._said - self._started, 1e-9)
        of_total = "" if self._total is None else f"/{self._total}"
        line = (
            f"{self._what}: {self._items}{of_total} rows, {self._tokens:,} tokens, {self._tokens / elapsed:,.0f} tok/s"
        )
        if self._share is not None and 0 < self._share < 1:
            line += f", {elapsed * (1 - self._share) / self._share:,.0f} s left"
        if self._live:
            # The escape clears what a longer line before left behind.
            print(f"\r{self._bar()}{line}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _bar(self) -> str:
        if self._share is None:
            return ""
        done = round(min(self._share, 1) * _BAR_CELLS)
        return f"{'━' * done}{'─' * (_BAR_CELLS - done)} {min(self._share, 1):4.0%} "
