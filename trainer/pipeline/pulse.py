"""What a rank is doing at this moment and when it last got on: all that its watchdog knows of it. Torch-free."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OTHER_DRAFTERS = "the other drafters"

WAIT = "wait_"
"""Stages so named wait for another thread of the rank, which may be waiting for another rank."""

MEETING = "all_reduce"
"""The stage that meets the other drafters; a backward turns to it by itself once its gradients are made."""


@dataclass(frozen=True)
class _Wait:
    thread: str
    whom: str


class Pulse:
    """The stage of a rank, and what its threads wait for. Whatever begins or ends is a sign that the rank gets on.

    Only what waits for another rank says so (`waiting`): a rank that stands still in any other place is itself the cause.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Make it in the main thread, whose stages are the rank's."""
        self._now = now
        self._main = threading.get_ident()
        self._waits: dict[int, _Wait] = {}
        self._lock = threading.Lock()
        self.stage = ""
        """The stage that the main thread is in, "" outside of all."""
        self.moved = now()
        """When the rank last got on, in seconds of the monotonic clock, which all processes of a machine share."""

    def beat(self) -> None:
        """Say that the rank gets on."""
        self.moved = self._now()

    def turn_to(self, stage: str) -> None:
        """Say what the main thread works on from now on."""
        self.stage = stage
        self.beat()

    @contextlib.contextmanager
    def inside(self, stage: str) -> Iterator[None]:
        """Be in a place of the main thread that is no stage of the clock."""
        outer = self.stage
        self.turn_to(stage)
        try:
            yield
        finally:
            self.turn_to(outer)

    @contextlib.contextmanager
    def waiting(self, whom: str) -> Iterator[None]:
        """Be in a place where the calling thread can only wait for another rank, `whom`."""
        thread = threading.get_ident()
        with self._lock:
            outer = self._waits.get(thread)
            self._waits[thread] = _Wait(threading.current_thread().name, whom)
        self.beat()
        try:
            yield
        finally:
            with self._lock:
                del self._waits[thread]
                if outer is not None:
                    self._waits[thread] = outer
            self.beat()

    def awaited(self) -> str:
        """Return for whom the rank waits, "" when it has work of its own to do."""
        with self._lock:
            waits = dict(self._waits)
        main = waits.pop(self._main, None)
        if main is not None:
            return main.whom
        if self.stage == MEETING:
            return OTHER_DRAFTERS
        if not self.stage.startswith(WAIT):
            return ""
        # The main thread waits for one of ours: that one may itself stand still, in a copy for instance.
        return next((each.whom for each in waits.values()), "")

    def doing(self) -> str:
        """Return the stage and what other threads wait for, 'wait_buffer; publisher waits for drafter 0 (rank 1)'; or ""."""
        with self._lock:
            waits = dict(self._waits)
        waits.pop(self._main, None)
        others = [f"{each.thread} waits for {each.whom}" for each in waits.values()]
        return "; ".join(filter(None, [self.stage, *others]))
