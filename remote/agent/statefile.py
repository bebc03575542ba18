"""state.json as its one writer keeps it: in memory first, on disk as soon as the disk lets it."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from remote.protocol.files import write_json
from remote.protocol.layout import RunLayout
from remote.protocol.records import Alarm, Lifecycle, RunState

_WRITE_SECONDS = 1.0
_MOST_KINDS = 100


class StateFile:
    """The state of a run. A full disk never ends the writer: the previous file stays readable, and this one retries."""

    def __init__(self, run: RunLayout, state: RunState) -> None:
        self._path = run.state
        self._next_write = 0.0
        self._dirty = True
        self._alarmed_at: dict[str, int] = {}
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

    def note(self, **values: Any) -> None:
        """Replace fields of the state that may change at every step: they reach the disk with the next write."""
        changed = dataclasses.replace(self.state, **values)
        if changed != self.state:
            self.state = changed
            self._dirty = True
            self.flush()

    def alarm(self, kind: str, message: str, step: int = 0) -> None:
        """Note an alarm, once per kind and step; a further one of its kind replaces the message and is counted."""
        if self._alarmed_at.get(kind) == step:
            return
        self._alarmed_at[kind] = step
        old = next((alarm for alarm in self.state.alarms if alarm.kind == kind), None)
        if old is None:
            # The kinds are the trainer's words: a bound, far above what any trainer has, keeps a broken one harmless.
            if len(self.state.alarms) < _MOST_KINDS:
                self.change(alarms=(*self.state.alarms, Alarm(kind, message, time.time(), step)))
            return
        # By kind: one that comes at every step must not crowd out a later one of another kind.
        again = dataclasses.replace(old, message=message, count=old.count + 1)
        alarms = tuple(again if alarm is old else alarm for alarm in self.state.alarms)
        self.state = dataclasses.replace(self.state, alarms=alarms)
        # Not at once, unlike the first of its kind: a write at every step would wait for the disk all day.
        self._dirty = True
        self.flush()

    def flush(self, *, now: bool = False) -> None:
        """Write what is not on disk yet, at most once a second unless `now`."""
        if not self._dirty or (not now and time.monotonic() < self._next_write):
            return
        try:
            write_json(self._path, self.state)
            self._dirty = False
        except OSError as error:
            # In memory only: alarm() would try to write it, here, where writing fails.
            if not any(old.kind == "state_unwritten" for old in self.state.alarms):
                alarm = Alarm("state_unwritten", f"state.json could not be written: {error.strerror}", time.time())
                self.state = dataclasses.replace(self.state, alarms=(*self.state.alarms, alarm))
        # From the end of the write: one that takes longer than the pause must not be followed by the next at once.
        self._next_write = time.monotonic() + _WRITE_SECONDS
