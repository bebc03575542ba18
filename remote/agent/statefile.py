"""state.json as its one writer keeps it: in memory first, on disk as soon as the disk lets it."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from remote.protocol.files import write_json
from remote.protocol.layout import RunLayout
from remote.protocol.records import Alarm, Lifecycle, RunState

_RETRY_SECONDS = 1.0


class StateFile:
    """The state of a run. A full disk never ends the writer: the previous file stays readable, and this one retries."""

    def __init__(self, run: RunLayout, state: RunState) -> None:
        self._path = run.state
        self._retry_at = 0.0
        self._dirty = True
        self.state = state
        self.flush()

    def change(self, **values: Any) -> None:
        """Replace fields of the state and write it."""
        changed = dataclasses.replace(self.state, **values)
        # A write is an fsync: 5 to 50 ms on a busy disk, and we are asked four times a second.
        if changed != self.state:
            self.state = changed
            self._dirty = True
            self.flush(now=True)

    def enter(self, state: Lifecycle) -> None:
        """Change the lifecycle state; `since` is the wall clock's, for people."""
        if self.state.state != state:
            self.change(state=str(state), since=time.time())

    def alarm(self, kind: str, message: str, step: int = 0) -> None:
        """Add an alarm, once per kind and step."""
        if any(old.kind == kind and old.step == step for old in self.state.alarms):
            return
        alarm = Alarm(kind=kind, message=message, time=time.time(), step=step)
        # A run that alarms at every step keeps the first ones: they show where it began.
        if len(self.state.alarms) < 100:
            self.change(alarms=(*self.state.alarms, alarm))

    def flush(self, *, now: bool = False) -> None:
        """Write what is not on disk yet, at most once a second unless `now`."""
        if not self._dirty or (not now and time.monotonic() < self._retry_at):
            return
        try:
            write_json(self._path, self.state)
            self._dirty = False
        except OSError as error:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            # In memory only: alarm() would try to write it, here, where writing fails.
            if not any(old.kind == "state_unwritten" for old in self.state.alarms):
                alarm = Alarm("state_unwritten", f"state.json could not be written: {error.strerror}", time.time())
                self.state = dataclasses.replace(self.state, alarms=(*self.state.alarms, alarm))
