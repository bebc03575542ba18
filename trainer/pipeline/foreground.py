"""`python -m trainer train` typed by a person: a thin process stays in front of the run, which nobody else supervises.

Ctrl-C is a stop with a checkpoint, a second one ends everything at once, and what went wrong is said last. The leader below is
the same as a supervisor's, in a session of its own: a terminal's Ctrl-C reaches this process alone. It dies with this one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from remote.protocol.events import CheckpointSaved, SaveProgress, read_events
from remote.protocol.files import write_json
from remote.protocol.identity import ProcessIdentity
from remote.protocol.layout import RunLayout
from remote.protocol.locks import is_held
from remote.protocol.records import StopRequest
from trainer.checkpoint_files import list_checkpoints
from trainer.config import TrainConfig
from trainer.pipeline import names
from trainer.pipeline.first_cause import first_cause
from trainer.pipeline.leader import LEADER, become_launcher, prepare, run_layout, writable
from trainer.pipeline.membership import die_with, file_error, hold_run_lock
from trainer.pipeline.plan import RunPlan

GRACE_SECONDS = 120.0
"""Seconds without checkpoint progress after which a stop ends the run at once."""

_HEEDED = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}

# `timeout` and some shells send one signal to the process and again to its group: that is not asking twice.
_SAME_SECONDS = 0.2
_LOOK_SECONDS = 1.0
# Ranks whose launcher was killed are gone in milliseconds; the driver takes seconds to give a GPU's memory back.
_END_SECONDS = 30.0


class Interrupted(BaseException):
    """A signal came before there was a run to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


class Signals:
    """INT, TERM and HUP as a queue, from `with` to its end. What is ignored (nohup) stays so."""

    def __enter__(self) -> Signals:
        self._raising = False
        self.descriptor, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        heeded = [number for number in _HEEDED if signal.getsignal(number) is not signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._handle) for number in heeded}
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._writer)
        os.close(self.descriptor)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._raising:
            # Once: a second signal must not interrupt the clearing up after the first.
            self._raising = False
            raise Interrupted(number)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Raise Interrupted where the block is when a signal comes."""
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def take(self) -> list[int]:
        """Return the numbers of the signals that came since."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self.descriptor, 100) if number in self._handlers]
        return []


def attend(config: TrainConfig) -> int:
    """Train, and wait for the run's end; returns 0, or 128 + the signal that ended it.

    Raises DflashError for what the preflight finds, and for what ended the run otherwise.
    """
    run = run_layout(config)
    with Signals() as signals:
        with writable():
            lock = hold_run_lock(run, inheritable=True)
        try:
            with signals.raising():
                plan = prepare(config, run)
            leader = spawn_leader(plan)
        except BaseException as error:
            # Refused or interrupted before there was a run: nothing is worth keeping.
            names.forget(run)
            shutil.rmtree(run.path)
            if isinstance(error, Interrupted):
                say("interrupted before the run began")
                return error.code
            raise
        # Only leader and ranks hold it from now on: that it is free says that all have ended.
        os.close(lock)
        return Attendance(plan, leader, signals).until_ended()


def spawn_leader(plan: RunPlan) -> int:
    """Fork the process that becomes the leader of a run; returns its pid."""
    parent = os.getpid()
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    # Never returns: the child must not run on in the caller's code.
    try:
        signal.set_wakeup_fd(-1)  # The pipe is the parent's too.
        os.setsid()
        die_with(parent)
        mine = dataclasses.replace(plan, leader_pid=os.getpid(), attended=True)
        become_launcher(mine, "trainer.pipeline.launcher")
    except BaseException as error:
        file_error(plan.run, error, rank=LEADER, role="leader", device="", phase="preflight", time=time.time())
    finally:
        os._exit(1)


class Attendance:
    """Waits for the end of a run whose leader is the child `leader` of this process."""

    def __init__(self, plan: RunPlan, leader: int, signals: Signals) -> None:
        self._plan = plan
        self._run: RunLayout = plan.run
        self._leader = ProcessIdentity.of(leader)
        self._signals = signals
        self._asked = 0
        self._asked_at = 0.0
        self._deadline = 0.0
        self._killed = False
        self._events_read = 0

    def until_ended(self) -> int:
        """Return the exit code. Raises DflashError with the first cause when the run failed."""
        leader_fd = os.pidfd_open(self._leader.pid)
        try:
            poller = select.poll()
            poller.register(leader_fd, select.POLLIN)
            poller.register(self._signals.descriptor, select.POLLIN)
            while leader_fd not in [ready for ready, _ in poller.poll(_LOOK_SECONDS * 1000)]:
                for number in self._signals.take():
                    self._heed(number)
                self._look_at_the_clock()
        finally:
            os.close(leader_fd)
        returncode = os.waitstatus_to_exitcode(os.waitpid(self._leader.pid, 0)[1])
        self._clear_up()
        if self._killed:
            say(f"ended at once; {self._last_checkpoint()}")
        elif returncode != 0:
            raise first_cause(self._plan, returncode)
        return 128 + self._asked if self._asked else 0

    def _heed(self, number: int) -> None:
        now = time.monotonic()
        if not self._asked:
            self._asked, self._asked_at = number, now
            self._ask(_HEEDED[signal.Signals(number)])
        elif now - self._asked_at >= _SAME_SECONDS:
            self._kill()

    def _ask(self, by: str) -> None:
        """Rename stop.json into place, as dflashctl's `stop` does."""
        self._deadline = time.monotonic() + GRACE_SECONDS
        # What was saved before is no progress of the stop.
        self._progress()
        try:
            write_json(self._run.stop, StopRequest(time.time() + GRACE_SECONDS, by=by, grace=GRACE_SECONDS))
        except OSError as error:
            say(
                f"{by}: the stop cannot be asked for: {self._run.stop}: {error.strerror}; once more ends the run at once"
            )
        else:
            say(f"{by}: stopping with a checkpoint after this step; once more ends the run at once, without one")

    def _look_at_the_clock(self) -> None:
        if not self._asked or self._killed:
            return
        if self._progress():
            self._deadline = time.monotonic() + GRACE_SECONDS
        elif time.monotonic() >= self._deadline:
            say(f"no progress of a checkpoint for {GRACE_SECONDS:g} s")
            self._kill()

    def _progress(self) -> bool:
        """Whether the events told of a checkpoint since the last look."""
        with contextlib.suppress(FileNotFoundError), self._run.events.open("rb") as file:
            file.seek(self._events_read)
            lines = file.read()
            lines = lines[: lines.rfind(b"\n") + 1]
            self._events_read += len(lines)
            return any(isinstance(event, SaveProgress | CheckpointSaved) for event in read_events(lines))
        return False

    def _kill(self) -> None:
        # The kernel KILLs the ranks with it. TERM would make the launcher wait for each of them.
        self._killed = self._leader.send(signal.SIGKILL) or self._killed

    def _clear_up(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        while is_held(self._run.run_lock) and time.monotonic() < deadline:
            time.sleep(0.02)
        names.forget(self._run)

    def _last_checkpoint(self) -> str:
        kept = list_checkpoints(Path(self._plan.output_dir))
        return f"the last checkpoint is {kept[-1]}" if kept else "there is no checkpoint"


def say(text: str) -> None:
    """Tell the person; a terminal that has gone must not keep a checkpoint from being saved."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
