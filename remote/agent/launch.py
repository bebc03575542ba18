"""Launching a supervisor so that nothing ties it to us: its session, its descriptors, its environment are its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from remote.agent.environment import base_environment
from remote.agent.tail import last_lines
from remote.protocol.errors import DflashError
from remote.protocol.identity import read_pidfile
from remote.protocol.layout import RunLayout

_LAUNCH_SECONDS = 10.0


def launch_supervisor(run: RunLayout, release: Path, sup_lock: int) -> None:
    """Start `agent.pyz supervise` of a release for a run and wait until it lives on its own.

    `sup_lock` holds the run's sup.lock; the supervisor inherits the descriptor, so the lock is never free between us and
    it. Raises DflashError when it does not come to life.
    """
    command = [sys.executable, "-I", str(release / "agent.pyz"), "supervise", str(run.path), str(sup_lock)]
    with run.supervisor_log.open("ab") as output:
        # The first process is a session leader that forks the supervisor and ends: double fork, no terminal ever.
        first = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Without DFLASH_RUN_ID: the sweep of a stop must never find the supervisor.
            env=base_environment(sys.executable),
            # It must not keep a file system busy that somebody wants to unmount.
            cwd="/",
            start_new_session=True,
            pass_fds=(sup_lock,),
        )
        code = _wait(first)
    deadline = time.monotonic() + _LAUNCH_SECONDS
    # code 0: it has forked; the child writes its pidfile as its first act.
    while code == 0 and read_pidfile(run.supervisor_pid) is None and time.monotonic() < deadline:
        time.sleep(0.005)
    # It may have died right after the fork, of a broken interpreter for instance; its log has the traceback.
    if read_pidfile(run.supervisor_pid) is None:
        raise DflashError(
            "the supervisor did not start",
            cause=f"`{' '.join(command[:4])}` ended with code {code}",
            hint=f"see {run.supervisor_log}",
            detail=last_lines(run.supervisor_log, 20),
        )


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_LAUNCH_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None
