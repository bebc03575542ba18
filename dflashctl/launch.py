"""Starting a run: its spec as far as this side knows it, and asking until there is an answer."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from dflashctl.agent_client import StartRequest
from dflashctl.console import ERR, OUT, harmless, one_line
from dflashctl.errors import ConnectionLost, report
from dflashctl.results import Resumed
from dflashctl.session import Session, operator
from dflashctl.talk import Talk
from dflashctl.training import Training
from dflashctl.views import first_step_line, status_lines
from remote.protocol import events
from remote.protocol.codec import dumps
from remote.protocol.errors import DflashError, ExitCode, usage_error
from remote.protocol.layout import new_run_id
from remote.protocol.records import Lifecycle, RunSpec, RunStatus

NAME_LENGTH, NOTE_LENGTH = 200, 2000
"""Characters: a name is a column of a table, a note a paragraph of a card."""

# A lost connection is asked again under the same run id: it becomes a query, never a second run.
_RETRY_PAUSES = (0.5, 1.0, 2.0, 4.0)
# Errors of a run that was launched: it crashed before its first step, or shows no sign of progress.
_LAUNCHED = (ExitCode.CRASHED_AT_START, ExitCode.NOT_READY)


def read_resume(session: Session, resume: str) -> Resumed:
    """Ask which checkpoint `resume` means, and say it. Raises DflashError: 3 for no such run, 7 for no checkpoint,
    2 for `@17`, which names a step and no run."""
    run, at, step = resume.partition("@")
    if not run or (at and not (step.isascii() and step.isdigit())):
        raise usage_error(
            f"--resume {resume!r} is not possible",
            cause="expected RUN, RUN@STEP or last@STEP, the step in digits",
            hint="`dflashctl runs` lists the runs; a bare --resume means the last one",
        )
    resumed = session.client.spec(resume)
    ERR.line(harmless(f"resuming run {resumed.spec.run_id} at step {resumed.step}, checkpoint {resumed.checkpoint}"))
    return resumed


class Launch:
    """Passes the events of a start on to `talk` and notes when the far end has made the run: not before is its id shown.

    `remember` is the configuration file that the next start at this destination is to use, "" for none.
    """

    def __init__(self, session: Session, request: StartRequest, talk: Talk, *, remember: str = "") -> None:
        self._session = session
        self._request = request
        self._talk = talk
        self._remember = remember
        self._noted = False

    def farewell(self) -> str:
        """Return what to say to somebody who presses Ctrl-C now."""
        if self._noted:
            run = self._request.spec.run_id
            return f"detached; the run goes on: `dflashctl status --run {run}`, `dflashctl logs -f`"
        # The word of a launch may have been on its way: who has to be sure asks.
        return "interrupted; nothing was launched that we were told of; `dflashctl status` makes sure"

    def __call__(self, data: dict[str, Any]) -> None:
        """Take one event frame."""
        if (data.get("kind"), data.get("role"), data.get("phase")) == (events.Phase.kind, "agent", "launched"):
            self.note()
        else:
            self._talk(data)

    def note(self) -> None:
        """Say that there is a run, and remember what it was started with; once, for a retry is told again."""
        if self._noted:
            return
        self._noted = True
        how = f"resumed from {self._request.resume}" if self._request.resume else "fresh"
        self._talk.say(f"run {self._request.spec.run_id} on {self._session.label}, {how}")
        if self._remember:
            known = dataclasses.replace(self._session.destination(), config=self._remember)
            self._session.remember(known, make_current=False)


def check_label(option: str, text: str, limit: int) -> None:
    """Raise a usage error for a name or note that is no single line of at most `limit` characters."""
    if one_line(text) != text:
        raise usage_error(
            f"{option} {text!r} is not possible",
            cause="it has control characters (a line break, a tab, an escape), which would break every table it stands in",
            hint="write it on one line",
        )
    if len(text) > limit:
        raise usage_error(
            f"{option} is too long",
            cause=f"it has {len(text):,} characters, and at most {limit:,} are kept",
            hint="shorten it; a longer story fits a file beside the configuration",
        )


def make_spec(session: Session, training: Training, *, name: str, note: str) -> RunSpec:
    """Return the run's spec as far as this side knows it; the agent adds argv, environment and packages."""
    config = training.config
    numbers = sorted({*config.target_gpus, *config.drafter_gpus})
    return RunSpec(
        run_id=new_run_id(),
        argv=(),
        environment={},
        devices=("cpu",) if config.device == "cpu" else tuple(str(number) for number in numbers),
        release=session.release,
        name=name,
        note=note,
        created=time.time(),
        by=operator(),
        host=session.settings["host"],
        ct=session.settings["ct"],
        config=config.to_dict(),
        source=session.provenance(),
        stop_grace=session.settings.seconds("grace"),
        stall_timeout=config.stall_timeout,
    )


def start_run(session: Session, request: StartRequest, talk: Talk, launch: Launch) -> RunStatus:
    """Start the run of `request`, or ask after it when the connection broke; return it at its first step or end."""
    try:
        status = _ask_until_answered(session, request, talk, launch)
    except DflashError as error:
        # A release from before the event `launched` tells it by its answer alone.
        if error.code in _LAUNCHED:
            launch.note()
        raise
    launch.note()
    return status


def _ask_until_answered(session: Session, request: StartRequest, talk: Talk, launch: Launch) -> RunStatus:
    for pause in _RETRY_PAUSES:
        try:
            return session.client.start(request, launch)
        except ConnectionLost as error:
            talk.say(f"{error.error} ({error.cause}); asking again")
            time.sleep(pause)
    return session.client.start(request, launch)


def judge_started(status: RunStatus, resumed: Resumed | None) -> int:
    """Return the exit code of a start with this outcome, and say what is wrong where it trained no step."""
    if status.state in (Lifecycle.FAILED, Lifecycle.LOST):
        return int(ExitCode.FAILED)
    # A resumed run begins to count at the step of its checkpoint.
    if status.state == Lifecycle.STOPPED and status.step <= (0 if resumed is None else resumed.step):
        error = DflashError(
            f"run {status.run_id} was stopped before its first step",
            cause=status.message or "somebody asked it to stop while it loaded",
            hint="start it again; `dflashctl runs` lists what ran",
        )
        # Never as JSON: the status is on stdout already.
        return report(error, as_json=False)
    return int(ExitCode.OK)


def show_started(status: RunStatus, talk: Talk, session: Session, as_json: bool) -> None:
    """Write start's answer: one line for a run that trains, its card for one that has ended already."""
    if as_json:
        OUT.line(dumps(status))
        return
    if status.state in list(Lifecycle) and not Lifecycle(status.state).alive:
        for line in status_lines(status, session.label, OUT):
            OUT.line(line)
        return
    step, profile = talk.latest.get(events.Step), talk.latest.get(events.PipelineProfile)
    OUT.line(
        first_step_line(
            status,
            step if isinstance(step, events.Step) else None,
            profile if isinstance(profile, events.PipelineProfile) else None,
        )
    )
