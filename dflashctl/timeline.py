"""How long each part of a start took, from the far end's own clock: its events carry it."""

from __future__ import annotations

import itertools
from typing import Any

from remote.protocol import events
from remote.protocol.codec import dumps

_VERB_PHASES = {"stopped": "stop", "selfcheck": "selfcheck", "preflight": "preflight"}


class Timeline:
    """Hears the event frames of a start or restart up to its first step; `parts` are what they tell, no more.

    An answer that was asked for again lacks what the lost one told: a part without its beginning is left out.
    """

    def __init__(self) -> None:
        self._measured: dict[str, float] = {}
        self._launched: float | None = None
        self._loaded: float | None = None
        self._training: float | None = None
        self._stepped: float | None = None

    def hear(self, data: dict[str, Any]) -> None:
        """Take one event frame; what is no event is skipped."""
        try:
            event = events.decode(dumps(data))
        except ValueError:
            return
        if isinstance(event, events.Step) and self._stepped is None:
            self._stepped = event.time
        elif isinstance(event, events.Phase) and event.role == "agent":
            self._hear_verb(event)
        elif isinstance(event, events.Phase):
            self._hear_rank(event)

    def _hear_verb(self, event: events.Phase) -> None:
        if event.phase == "launched" and self._launched is None:
            self._launched = event.time
            # What was heard so far were the last events of the run that made room.
            self._loaded = self._training = self._stepped = None
        elif event.phase in _VERB_PHASES and event.seconds:
            self._measured[_VERB_PHASES[event.phase]] = event.seconds

    def _hear_rank(self, event: events.Phase) -> None:
        # Each rank loads; the last one to end is what all wait for, and the first to train ends the warm-up.
        if event.phase == "loading" and event.seconds:
            self._loaded = event.time
        elif event.phase == "training" and self._training is None:
            self._training = event.time

    def parts(self) -> dict[str, float]:
        """Return the seconds of stop, selfcheck, preflight, load, warm-up and first step, as far as they are known."""
        marks = [
            ("", self._launched),
            ("load", self._loaded),
            ("warm-up", self._training),
            ("first step", self._stepped),
        ]
        order = ("selfcheck", "preflight", "stop")
        found = {name: self._measured[name] for name in order if name in self._measured}
        known = [(name, time) for name, time in marks if time is not None]
        for (_, begun), (name, ended) in itertools.pairwise(known):
            # A launch that was told anew is later than what it began.
            if self._launched is not None and ended >= begun >= self._launched:
                found[name] = ended - begun
        return found
