"""Waiting for processes without polling: a pidfd of the leader and of every recorded rank."""

from __future__ import annotations

import os
import select
import time

from remote.agent.processes import recorded_ranks
from remote.protocol.identity import ProcessIdentity
from remote.protocol.layout import RunLayout


class Watch:
    """Notices which rank vanished first. Close it: `with` does.

    Descriptors wake us within milliseconds, and losing a peer takes longer than that to end the next rank, so the order is
    the true one.
    """

    def __init__(self, run: RunLayout, leader: ProcessIdentity) -> None:
        self.first_dead: int | None = None
        self.first_dead_at = 0.0
        self._run = run
        self._poller = select.poll()
        self._leader_fd = os.pidfd_open(leader.pid)
        self._poller.register(self._leader_fd, select.POLLIN)
        self._ranks: dict[int, int] = {}
        self._seen: set[ProcessIdentity] = set()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in (self._leader_fd, *self._ranks):
            os.close(descriptor)

    def wait(self, seconds: float) -> bool:
        """Wait until a process ends, at most `seconds`. Returns whether the leader has ended."""
        # Ranks appear one by one while the launcher starts them; a listing of a few files costs microseconds.
        self._open_new_ranks()
        ready = {descriptor for descriptor, _ in self._poller.poll(seconds * 1000)}
        # On a busy machine several at once: a rank that filed its error is told of by that.
        ranks = sorted(ready - {self._leader_fd}, key=lambda each: self._run.error(self._ranks[each]).exists())
        for descriptor in ranks:
            rank = self._ranks.pop(descriptor)
            # An ended process stays readable for ever: the loop would spin.
            self._poller.unregister(descriptor)
            os.close(descriptor)
            self._note(rank)
        return self._leader_fd in ready

    def _open_new_ranks(self) -> None:
        for rank, identity in recorded_ranks(self._run).items():
            if identity in self._seen:
                continue
            self._seen.add(identity)
            try:
                descriptor = os.pidfd_open(identity.pid)
            except ProcessLookupError:
                self._note(rank)
                continue
            # Opened too late: another process may have the pid by now.
            if not identity.is_alive():
                os.close(descriptor)
                self._note(rank)
                continue
            self._ranks[descriptor] = rank
            self._poller.register(descriptor, select.POLLIN)

    def _note(self, rank: int) -> None:
        """A rank that ends well removes its pidfile as its last act; one that is still there ended otherwise."""
        if self.first_dead is None and self._run.rank_pid(rank).exists():
            self.first_dead, self.first_dead_at = rank, time.time()


def oom_kills() -> int:
    """Return how many processes of our cgroup the kernel has killed for memory; 0 where that is not to be known."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as file:
            # cgroup v2 has one line, `0::/path`; inside a container the path is relative to its own root.
            path = next((line[3:].strip() for line in file if line.startswith("0::")), "/")
        with open(f"/sys/fs/cgroup{path.rstrip('/')}/memory.events", encoding="ascii") as file:
            counts = dict(line.split() for line in file)
        return int(counts.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
