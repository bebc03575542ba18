"""Launching a supervisor so that nothing ties it to us: its session, its descriptors, its environment are its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from remote.agent.environment import base_environment
from remote.agent.tail import last_lines
from remote.protocol.errors import DflashError
from remote.protocol.identity import read_pidfile
from remote.protocol.layout import RunLayout
from remote.protocol.locks import is_held

_LAUNCH_SECONDS = 10.0


def launch_supervisor(run: RunLayout, release: Path, sup_lock: int) -> None:
    """Start `agent.pyz supervise` of a release for a run and wait until it lives on its own.

    `sup_lock` holds the run's sup.lock and is closed here; the supervisor inherits it, so the lock is never free between
    us and it. Raises DflashError when it does not come to life.
    """
    command = [sys.executable, "-I", str(release / "agent.pyz"), "supervise", str(run.path), str(sup_lock)]
    try:
        code = _detach(command, run, sup_lock)
    finally:
        os.close(sup_lock)
    # From here on the lock is held by the supervisor or by nobody: it lives and is about to write its pidfile, or is dead.
    while read_pidfile(run.supervisor_pid) is None and is_held(run.sup_lock):
        time.sleep(0.005)
    if read_pidfile(run.supervisor_pid) is None:
        raise DflashError(
            "the supervisor did not start",
            cause=f"`{' '.join(command[:4])}` ended with code {code}",
            hint="deploy again, or choose another interpreter with --python",
            detail=last_lines(run.supervisor_log, 20),
        )


def _detach(command: list[str], run: RunLayout, sup_lock: int) -> int | None:
    """Run the first process, a session leader that forks the supervisor and ends; returns its exit code."""
    with run.supervisor_log.open("ab") as output:
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
    try:
        return first.wait(_LAUNCH_SECONDS)
    except subprocess.TimeoutExpired:
        first.kill()
        first.wait()
        return None
