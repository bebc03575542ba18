"""Following a run from its launch to its first trained step, its early end, or its silence."""

from __future__ import annotations

import time
from typing import NoReturn

from remote.agent.lifecycle import lives, status_of
from remote.agent.tail import EventTail, last_lines, size_of
from remote.agent.verdict import told_of
from remote.agent.wire import Answer
from remote.protocol.codec import plain
from remote.protocol.errors import DflashError, ExitCode
from remote.protocol.events import Event, Step
from remote.protocol.layout import RunLayout
from remote.protocol.records import Lifecycle, RunStatus

_POLL_SECONDS = 0.05
_LOG_LINES = 40


def follow_to_first_step(run: RunLayout, answer: Answer, limit: float) -> None:
    """Stream the run's events and answer its status at the first step, or at an end that is none of its fault.

    Raises DflashError: 5 with the traceback when the trainer ended before, 6 with the last log lines after `limit` seconds
    without an event and without a byte of log. The limit counts silence: a healthy long load never ends in 6.
    """
    tail = EventTail(run.events)
    log_size, heard_at = 0, time.monotonic()
    while True:
        # Asked before the events are read: what a dead run wrote is then complete in what we read.
        alive = lives(run)
        events = tail.poll()
        if _pass_on(events, answer) or not alive:
            break
        size = size_of(run.train_log)
        # Any byte of log counts: tqdm bars of a long model load are progress too.
        if events or size != log_size:
            log_size, heard_at = size, time.monotonic()
        if time.monotonic() - heard_at >= limit:
            raise _silent(run, limit)
        answer.check()
        time.sleep(_POLL_SECONDS)
    status = status_of(run)
    # A run that fails after its first step has started well; status and logs tell the rest.
    if status.step == 0 and status.state in (Lifecycle.FAILED, Lifecycle.LOST):
        _raise_crash(run, status)
    answer.result({"status": plain(status)})


def _pass_on(events: list[Event], answer: Answer) -> bool:
    """Send events up to the first step; whether there was one."""
    # Not beyond the step: what follows belongs to `logs`.
    for event in events:
        answer.event(event)
        if isinstance(event, Step):
            return True
    return False


def _raise_crash(run: RunLayout, status: RunStatus) -> NoReturn:
    error = told_of(run, status.failed_rank)
    raise DflashError(
        f"run {run.run_id} ended before its first step",
        cause=status.message or "it left no word",
        hint=(error.hint if error else "") or f"the whole log: `dflashctl logs --run {run.run_id}`",
        code=ExitCode.CRASHED_AT_START,
        detail=status.traceback.rstrip() or last_lines(run.train_log, _LOG_LINES),
    )


def _silent(run: RunLayout, limit: float) -> DflashError:
    return DflashError(
        f"run {run.run_id} shows no sign of progress",
        cause=f"no event and no log line for {limit:g} s",
        hint="the run goes on: `dflashctl status`, `dflashctl logs --follow`, or `dflashctl stop`",
        code=ExitCode.NOT_READY,
        detail=last_lines(run.train_log, _LOG_LINES),
    )
