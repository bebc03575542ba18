"""The supervisor: one per run, detached, the only writer of state.json and exit.json while it lives.

It runs any argv that writes protocol events, escalates a stop, notices stalls and alarms, and says at the end how it was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from remote.agent.aftermath import clear_remains, remove_sockets, write_exit
from remote.agent.escalation import Escalation, Stage
from remote.agent.statefile import StateFile
from remote.agent.tail import EventTail
from remote.agent.verdict import Ending, Story, judge, read_stop
from remote.agent.watch import Watch, oom_kills
from remote.protocol.events import AlarmRaised, Event, Step
from remote.protocol.identity import ProcessIdentity, write_pidfile
from remote.protocol.layout import RunLayout
from remote.protocol.locks import still_named
from remote.protocol.records import ExitRecord, Lifecycle, RunSpec, RunState, read_record

POLL_SECONDS = 0.25
"""Longest pause between looks at stop.json and events.jsonl; the end of a process wakes us at once."""


def supervise(run_dir: Path, sup_lock: int) -> int:
    """Detach, then supervise the run in `run_dir` to its end. `sup_lock` is the inherited descriptor that holds sup.lock."""
    # The lock came over fork and exec so that it was never free in between; from here on no child may have it.
    os.set_inheritable(sup_lock, False)
    # The second half of the double fork: not being a session leader, it can never get a terminal.
    if os.fork():
        os._exit(0)
    # The trainer inherits this: a terminal that closes is no reason to end a run of days.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = RunLayout(run_dir)
    write_pidfile(run.supervisor_pid, ProcessIdentity.of())
    spec = read_record(RunSpec, run.spec)
    if spec is None:
        print(f"no spec in {run.path}", file=sys.stderr)
        return 1
    return Supervisor(run, spec, sup_lock).run()


def log(text: str) -> None:
    """Write a line to supervisor.log (our standard output); a full disk costs the line, not the supervisor."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}", flush=True)


class Supervisor:
    """One run from launch to exit.json. `sup_lock` is the descriptor that holds the run's sup.lock."""

    def __init__(self, run: RunLayout, spec: RunSpec, sup_lock: int) -> None:
        self._run = run
        self._spec = spec
        self._sup_lock = sup_lock
        self._deleted = False
        self._story = Story()
        self._tail = EventTail(run.events)
        self._escalation: Escalation | None = None
        self._last_step_at: float | None = None
        self._ooms_before = oom_kills()
        me = ProcessIdentity.of()
        state = RunState(
            run_id=run.run_id,
            state=str(Lifecycle.STARTING),
            since=time.time(),
            boot_id=me.boot_id,
            supervisor_pid=me.pid,
        )
        self._file = StateFile(run, state)

    def run(self) -> int:
        """Launch the trainer, watch it, clear up, write exit.json. Returns 0 whatever became of the trainer."""
        try:
            process = self._launch()
        except OSError as error:
            log(f"cannot execute {self._spec.argv[0]}: {error}")
            self._end(
                ExitRecord(self._run.run_id, str(Lifecycle.FAILED), time.time(), "supervisor", message=str(error))
            )
            return 0
        leader = ProcessIdentity.of(process.pid)
        try:
            write_pidfile(self._run.trainer_pid, leader)
        except OSError as error:
            # We know the leader without it; only a stop that stands in for us would have to find it by its environment.
            self._file.alarm("pidfile_unwritten", f"trainer.pid could not be written: {error.strerror}")
        self._file.change(trainer_pid=process.pid)
        log(f"leader is pid {process.pid}: {' '.join(self._spec.argv)}")
        with Watch(self._run, leader) as watch:
            while not watch.wait(POLL_SECONDS):
                self._look(leader)
        # Only now is the leader reaped: until here its pid could not become another process's.
        returncode = process.wait()
        log(f"leader ended: {returncode}")
        self._finish(returncode, watch)
        return 0

    def _launch(self) -> subprocess.Popen[bytes]:
        output = os.open(self._run.train_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            # A file, not a pipe: a pipe would kill the ranks with the supervisor.
            return subprocess.Popen(
                self._spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Complete, as stored: nothing of our own environment gets through.
                env=self._spec.environment,
                cwd=self._run.path,
                # Its own session: whatever ends ours by group does not reach it.
                start_new_session=True,
            )
        finally:
            os.close(output)

    def _look(self, leader: ProcessIdentity) -> None:
        self._hear(self._tail.poll())
        self._look_for_stall()
        self._look_for_stop(leader)
        if self._escalation is not None and (done := self._escalation.tick()):
            log(done)
        self._file.flush()

    def _hear(self, events: list[Event]) -> None:
        self._story.hear(events)
        for event in events:
            if isinstance(event, Step):
                self._last_step_at = time.monotonic()
                if self._file.state.state == Lifecycle.STARTING:
                    self._file.enter(Lifecycle.RUNNING)
            elif isinstance(event, AlarmRaised):
                self._file.alarm(event.alarm, event.message, event.step)
        if self._escalation is not None:
            self._escalation.progress(events)
        # `status` reads the end of events.jsonl alone, and these may lie far before it.
        story = self._story
        self._file.note(
            last_checkpoint=story.last_checkpoint,
            held_out=story.held_out,
            best=story.best,
            not_applied=story.not_applied,
        )

    def _look_for_stall(self) -> None:
        # Before the first step, start's limit on silence watches; after a stop, the escalation does.
        if self._last_step_at is None or self._escalation is not None:
            return
        quiet = time.monotonic() - self._last_step_at
        if quiet >= self._spec.stall_timeout:
            step = self._story.last_step
            self._file.alarm("stall", f"no step for {self._spec.stall_timeout:g} s after step {step}", step)

    def _look_for_stop(self, leader: ProcessIdentity) -> None:
        stop = read_stop(self._run)
        # By identity: a trainer that saves its next checkpoint makes the directory anew, and it looks like ours.
        if not self._deleted and not still_named(self._sup_lock, self._run.sup_lock):
            self._deleted = True
            log("the run's directory was deleted: ending the run")
        if stop is None and not self._deleted:
            return
        # Nobody can reach a run whose locks were deleted, and `start` would not see it: it ends at once.
        grace = 0.0 if stop is None or self._deleted else stop.grace
        if self._escalation is None:
            if stop is not None:
                log(f"stop asked by {stop.by}")
            self._escalation = Escalation(self._run, grace, self._spec.kill_grace, leader)
            by = stop.by if stop is not None else ""
            self._file.change(state=str(Lifecycle.STOPPING), since=time.time(), stop_by=by)
        # stop.json is read anew each time: a later, more urgent stop replaces it.
        self._escalation.hasten(grace)

    def _finish(self, returncode: int, watch: Watch) -> None:
        # The events first: what the ranks wrote is complete once they are gone.
        killed = clear_remains(self._run, self._file.alarm)
        if killed:
            log(f"killed what was left: pid {', '.join(map(str, killed))}")
        while events := self._tail.poll():
            self._hear(events)
        ending = Ending(
            by="trainer",
            returncode=returncode,
            first_dead=watch.first_dead,
            first_dead_at=watch.first_dead_at,
            escalated=self._escalation is not None and self._escalation.stage > Stage.MESSAGE,
            oom_kill=oom_kills() > self._ooms_before,
            deleted=self._deleted,
        )
        self._end(judge(self._run, self._story, ending))

    def _end(self, record: ExitRecord) -> None:
        remove_sockets(self._run)
        if not write_exit(self._run, record):
            log("exit.json could not be written")
        self._file.change(state=record.result, since=record.ended)
        log(f"run {record.result}{': ' + record.message if record.message else ''}")
