"""The verb facts: what this far end has, in one call."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from remote.agent.gpus import list_gpus
from remote.agent.interpreters import packages_of
from remote.agent.lifecycle import lives, run_ids
from remote.agent.memory import memory
from remote.agent.roots import current_release, interpreter
from remote.agent.wire import Answer, Request
from remote.protocol.codec import plain
from remote.protocol.errors import DflashError
from remote.protocol.layout import RootLayout


def facts(request: Request, answer: Answer) -> None:
    """Answer interpreter and packages, cpus, memory, /dev/shm and disk (bytes), GPUs (MiB), release, living runs.

    What cannot be found out is under "problems", one sentence each, and does not fail the rest.
    """
    root = RootLayout(request.root)
    problems: list[str] = []
    found: dict[str, Any] = {"python": {}, "gpus": []}
    for key, ask in (
        ("python", lambda: packages_of(interpreter(request.text("python", "")))),
        ("gpus", list_gpus),
    ):
        try:
            found[key] = plain(ask())
        except DflashError as error:
            problems.append(f"{error.error}: {error.cause}")
    answer.result(
        {
            **found,
            # Not cpu_count(): a container sees all cores of its host there.
            "cpus": len(os.sched_getaffinity(0)),
            "memory": plain(memory()),
            "shm": free_space(Path("/dev/shm")),
            "disk": free_space(root.path),
            "release": current_release(root),
            "runs_alive": [name for name in run_ids(root) if lives(root.run(name))],
            "problems": problems,
        }
    )


def free_space(path: Path) -> dict[str, int]:
    """Return total and free bytes where `path` lies or would be created; zeros when that cannot be asked."""
    # Before the first deploy ROOT does not exist; the disk it will be on does.
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return {"total": 0, "free": 0}
    return {"total": usage.total, "free": usage.free}
