"""How far a load is: a beat for the watchdog, and a line now and then for whoever waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer.pipeline.pulse import Pulse

_SECONDS = 10.0
_GB = 1e9


class LoadProgress:
    """Told (bytes read, bytes in all); a load of less than ten seconds says nothing."""

    def __init__(
        self, what: str, pulse: Pulse, say: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = what
        self._pulse = pulse
        self._say = say
        self._now = now
        self._said = now()

    def __call__(self, read: int, total: int) -> None:
        self._pulse.beat()
        if self._now() - self._said >= _SECONDS:
            self._said = self._now()
            self._say(f"{self._what}: {read / _GB:.1f} of {total / _GB:.1f} GB read")
