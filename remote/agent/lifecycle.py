"""The state of a run from its locks, and what `status` says of it. Nothing here takes a lock or sends a signal."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from remote.agent.tail import first_events, last_events
from remote.agent.verdict import measurement, read_stop, told_of
from remote.protocol.errors import DflashError, ExitCode
from remote.protocol.events import CheckpointSaved, Event, HeldOutMeasured, Phase, RunFinished, RunStarted, Step
from remote.protocol.identity import boot_id
from remote.protocol.layout import RootLayout, RunLayout, is_run_id
from remote.protocol.locks import is_held
from remote.protocol.records import ExitRecord, HeldOut, Lifecycle, R, RunSpec, RunState, RunStatus, read_record

_TAIL_BYTES = (1 << 14, 1 << 18, 1 << 22)
"""How much of events.jsonl is read, from its end, until a step is found: bounded, whatever its length."""


_STEP = re.compile(r"([0-9]+)$")


def checkpoint_step(path: Path) -> int | None:
    """Return the step that a checkpoint's directory ends in, e.g. 500 for step-00000500; None when it ends in none."""
    match = _STEP.search(path.name)
    return int(match[1]) if match else None


def run_ids(root: RootLayout) -> list[str]:
    """Return all run ids, newest first. A file of such a name is no run."""
    try:
        # The directory's own entries tell files from directories: no call for each of a thousand runs.
        with os.scandir(root.runs) as entries:
            return sorted((entry.name for entry in entries if is_run_id(entry.name) and entry.is_dir()), reverse=True)
    except OSError:
        return []


def no_such_run(cause: str, hint: str = "`dflashctl runs` lists them") -> DflashError:
    """Return the error for a run id, or any run, that is not there (exit code 3)."""
    return DflashError("no such run", cause=cause, hint=hint, code=ExitCode.NO_RUN)


def no_run_at_all(root: RootLayout) -> DflashError:
    """Return the error of a verb that takes the last run where there is none (exit code 3)."""
    return no_such_run(f"there is no run in {root.path}", "`dflashctl start` begins one")


def choose_run(root: RootLayout, run_id: str) -> RunLayout | None:
    """Return the run asked for; for "" the newest that lives, else the newest; None when there is none at all.

    Raises DflashError (3) when `run_id` is given and is not there.
    """
    if run_id:
        if not is_run_id(run_id) or not root.run(run_id).path.is_dir():
            raise no_such_run(f"there is no run {run_id!r} in {root.runs}")
        return root.run(run_id)
    # Two locks a run are probed: 20 microseconds each, so a thousand old runs cost little.
    runs = [root.run(name) for name in run_ids(root)]
    return next((run for run in runs if lives(run)), runs[0] if runs else None)


def lives(run: RunLayout) -> bool:
    """Whether a supervisor or any process of the run holds its lock."""
    return is_held(run.sup_lock) or is_held(run.run_lock)


def readable(cls: type[R], run: RunLayout, name: str) -> tuple[R | None, str]:
    """Return a record of the run and "", or None and what is wrong with its file (missing is not wrong)."""
    try:
        return read_record(cls, run.path / name), ""
    except (ValueError, OSError) as error:
        return None, f"{name} is unreadable: {error}"


@dataclass(frozen=True)
class Tail:
    """The newest event of each kind near the end of events.jsonl."""

    step: Step | None = None
    phase: Phase | None = None
    checkpoint: CheckpointSaved | None = None
    finished: RunFinished | None = None
    held_out: HeldOut | None = None
    last_event: float = 0.0

    @classmethod
    def of(cls, run: RunLayout) -> Tail:
        """Read as much of the end as is needed to find a step, at most 4 MiB."""
        tail = cls()
        for size in _TAIL_BYTES:
            tail = cls._newest(last_events(run.events, size))
            if tail.step is not None:
                break
        return tail

    @classmethod
    def _newest(cls, events: Iterator[Event]) -> Tail:
        newest: dict[type[Event], Event] = {}
        last = 0.0
        for event in events:
            newest.setdefault(type(event), event)
            last = max(last, event.time)
        step, phase = newest.get(Step), newest.get(Phase)
        saved, finished = newest.get(CheckpointSaved), newest.get(RunFinished)
        measured = newest.get(HeldOutMeasured)
        return cls(
            step=step if isinstance(step, Step) else None,
            phase=phase if isinstance(phase, Phase) else None,
            checkpoint=saved if isinstance(saved, CheckpointSaved) else None,
            finished=finished if isinstance(finished, RunFinished) else None,
            held_out=measurement(measured) if isinstance(measured, HeldOutMeasured) else None,
            last_event=last,
        )


def lifecycle_of(run: RunLayout, tail: Tail | None = None) -> Lifecycle:
    """Return the state by the table of locks in docs/architecture.md.

    sup.lock is probed first and exit.json read last: the supervisor writes exit.json before it lets go of sup.lock, so
    two free locks make the file conclusive.
    """
    supervised, occupied = is_held(run.sup_lock), is_held(run.run_lock)
    tail = tail or Tail.of(run)
    if supervised:
        return _supervised(run, tail)
    if occupied:
        return Lifecycle.ORPHANED
    record, _ = readable(ExitRecord, run, "exit.json")
    result = record.result if record is not None else ""
    if not result:
        result = tail.finished.result if tail.finished is not None else ""
    # Anything else in the file is a newer schema or damage: `lost` claims nothing.
    return Lifecycle(result) if result in ("finished", "stopped", "failed") else Lifecycle.LOST


def _supervised(run: RunLayout, tail: Tail) -> Lifecycle:
    state, _ = readable(RunState, run, "state.json")
    if state is not None and state.state in ("running", "stopping"):
        return Lifecycle(state.state)
    # state.json is missing or garbage, tells the end already while the supervisor clears up, or says `starting`, which a
    # step that the supervisor has not read yet makes untrue.
    if read_stop(run) is not None:
        return Lifecycle.STOPPING
    return Lifecycle.RUNNING if tail.step is not None else Lifecycle.STARTING


def status_of(run: RunLayout) -> RunStatus:
    """Return what is known of a run. Costs a few small reads, whatever the length of its logs."""
    tail = Tail.of(run)
    state = lifecycle_of(run, tail)
    spec, spec_problem = readable(RunSpec, run, "spec.json")
    kept, state_problem = readable(RunState, run, "state.json")
    ended, exit_problem = readable(ExitRecord, run, "exit.json")
    # Written once, at the very beginning; the end of a long file no longer holds it.
    started = next((event for event in first_events(run.events) if isinstance(event, RunStarted)), None)
    step = tail.step
    failure = told_of(run, ended.failed_rank) if ended is not None and state is Lifecycle.FAILED else None
    problems = [problem for problem in (spec_problem, state_problem, exit_problem) if problem]
    message = _last_word(state, kept, ended)
    # The supervisor heard all events; what it has not written yet, or never will, is near the file's end.
    told = ended or kept
    saved = tail.checkpoint.path if tail.checkpoint is not None else (kept.last_checkpoint if kept else "")
    return RunStatus(
        run_id=run.run_id,
        state=str(state),
        host=spec.host if spec else "local",
        ct=spec.ct if spec else "",
        name=spec.name if spec else "",
        note=spec.note if spec else "",
        release=spec.release if spec else "",
        created=spec.created if spec else 0.0,
        step=step.step if step else (ended.last_step if ended else 0),
        total_steps=step.total_steps if step else (started.total_steps if started else 0),
        loss=step.loss if step else None,
        tokens_per_second=step.tokens_per_second if step else None,
        phase=tail.phase.phase if tail.phase else "",
        last_event=tail.last_event,
        resumed_from=spec.resumed_from if spec else "",
        restarted_from=spec.restarted_from if spec else "",
        topology=started.topology if started else "",
        by=spec.by if spec else "",
        last_checkpoint=(ended.last_checkpoint if ended else "") or saved,
        message="; ".join([*filter(None, [message]), *problems]),
        failed_rank=ended.failed_rank if ended else None,
        traceback=ended.traceback if ended else "",
        hint=failure.hint if failure else "",
        run_dir=str(run.path),
        alarms=kept.alarms if kept else (),
        held_out=_newest(told.held_out if told else None, tail.held_out),
        best=told.best if told else None,
        not_applied=told.not_applied if told else 0,
    )


def _newest(told: HeldOut | None, seen: HeldOut | None) -> HeldOut | None:
    if told is None or seen is None:
        return told or seen
    # Of one step the record knows more: the checkpoint.
    return told if told.step >= seen.step else seen


def _last_word(state: Lifecycle, kept: RunState | None, ended: ExitRecord | None) -> str:
    # While processes live, an exit.json (of a stop that just stood in) is not the last word.
    if state.alive:
        return ""
    if ended is not None and state is Lifecycle.LOST:
        # `lost` without a reason would send people looking for a reboot.
        unknown = f"exit.json names a result that this agent does not know, {ended.result[:40]!r}"
        return f"{unknown}: {ended.message}" if ended.message else unknown
    if ended is not None:
        return ended.message
    if state is not Lifecycle.LOST:
        return ""
    # A container start gives a new boot id, and pids begin at 1 again.
    if kept is not None and kept.boot_id and kept.boot_id != boot_id():
        return "the machine or container was started anew since"
    return "supervisor and trainer are gone without a word: all were killed"
