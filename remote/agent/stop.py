"""The verb stop: ask, show the progress, and answer when no process of the run lives and its GPU memory is back."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from remote.agent.aftermath import clear_remains, remove_sockets, write_exit
from remote.agent.escalation import Escalation, Stage, kill_all
from remote.agent.gpus import above_baseline
from remote.agent.lifecycle import checkpoint_step, choose_run, lifecycle_of, lives, no_run_at_all, readable, status_of
from remote.agent.processes import remains
from remote.agent.statefile import StateFile
from remote.agent.tail import EventTail
from remote.agent.verdict import AGENT, Ending, Story, judge, read_stop
from remote.agent.wire import Answer, Request
from remote.protocol.codec import plain
from remote.protocol.errors import DflashError, ExitCode
from remote.protocol.events import CheckpointSaved, Event, SaveProgress
from remote.protocol.files import write_json
from remote.protocol.identity import boot_id
from remote.protocol.layout import RootLayout, RunLayout
from remote.protocol.locks import LockBusy, LockKind, acquire
from remote.protocol.records import Lifecycle, RunSpec, RunState, RunStatus, StopRequest

_POLL_SECONDS = 0.05
_TIMEOUT_SECONDS = 60.0
_GPU_SECONDS = 60.0


@dataclass(frozen=True)
class StopOrder:
    """How a run is to end. `grace` None: as its spec says; both times in seconds."""

    now: bool = False
    grace: float | None = None
    by: str = "stop"
    timeout: float = _TIMEOUT_SECONDS

    @classmethod
    def of(cls, request: Request) -> StopOrder:
        """Read the fields now, grace (120), by and timeout (60) of a request."""
        grace = request.number("grace", -1.0)
        return cls(
            now=request.flag("now", False),
            grace=None if grace < 0 else grace,
            by=request.text("by", "") or "stop",
            timeout=request.number("timeout", _TIMEOUT_SECONDS),
        )

    def patience(self, spec: RunSpec | None) -> float:
        """Return the seconds without checkpoint progress that this order allows a run."""
        if self.now:
            return 0.0
        # The far end's own default is in the spec: whoever started the run knew how long its checkpoints take.
        return self.grace if self.grace is not None else spec.stop_grace if spec else 120.0


def stop(request: Request, answer: Answer) -> None:
    """End a run. Already ended is a success; the answer is its status and a sentence.

    Raises DflashError: 3 when there is no such run, else what `end_run` raises.
    """
    run = choose_run(RootLayout(request.root), request.text("run", ""))
    if run is None:
        raise no_run_at_all(RootLayout(request.root))
    status, sentence = end_run(run, StopOrder.of(request), answer)
    answer.result({"status": plain(status), "message": sentence})


def end_run(run: RunLayout, order: StopOrder, answer: Answer) -> tuple[RunStatus, str]:
    """End a run and return its status and a sentence, when nothing of it lives.

    Raises DflashError: 1 when the run failed instead of stopping, so that its last steps are in no checkpoint; 9 naming
    what still lives when it has not ended `timeout` seconds after its grace, or when GPU memory does not come back.
    """
    began = time.monotonic()
    if not lives(run):
        # Supervisor and leader killed together leave no lock, but may leave a grandchild with the GPU's memory.
        left = kill_all(run)
        swept = f"; killed what it had left: pid {', '.join(map(str, left))}" if left else ""
        status = status_of(run)
        return status, f"run {run.run_id} was not running: {_outcome(status)}{swept}"
    spec, _ = readable(RunSpec, run, "spec.json")
    grace = order.patience(spec)
    kill_grace = spec.kill_grace if spec else 15.0
    _ask(run, order, grace)
    _Waiting(run, answer, grace, kill_grace, order.timeout + kill_grace).until_ended()
    status = status_of(run)
    # `--now` gives up the last steps knowingly: then the end is all that was asked for.
    if status.state in (Lifecycle.FAILED, Lifecycle.LOST) and not order.now:
        raise _failed(status)
    sentence = f"run {run.run_id} {_outcome(status)}"
    if gpus := _wait_for_gpus(run):
        sentence += f"; GPU memory free on {gpus}/{gpus}, {time.monotonic() - began:.0f} s"
    return status, sentence


def _outcome(status: RunStatus) -> str:
    """Return state, step and checkpoint: whoever stops a run wants to know what of it is kept."""
    where = f"at step {status.step}" if status.step else "before its first step"
    path = status.last_checkpoint
    if not path:
        return f"{status.state} {where}, no checkpoint"
    # An older one than the last step means that the steps after it are lost.
    latest = checkpoint_step(Path(path)) == status.step
    return f"{status.state} {where}, {'' if latest else 'last '}checkpoint {path}"


def _failed(status: RunStatus) -> DflashError:
    path = status.last_checkpoint
    kept = f"its last good checkpoint is {path}: `dflashctl start --resume {status.run_id}` goes on from there"
    return DflashError(
        f"run {status.run_id} failed while it was stopped",
        cause=status.message or "it left no word",
        hint=kept if path else "it has no checkpoint; `dflashctl logs` shows what it said",
    )


def _ask(run: RunLayout, order: StopOrder, grace: float) -> None:
    """Rename stop.json into place. A second, more patient stop does not soften an earlier one; a hastier one counts."""
    earlier = read_stop(run)
    if earlier is not None and earlier.grace <= grace:
        return
    wish = StopRequest(deadline=time.time() + grace, by=order.by, checkpoint=not order.now, grace=grace)
    try:
        write_json(run.stop, wish)
    except OSError as error:
        if not order.now:
            raise DflashError(
                "the stop could not be asked for",
                cause=f"{run.stop}: {error.strerror}",
                hint="free some space, or `dflashctl stop --now`, which needs none",
                code=ExitCode.STOP_INCOMPLETE,
            ) from error
        kill_all(run)


class _Waiting:
    """Waits for the end, by the supervisor's hand; by our own when it is dead."""

    def __init__(self, run: RunLayout, answer: Answer, grace: float, kill_grace: float, timeout: float) -> None:
        self._run = run
        self._answer = answer
        self._grace = grace
        self._kill_grace = kill_grace
        self._bound = grace + timeout
        self._deadline = time.monotonic() + self._bound
        self._tail = EventTail(run.events)
        # What happened before the stop is no progress of it.
        self._story = Story()
        self._drain(silently=True)

    def until_ended(self) -> None:
        """Return when no process of the run lives. Raises DflashError (9) at the bound."""
        while lives(self._run):
            # Looked at every time: the supervisor may die while we wait for it.
            if lifecycle_of(self._run) is Lifecycle.ORPHANED:
                self._stand_in()
            self._wait_a_little()
        self._drain()

    def _wait_a_little(self) -> list[Event]:
        events = self._drain()
        if any(isinstance(event, SaveProgress | CheckpointSaved) for event in events):
            self._deadline = time.monotonic() + self._bound
        if time.monotonic() >= self._deadline:
            raise DflashError(
                f"run {self._run.run_id} has not ended",
                cause=f"still alive: {remains(self._run).describe()}",
                hint="`dflashctl stop --now` does not wait for a checkpoint; a process in state D waits for the kernel",
                code=ExitCode.STOP_INCOMPLETE,
            )
        self._answer.check()
        time.sleep(_POLL_SECONDS)
        return events

    def _drain(self, *, silently: bool = False) -> list[Event]:
        heard: list[Event] = []
        while events := self._tail.poll():
            heard.extend(events)
            self._story.hear(events)
            for event in () if silently else events:
                self._answer.event(event)
        return heard

    def _stand_in(self) -> None:
        """Do the dead supervisor's work: hold sup.lock, escalate, clear up, write exit.json."""
        try:
            descriptor = acquire(self._run.sup_lock, LockKind.EXCLUSIVE)
        except LockBusy:  # another stop was faster and does it
            return
        self._answer.outlive_client()
        try:
            self._answer.say("the supervisor is dead: this stop ends the run itself", level="warning")
            stop = read_stop(self._run)
            state = self._state_file(stop.by if stop else "stop")
            # The grace begins anew: a dead supervisor may have begun it long ago, but nobody acted on it.
            escalation = Escalation(self._run, self._grace, self._kill_grace)
            # Not only the lock: a grandchild that left carries the run's id and holds its GPU memory.
            while remains(self._run):
                escalation.hasten((read_stop(self._run) or StopRequest(0.0, "")).grace)
                if done := escalation.tick():
                    self._answer.say(done)
                escalation.progress(self._wait_a_little())
            clear_remains(self._run, state.alarm)
            self._drain()
            ending = Ending(by=AGENT, escalated=escalation.stage > Stage.MESSAGE)
            record = judge(self._run, self._story, ending)
            remove_sockets(self._run)
            write_exit(self._run, record)
            state.change(state=record.result, since=record.ended)
        finally:
            os.close(descriptor)

    def _state_file(self, by: str) -> StateFile:
        kept, _ = readable(RunState, self._run, "state.json")
        state = kept or RunState(self._run.run_id, "", 0.0)
        file = StateFile(self._run, state)
        file.change(state=str(Lifecycle.STOPPING), since=time.time(), boot_id=boot_id(), supervisor_pid=0, stop_by=by)
        return file


def _wait_for_gpus(run: RunLayout) -> int:
    """Return how many GPUs of the run are back at their baseline: all. Raises DflashError (9) when one stays above."""
    spec, _ = readable(RunSpec, run, "spec.json")
    if spec is None or not spec.gpu_memory:
        return 0
    # The driver frees tens of gigabytes after the process is gone: 1 to 15 s were seen.
    deadline = time.monotonic() + _GPU_SECONDS
    while held := above_baseline(spec.gpu_memory):
        if time.monotonic() >= deadline:
            raise DflashError(
                f"the run has ended, but memory of GPU {', '.join(held)} is still held",
                cause=", ".join(f"GPU {index}: {mib} MiB" for index, mib in held.items()),
                hint="a process outside this container holds it, or the driver needs a reset",
                code=ExitCode.STOP_INCOMPLETE,
            )
        time.sleep(0.5)
    return len(spec.gpu_memory)
