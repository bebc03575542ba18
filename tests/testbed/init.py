#!/usr/bin/python3 -IS
"""Process 1 of a container, and of the testbed itself: reaps, and on SIGPWR (lxc-stop) or SIGTERM ends everybody."""

import os
import signal
import time
from pathlib import Path

GRACE = 5.0
"""Seconds between SIGTERM to everybody and the end. systemd gives 90, and a test has no time for that."""


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def others() -> bool:
    """Return whether anybody else lives here; who was attached from outside is no child of ours."""
    return any(entry.name.isdecimal() and entry.name != "1" for entry in Path("/proc").iterdir())


def main() -> None:
    wanted = {signal.SIGCHLD, signal.SIGPWR, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    print("ready", flush=True)
    while signal.sigwait(wanted) == signal.SIGCHLD:
        reap()
    try:
        os.kill(-1, signal.SIGTERM)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + GRACE
    while others() and time.monotonic() < deadline:
        signal.sigtimedwait(wanted, 0.02)
        reap()


main()
