"""The processes of a run: found by lock, pidfile with identity, and environment; never by matching a command line."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from remote.agent.environment import RUN_VARIABLE
from remote.protocol.identity import ProcessIdentity, read_pidfile, read_stat
from remote.protocol.layout import RunLayout
from remote.protocol.locks import is_held

_RANK_FILE = re.compile(r"rank-([0-9]{1,6})\.pid")


def recorded_ranks(run: RunLayout) -> dict[int, ProcessIdentity]:
    """Return the identities in ranks/rank-N.pid by rank, dead ones too."""
    try:
        names = [path.name for path in run.rank_pid(0).parent.iterdir()]
    except OSError:
        return {}
    ranks: dict[int, ProcessIdentity] = {}
    for name in names:
        match = _RANK_FILE.fullmatch(name)
        if match and (identity := read_pidfile(run.rank_pid(int(match[1])))) is not None:
            ranks[int(match[1])] = identity
    return ranks


def recorded(run: RunLayout) -> dict[str, ProcessIdentity]:
    """Return the living recorded processes of a run by name: `leader`, `rank N`.

    Pidfiles are believed only while run.lock is held: nobody of the run lives otherwise, whatever they say.
    """
    # After a reboot a pidfile names whoever got the pid; the lock died with the last process.
    if not is_held(run.run_lock):
        return {}
    named = {f"rank {rank}": identity for rank, identity in sorted(recorded_ranks(run).items())}
    leader = read_pidfile(run.trainer_pid)
    if leader is not None:
        named["leader"] = leader
    return {name: identity for name, identity in named.items() if identity.is_alive()}


def carriers(run_id: str) -> list[ProcessIdentity]:
    """Return the living processes that carry this run's id in their environment, but for ourselves.

    The match is on the whole variable between NULs. Finds what left the session, the group and the pidfiles.
    """
    wanted = f"{RUN_VARIABLE}={run_id}".encode("ascii")
    found: list[ProcessIdentity] = []
    for name in [path.name for path in Path("/proc").iterdir()]:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            # The identity comes first: if the pid changes hands while we read, the signal finds a mismatch.
            identity = ProcessIdentity.of(int(name))
            content = Path("/proc", name, "environ").read_bytes()
        except OSError:  # ended meanwhile, or somebody else's: not a process of the run
            continue
        # The whole variable: run ids are prefixes of nothing, but a value may contain anything, newlines too.
        if wanted in content.split(b"\0") and identity.is_alive():
            found.append(identity)
    return found


@dataclass(frozen=True)
class Remains:
    """What of a run still lives. False when nothing does."""

    lock_held: bool
    processes: tuple[ProcessIdentity, ...]

    def __bool__(self) -> bool:
        return self.lock_held or bool(self.processes)

    def describe(self) -> str:
        """Return pids with their state; D is a process that waits for the kernel and cannot be killed."""
        if not self.processes:
            return "a process without a record holds run.lock" if self.lock_held else "nothing"
        return ", ".join(f"pid {process.pid} (state {_state(process.pid)})" for process in self.processes)


def _state(pid: int) -> str:
    stat = read_stat(pid)
    return "gone" if stat is None else stat.state


def remains(run: RunLayout) -> Remains:
    """Look for everything of a run that still lives."""
    # By pid: a rank is both recorded and a carrier.
    found = {identity.pid: identity for identity in (*recorded(run).values(), *carriers(run.run_id))}
    return Remains(is_held(run.run_lock), tuple(found.values()))
