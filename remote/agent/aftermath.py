"""After the leader's end: nothing of the run lives on, nothing stays in temporary places, and exit.json tells."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from remote.agent.escalation import kill_all
from remote.agent.processes import remains
from remote.protocol.files import write_json
from remote.protocol.layout import RunLayout
from remote.protocol.records import ExitRecord

GRACE_SECONDS = 1.0
"""How long what the leader leaves behind may take to end by itself: PR_SET_PDEATHSIG kills ranks at once."""

_ALARM_SECONDS = 15.0
_EXIT_RETRY_SECONDS = 30.0
_SOCKET_PREFIX = "dflash"
_SHARED_MEMORY = Path("/dev/shm")


def clear_remains(run: RunLayout, alarm: Callable[[str, str], None]) -> list[int]:
    """Wait until no process of the run lives, killing after a short grace. Returns the pids killed.

    Has no bound: as long as a process lives the run is not over, and sup.lock keeps a second one off its devices. What
    cannot be killed (state D) is told by `alarm`.
    """
    # The wall clock may be set while we wait, in a container by its host.
    began = time.monotonic()
    killed: set[int] = set()
    while left := remains(run):
        # A rank mid-write of its error record deserves the second: a traceback is worth more than a fast end.
        waited = time.monotonic() - began
        if waited >= GRACE_SECONDS:
            killed.update(kill_all(run))
        if waited >= _ALARM_SECONDS:
            alarm("cannot_end", f"still alive after KILL: {left.describe()}")
        # Each look reads the environment of every process of the machine: often at first, when it matters, then seldom.
        time.sleep(0.05 if waited < GRACE_SECONDS else 0.5)
    return sorted(killed)


def remove_sockets(run: RunLayout) -> None:
    """Remove the temporary directory of the run's sockets, and the ring of the same name, if a crash left them.

    The ring is gigabytes of memory that nothing else would ever give back.
    """
    try:
        path = Path(run.sockets.read_text(encoding="utf-8").strip())
        # The file is the trainer's: it must not be able to name anything but a directory made for this.
        ours = path.name.startswith(_SOCKET_PREFIX) and path.is_dir() and not path.is_symlink()
        if path.is_absolute() and ours and path.stat().st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)
            # The trainer unlinks it once all ranks have mapped it; only a crash before that leaves it.
            ring = _SHARED_MEMORY / path.name
            if ring.is_file() and ring.lstat().st_uid == os.geteuid():
                ring.unlink(missing_ok=True)
    except (OSError, ValueError):  # none was made
        return


def write_exit(run: RunLayout, record: ExitRecord) -> bool:
    """Write exit.json, once; tries for half a minute on a full disk. Returns whether it is there.

    Without it the last event still tells the result, and after that `lost` is the honest answer.
    """
    deadline = time.monotonic() + _EXIT_RETRY_SECONDS
    # Once: a stop that stands in and a supervisor that is not dead after all must not both have the last word.
    while not run.exit.exists():
        try:
            write_json(run.exit, record)
        except OSError:
            if time.monotonic() >= deadline or not run.path.is_dir():
                return False
            time.sleep(0.5)
    return True
