"""What makes a process a member of a run, done in its first line: the lock, the pidfile, the bond to the leader. Torch-free."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass

from remote.protocol.errors import DflashError
from remote.protocol.events import AlarmRaised
from remote.protocol.files import write_json
from remote.protocol.identity import ProcessIdentity, write_pidfile
from remote.protocol.layout import RunLayout
from remote.protocol.locks import LockKind, acquire
from remote.protocol.records import RankError
from trainer.pipeline.channel import PeerDied
from trainer.pipeline.watchdog import Stalled
from trainer.telemetry import PhaseLog

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def hold_run_lock(run: RunLayout, *, inheritable: bool = False) -> int:
    """Hold run.lock shared as long as this process lives; `inheritable` keeps it over the leader's exec.

    Python opens descriptors close-on-exec: without this the launcher would run without the lock.
    """
    run.create()
    descriptor = acquire(run.run_lock, LockKind.SHARED)
    os.set_inheritable(descriptor, inheritable)
    return descriptor


def die_with(leader_pid: int) -> None:
    """Let the kernel KILL this process when its parent ends, and end now if that happened before. Raises OSError.

    torch's launcher starts each rank in a session of its own: no group kill reaches a rank whose launcher was killed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != leader_pid:
        sys.exit(f"the leader {leader_pid} ended before this rank began")


def join_run(run: RunLayout, *, rank: int, leader_pid: int) -> int:
    """Join a run as one of its ranks; returns the descriptor that holds the lock."""
    lock = hold_run_lock(run)
    die_with(leader_pid)
    # A bus error (a model file cut short while it is mapped, a disk that fails) or NCCL's abort leaves no record.
    faulthandler.enable(run.stacks(rank).open("w", encoding="utf-8"))
    write_pidfile(run.rank_pid(rank), ProcessIdentity.of())
    return lock


def is_consequence(error: BaseException) -> bool:
    """Whether the loss of another rank ended this one: a pair's socket at its end, or a collective that fell apart.

    By class name and text: torch may not be imported yet, and gloo raises plain RuntimeErrors that name its source files.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"PeerDied", "DistError"}) or "gloo/transport" in str(error)


def file_error(
    run: RunLayout,
    error: BaseException,
    *,
    rank: int,
    role: str,
    device: str,
    phase: str,
    time: float,
    blames: int | None = None,
) -> None:
    """Write errors/rank-N.json: what ended this rank. Where that cannot be written, the log must do."""
    known = error if isinstance(error, DflashError) else None
    record = RankError(
        rank=rank,
        role=role,
        device=device,
        phase=phase,
        kind=type(error).__name__,
        message=known.error if known else str(error),
        traceback=(known.detail if known else "") or "".join(traceback.format_exception(error)),
        time=time,
        cause=known.cause if known else "",
        hint=known.hint if known else "",
        code=int(known.code) if known else 1,
        consequence=is_consequence(error),
        blames=blames,
    )
    try:
        write_json(run.error(rank), record)
    except OSError as problem:
        print(f"{run.error(rank)} cannot be written: {problem.strerror}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Filing:
    """Files what ends a rank under its number, role, device and present phase."""

    run: RunLayout
    rank: int
    local_rank: int
    role: str
    device: str
    phases: PhaseLog

    def file(self, error: BaseException) -> None:
        """Write errors/rank-N.json."""
        blames = error.rank if isinstance(error, PeerDied) else None
        if isinstance(error, Stalled):
            blames = -1 if error.local_rank is None else self.rank - self.local_rank + error.local_rank
        file_error(
            self.run,
            error,
            rank=self.rank,
            role=self.role,
            device=self.device,
            phase=self.phases.current,
            time=time.time(),
            blames=blames,
        )

    def alarm(self, stalled: Stalled) -> AlarmRaised:
        """Return the event that tells of a stall before the run ends."""
        return AlarmRaised(time=time.time(), rank=self.rank, alarm="stall", message=f"{stalled.error}: {stalled.cause}")
