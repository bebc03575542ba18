"""Progress of long preparation verbs: one plain line on stderr every few seconds, so that logs stay readable."""

from __future__ import annotations

import sys
import time


class Progress:
    """Counts items and tokens; with a `total` of items the line has an estimate too."""

    def __init__(self, what: str, total: int | None = None, *, every_s: float = 5.0) -> None:
        self._what = what
        self._total = total
        self._every_s = every_s
        self._started = self._said = time.monotonic()
        self._items = 0
        self._tokens = 0

    def add(self, items: int, tokens: int) -> None:
        """Count, and say so when the last line is old enough."""
        self._items += items
        self._tokens += tokens
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
        if self._total is not None and 0 < self._items < self._total:
            line += f", {elapsed * (self._total - self._items) / self._items:,.0f} s left"
        print(line, file=sys.stderr, flush=True)
