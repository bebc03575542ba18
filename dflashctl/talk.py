"""Progress of a verb on stderr, line by line: what the far end does while somebody waits."""

from __future__ import annotations

import time
from typing import Any

from dflashctl.console import ERR, harmless
from dflashctl.views import event_text
from remote.protocol import events
from remote.protocol.codec import dumps

_PAUSE = 5.0
"""Seconds between two lines about the same work where lines cannot be redrawn."""

# Eight GPUs run hundreds of shapes before the first step.
_MOVING = (events.SaveProgress, events.WarmedUp)


class Talk:
    """Shows event frames as they come and keeps the latest of each kind."""

    def __init__(self) -> None:
        self.latest: dict[type[events.Event], events.Event] = {}
        self._begun = time.monotonic()
        self._moved = -_PAUSE
        self._redrawing = False

    def __call__(self, data: dict[str, Any]) -> None:
        """Take one event frame; unknown kinds of a newer far end are skipped."""
        # Back through the codec, so that "NaN" and missing fields are judged in one place.
        try:
            event = events.decode(dumps(data))
        except ValueError:
            return
        if event is None:
            return
        self.latest[type(event)] = event
        text = event_text(event)
        if isinstance(event, _MOVING):
            self._redraw(text)
        elif text:
            self.say(text, alarm=isinstance(event, events.AlarmRaised))

    def say(self, text: str, *, alarm: bool = False) -> None:
        """Write one line with the seconds since the verb began."""
        self._clear()
        ERR.line(self._stamped(ERR.style(harmless(text), "red bold") if alarm else harmless(text)))

    def _redraw(self, text: str) -> None:
        """Show a figure that moves: in place on a terminal, now and then elsewhere."""
        if ERR.live:
            ERR.file.write(f"\r\x1b[K{self._stamped(harmless(text))}")
            ERR.file.flush()
            self._redrawing = True
        elif time.monotonic() - self._moved >= _PAUSE:
            self._moved = time.monotonic()
            self.say(text)

    def _clear(self) -> None:
        if self._redrawing:
            ERR.file.write("\r\x1b[K")
            self._redrawing = False

    def _stamped(self, text: str) -> str:
        return f"{ERR.style(f'{time.monotonic() - self._begun:7.1f} s', 'dim')}  {text}"
