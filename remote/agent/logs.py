"""The verb logs: raw bytes of a run's file from a position on, and what happened to the file meanwhile."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from remote.agent.lifecycle import choose_run, lifecycle_of, lives, no_run_at_all, readable
from remote.agent.tail import line_start
from remote.agent.wire import Answer, Request
from remote.protocol.codec import plain
from remote.protocol.errors import DflashError, usage_error
from remote.protocol.layout import RootLayout, RunLayout
from remote.protocol.records import ExitRecord

_POLL_SECONDS = 0.02
"""Pause while following: half of it is the mean latency added to a line."""

_ALIVE_SECONDS = 0.2
_CHUNK = 1 << 18


def logs(request: Request, answer: Answer) -> None:
    """Send a file of a run and answer {"state", "exit", "device", "inode", "offset"}.

    Request: run, file (train, events, supervisor), tail (lines) or offset with device and inode of an earlier answer,
    follow. Data frames are raw bytes and may end inside a line; each change of position is announced by an event
    {"run", "file", "device", "inode", "offset", "notice"} before the bytes that follow it.
    """
    run = choose_run(RootLayout(request.root), request.text("run", ""))
    if run is None:
        raise no_run_at_all(RootLayout(request.root))
    name = request.text("file", "train")
    with Follower(_path(run, name), name, answer) as follower:
        follower.begin(request.count("offset"), request.count("tail"), request.count("device"), request.count("inode"))
        if request.flag("follow", False):
            _follow(run, follower, answer)
        else:
            follower.drain()
        # After the last byte was sent: following ends with the run, and its exit is then known.
        ended, _ = readable(ExitRecord, run, "exit.json")
        exit_record = plain(ended) if ended is not None else None
        answer.result({"run": run.run_id, "state": str(lifecycle_of(run)), "exit": exit_record, **follower.position})


def _path(run: RunLayout, name: str) -> Path:
    paths = {"train": run.train_log, "events": run.events, "supervisor": run.supervisor_log}
    # A fixed list: a name from outside must not become a path.
    if name not in paths:
        raise usage_error(f"no log file {name!r}", hint=f"one of {', '.join(paths)}")
    return paths[name]


def _no_log(path: Path, reason: str) -> DflashError:
    return DflashError(
        f"run {path.parent.name} has no log that can be read",
        cause=f"{path}: {reason}",
        hint="move away what has the log's name, or ask as the user that started the run",
    )


def _follow(run: RunLayout, follower: Follower, answer: Answer) -> None:
    alive, asked_at = True, 0.0
    while True:
        now = time.monotonic()
        if now - asked_at >= _ALIVE_SECONDS:
            alive, asked_at = lives(run), now
        if follower.step():
            continue
        # Asked before the last read found nothing: what a dead run wrote has been read to its end.
        if not alive:
            return
        answer.check()
        time.sleep(_POLL_SECONDS)


class Follower:
    """Reads one file as it grows and notices when the name stands for another file, or the file became shorter."""

    def __init__(self, path: Path, name: str, answer: Answer) -> None:
        self._path = path
        self._name = name
        self._answer = answer
        self._descriptor: int | None = None
        self._identity = (0, 0)
        self._offset = 0
        self._deleted = False

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def position(self) -> dict[str, int]:
        """Where reading goes on: device, inode, offset in bytes."""
        return {"device": self._identity[0], "inode": self._identity[1], "offset": self._offset}

    def begin(self, offset: int | None, tail: int | None, device: int | None, inode: int | None) -> None:
        """Go to the first position: after an interruption the byte of an earlier one, else the last lines or an offset."""
        if not self._open(self._path):
            return
        notice = ""
        if inode and (device or 0, inode) != self._identity:
            notice = self._resume_rotated((device or 0, inode), offset or 0)
        elif offset is not None:
            self._offset = offset
        elif tail is not None and self._descriptor is not None:
            self._offset = line_start(self._descriptor, tail)
        self._announce(notice)

    def step(self) -> bool:
        """Send the next bytes; False when there are none now."""
        if self._descriptor is None:
            if self._open(self._path):
                self._announce("")
            return False
        # pread: our offset is the truth that a client resumes from, not the descriptor's.
        data = os.pread(self._descriptor, _CHUNK, self._offset)
        if data:
            self._answer.data(data)
            self._offset += len(data)
            return True
        return self._look_at_name()

    def drain(self) -> None:
        """Send everything up to the end as it was when we began: a busy log must not keep us for ever."""
        if self._descriptor is None:
            return
        end = os.fstat(self._descriptor).st_size
        while self._offset < end and (
            data := os.pread(self._descriptor, min(_CHUNK, end - self._offset), self._offset)
        ):
            self._answer.data(data)
            self._offset += len(data)

    def _open(self, path: Path) -> bool:
        try:
            # Non-blocking: a pipe of that name would keep us until somebody writes to it. A file does not care.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _no_log(path, str(error.strerror)) from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise _no_log(path, "it is not a file")
        self._descriptor = descriptor
        self._identity = (status.st_dev, status.st_ino)
        self._offset = 0
        self._deleted = False
        return True

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _resume_rotated(self, identity: tuple[int, int], offset: int) -> str:
        """The file we read before was renamed while we were away: finish it first where it still lies beside ours."""
        for path in self._path.parent.iterdir():
            status = path.lstat()
            if (status.st_dev, status.st_ino) == identity:
                self._close()
                self._open(path)
                self._offset = offset
                return ""
        return "rotated: the rest of the earlier file is gone"

    def _look_at_name(self) -> bool:
        """At the end of the data: truncated, replaced or deleted? True when there is something new to read."""
        assert self._descriptor is not None
        # copytruncate of logrotate keeps the inode; only the size tells.
        if os.fstat(self._descriptor).st_size < self._offset:
            self._offset = 0
            self._announce("truncated")
            return True
        try:
            status = self._path.stat()
        except FileNotFoundError:
            if not self._deleted:
                self._deleted = True
                self._announce("deleted: what is still written to it is shown")
            return False
        # Not before it has content: a trainer never reopens its log, it goes on writing to the renamed one.
        if (status.st_dev, status.st_ino) == self._identity or status.st_size == 0:
            return False
        self._close()
        self._open(self._path)
        self._announce("rotated")
        return True

    def _announce(self, notice: str) -> None:
        # With the run: a client that comes back must find the same one, not a newer.
        run_id = self._path.parent.name
        self._answer.note({"run": run_id, "file": self._name, **self.position, "notice": notice})
