"""Ending a run that was asked to: wait for its own end, then TERM to the leader, then KILL to all that is left.

Shared by the supervisor and by a stop verb that stands in for a dead one.
"""

from __future__ import annotations

import signal
import time
from enum import IntEnum

from remote.agent.processes import recorded, remains
from remote.protocol.events import CheckpointSaved, Event, SaveProgress
from remote.protocol.identity import ProcessIdentity
from remote.protocol.layout import RunLayout

_SWEEP_SECONDS = 0.5


class Stage(IntEnum):
    """How far an escalation went."""

    MESSAGE = 0
    TERM = 1
    KILL = 2


class Escalation:
    """Call `tick` often. All waits are on the monotonic clock, so a jump of the wall clock neither hurries nor delays."""

    def __init__(self, run: RunLayout, grace: float, kill_grace: float, leader: ProcessIdentity | None = None) -> None:
        self.stage = Stage.MESSAGE
        self._run = run
        self._leader = leader
        self._kill_grace = kill_grace
        self._grace = grace
        # The request carries a wall clock deadline too; that one is for the ranks to show, not for us to obey.
        self._deadline = time.monotonic() + grace
        self._next_sweep = 0.0

    def progress(self, events: list[Event]) -> None:
        """Start the grace anew when a checkpoint is being written: 24 GB on a slow disk must not be cut off."""
        if self.stage is Stage.MESSAGE and any(isinstance(event, SaveProgress | CheckpointSaved) for event in events):
            self._deadline = time.monotonic() + self._grace

    def hasten(self, grace: float) -> None:
        """Shorten the grace: a later stop was more urgent."""
        if self.stage is Stage.MESSAGE and grace < self._grace:
            self._grace = grace
            self._deadline = min(self._deadline, time.monotonic() + grace)

    def tick(self) -> str:
        """Take the next step when it is due. Returns what was done now, "" when nothing new was."""
        now = time.monotonic()
        if self.stage is Stage.MESSAGE and now >= self._deadline:
            self.stage = Stage.TERM
            self._deadline = now + self._kill_grace
            return self._terminate()
        if self.stage is Stage.TERM and now >= self._deadline:
            self.stage = Stage.KILL
            return self._kill()
        # A process may fork while we kill: sweep until nothing is found, twice a second.
        if self.stage is Stage.KILL and now >= self._next_sweep:
            return self._kill()
        return ""

    def _terminate(self) -> str:
        """TERM goes to the leader alone: the launcher passes it on to every rank at once."""
        processes = recorded(self._run)
        # Our own child needs no pidfile; a stand-in has only the pidfile, and that only while run.lock is held.
        leader = self._leader or processes.get("leader")
        if leader is not None and leader.send(signal.SIGTERM):
            return f"no progress for {self._grace:g} s: sent TERM to the leader, pid {leader.pid}"
        # The launcher is dead, so nobody passes it on.
        reached = [name for name, process in processes.items() if process.send(signal.SIGTERM)]
        return f"no leader lives: sent TERM to {', '.join(reached) or 'nobody'}"

    def _kill(self) -> str:
        self._next_sweep = time.monotonic() + _SWEEP_SECONDS
        killed = kill_all(self._run)
        # Also when it took no lock and carries no variable: it is our child.
        if self._leader is not None and self._leader.send(signal.SIGKILL):
            killed.append(self._leader.pid)
        return f"sent KILL to pid {', '.join(str(pid) for pid in sorted(set(killed)))}" if killed else ""


def kill_all(run: RunLayout) -> list[int]:
    """KILL every living process of a run, recorded or found by its environment; returns the pids reached.

    One signal each through its own pidfd: ranks have sessions of their own, so a group kill reaches none of them.
    """
    return [process.pid for process in remains(run).processes if process.send(signal.SIGKILL)]
