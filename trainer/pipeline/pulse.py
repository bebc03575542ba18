"""What a rank is doing at this moment and when it last got on: all that its watchdog knows of it. Torch-free."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

WAIT = "wait_"
"""Stages so named wait for another thread of the rank, which may be waiting for another rank."""


@dataclass(frozen=True)
class _Activity:
    what: str
    whom: str = ""


class Pulse:
    """The open stages and waits of a rank, by thread. Whatever begins or ends is a sign that the rank gets on.

    Only what waits for another rank says so (`waiting`): a rank that stands still in any other place is itself the cause.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Make it in the main thread, whose stages are the rank's."""
        self._now = now
        self._main = threading.get_ident()
        self._open: dict[int, list[_Activity]] = {}
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()
        self.moved = now()
        """When the rank last got on, in seconds of the monotonic clock, which all processes of a machine share."""

    def beat(self) -> None:
        """Say that the rank gets on."""
        self.moved = self._now()

    def stage(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the calling thread works on `name`."""
        return self._during(_Activity(name))

    def waiting(self, whom: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the calling thread can only wait for another rank, `whom`."""
        return self._during(_Activity(f"waits for {whom}", whom))

    @contextlib.contextmanager
    def _during(self, activity: _Activity) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            self._names[thread] = threading.current_thread().name
            self._open.setdefault(thread, []).append(activity)
        self.beat()
        try:
            yield
        finally:
            with self._lock:
                self._open[thread].pop()
            self.beat()

    def _innermost(self) -> dict[int, _Activity]:
        with self._lock:
            return {thread: stack[-1] for thread, stack in self._open.items() if stack}

    def awaited(self) -> str:
        """Return for whom the rank waits, "" when it has work of its own to do."""
        innermost = self._innermost()
        main = innermost.pop(self._main, None)
        if main is None or main.whom:
            return main.whom if main else ""
        if not main.what.startswith(WAIT):
            return ""
        # The main thread waits for one of ours: that one may itself stand still, in a copy for instance.
        return next((each.whom for each in innermost.values() if each.whom), "")

    def doing(self) -> str:
        """Return the innermost stage of each thread, the main one first: 'wait_buffer; publisher: waits for drafter 0'."""
        innermost = self._innermost()
        main = innermost.pop(self._main, None)
        others = [f"{self._names[thread]}: {each.what}" for thread, each in innermost.items()]
        return "; ".join([main.what if main else "between two stages", *others])
