"""Where everything lies under ROOT at the far end, and what a run id looks like."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

_RUN_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
_RELEASE_ID = re.compile(r"[0-9a-f]{12}")


def new_run_id() -> str:
    """Draw a run id: UTC time and six hex digits, the first three the fraction of the second: ids sort by age."""
    # 1/4096 s is below the time between two starts of one person; the last 12 bits are random, for those of two.
    seconds, fraction = divmod(time.time_ns(), 1_000_000_000)
    random = int.from_bytes(os.urandom(2), "big") & 0xFFF
    digits = fraction * 4096 // 1_000_000_000 << 12 | random
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds)) + f"-{digits:06x}"


def is_run_id(text: str) -> bool:
    """Whether `text` has the form of a run id (and so is safe as a file name)."""
    return _RUN_ID.fullmatch(text) is not None


def is_release_id(text: str) -> bool:
    """Whether `text` has the form of a release id: the first 12 hex digits of its manifest's sha256."""
    return _RELEASE_ID.fullmatch(text) is not None


@dataclass(frozen=True)
class RunLayout:
    """The directory of one run."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def spec(self) -> Path:
        """RunSpec, written once before anything is launched."""
        return self.path / "spec.json"

    @property
    def config(self) -> Path:
        """The resolved configuration, as the trainer reads it."""
        return self.path / "config.json"

    @property
    def state(self) -> Path:
        """RunState, written by the holder of sup.lock alone."""
        return self.path / "state.json"

    @property
    def exit(self) -> Path:
        """ExitRecord, written by the holder of sup.lock alone, once."""
        return self.path / "exit.json"

    @property
    def stop(self) -> Path:
        """StopRequest, renamed into place by the stop verb."""
        return self.path / "stop.json"

    @property
    def trainer_pid(self) -> Path:
        """Pidfile of the leader."""
        return self.path / "trainer.pid"

    @property
    def supervisor_pid(self) -> Path:
        return self.path / "supervisor.pid"

    @property
    def events(self) -> Path:
        """One JSON event a line, appended by the first drafter rank of the machine alone."""
        return self.path / "events.jsonl"

    @property
    def train_log(self) -> Path:
        """What the ranks print; O_APPEND, written by them directly."""
        return self.path / "train.log"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "supervisor.log"

    @property
    def run_lock(self) -> Path:
        """Held shared by the leader and every rank from their first line on."""
        return self.path / "run.lock"

    @property
    def sup_lock(self) -> Path:
        """Held exclusively by the supervisor, or by a stop verb that stands in for a dead one."""
        return self.path / "sup.lock"

    @property
    def sockets(self) -> Path:
        """A file that names the temporary directory of the run's sockets, so that a crash leaves nothing behind."""
        return self.path / "sockets.path"

    @property
    def checkpoints(self) -> Path:
        """Default place of checkpoints, unless the configuration names an output directory."""
        return self.path / "checkpoints"

    @property
    def bad(self) -> Path:
        """Batches of steps that were refused for their numbers."""
        return self.path / "bad"

    def trace(self, rank: int) -> Path:
        """What one rank did in a few steps, as trace events, where that was asked for."""
        return self.path / "trace" / f"rank-{rank}.json.gz"

    def error(self, rank: int) -> Path:
        """RankError of one rank."""
        return self.path / "errors" / f"rank-{rank}.json"

    def stacks(self, rank: int) -> Path:
        """Where the threads of a rank were when it crashed, or when nothing got on any more; empty before."""
        return self.path / "stacks" / f"rank-{rank}.txt"

    def rank_pid(self, rank: int) -> Path:
        """Pidfile of one rank, for the last resort of stop: a rank has its own session, so no group kill reaches it."""
        return self.path / "ranks" / f"rank-{rank}.pid"

    def create(self) -> None:
        """Make the directory and its folders; existing ones stay."""
        # The ranks write there in their first moments; none has to make a directory then.
        for folder in (self.path, self.path / "errors", self.path / "stacks", self.path / "ranks"):
            folder.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True)
class RootLayout:
    """ROOT: releases, the current one, runs, locks."""

    path: Path

    @property
    def releases(self) -> Path:
        return self.path / "releases"

    @property
    def current(self) -> Path:
        """Symlink to the release that `start` uses."""
        return self.path / "current"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def start_lock(self) -> Path:
        """Held from `start`'s check until the new run's sup.lock is held."""
        return self.path / "locks" / "start.lock"

    @property
    def history(self) -> Path:
        """JSON: the releases that `current` pointed to, oldest first; what `rollback` goes back along."""
        return self.releases / ".history.json"

    @property
    def selfchecks(self) -> Path:
        """One result per (release, interpreter, packages)."""
        return self.releases / ".selfcheck"

    def release(self, release_id: str) -> Path:
        """Return the directory of a release. Raises ValueError when the id is none (so it cannot leave ROOT)."""
        if not is_release_id(release_id):
            raise ValueError(f"not a release id: {release_id!r}")
        return self.releases / release_id

    def run(self, run_id: str) -> RunLayout:
        """Return the layout of a run. Raises ValueError when the id is none (so it cannot leave ROOT)."""
        if not is_run_id(run_id):
            raise ValueError(f"not a run id: {run_id!r}")
        return RunLayout(self.runs / run_id)

    def create(self) -> None:
        """Make ROOT and its folders; existing ones stay."""
        for folder in (self.releases, self.runs, self.start_lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
