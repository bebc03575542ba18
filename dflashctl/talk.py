"""Progress of a verb on stderr, line by line: what the far end does while somebody waits."""

from __future__ import annotations

import time
from typing import Any

from dflashctl.console import ERR, harmless
from dflashctl.views import event_text
from remote.protocol import events
from remote.protocol.codec import dumps


class Talk:
    """Shows event frames as they come and keeps the latest of each kind."""

    def __init__(self) -> None:
        self.latest: dict[type[events.Event], events.Event] = {}
        self._begun = time.monotonic()

    def __call__(self, data: dict[str, Any]) -> None:
        """Take one event frame; unknown kinds of a newer far end are skipped."""
        try:
            event = events.decode(dumps(data))
        except ValueError:
            return
        if event is None:
            return
        self.latest[type(event)] = event
        if text := event_text(event):
            self.say(text, alarm=isinstance(event, events.AlarmRaised))

    def say(self, text: str, *, alarm: bool = False) -> None:
        """Write one line with the seconds since the verb began."""
        stamp = ERR.style(f"{time.monotonic() - self._begun:7.1f} s", "dim")
        ERR.line(f"{stamp}  {ERR.style(harmless(text), 'red bold') if alarm else harmless(text)}")
