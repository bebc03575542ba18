"""Starting a run: its spec as far as this side knows it, and asking until there is an answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dflashctl.agent_client import RestartRequest, StartRequest
from dflashctl.console import ERR, OUT, harmless, one_line
from dflashctl.errors import ConnectionLost, NoAnswer, report
from dflashctl.results import Begun, Resumed
from dflashctl.session import Session, operator
from dflashctl.talk import Talk
from dflashctl.timeline import Timeline
from dflashctl.training import Training
from dflashctl.views import duration, first_step_line, status_lines
from remote.protocol import events
from remote.protocol.codec import dumps, plain
from remote.protocol.errors import DflashError, ExitCode, usage_error
from remote.protocol.layout import new_run_id
from remote.protocol.records import Lifecycle, RunSpec, RunStatus

T = TypeVar("T")

NAME_LENGTH, NOTE_LENGTH = 200, 2000
"""Characters: a name is a column of a table, a note a paragraph of a card."""

# A lost connection is asked again under the same run id: it becomes a query, never a second run.
_RETRY_PAUSES = (0.5, 1.0, 2.0, 4.0)
# Errors of a run that was launched: it crashed before its first step, or shows no sign of progress.
_LAUNCHED = (ExitCode.CRASHED_AT_START, ExitCode.NOT_READY)


def read_resume(session: Session, resume: str, talk: Talk) -> Resumed:
    """Ask which checkpoint `resume` means, and say it. Raises DflashError: 3 for no such run, 7 for no checkpoint,
    2 for `@17`, which names a step and no run."""
    check_resume(resume)
    resumed = ask_until_answered(lambda: session.client.spec(resume), talk)
    if resumed.passed_over:
        ERR.line(harmless(f"run {resumed.passed_over} is newer and has no checkpoint: an earlier one is resumed"))
    ERR.line(harmless(f"resuming run {resumed.spec.run_id} at step {resumed.step}, checkpoint {resumed.checkpoint}"))
    return resumed


def check_resume(resume: str) -> None:
    """Raise a usage error for a `--resume` that names no run, or a step that is none."""
    run, at, step = resume.partition("@")
    if not run or (at and not (step.isascii() and step.isdigit())):
        raise usage_error(
            f"--resume {resume!r} is not possible",
            cause="expected RUN, RUN@STEP or last@STEP, the step in digits",
            hint="`dflashctl runs` lists the runs; a bare --resume means the last one",
        )


def restart_line(begun: Begun, resume: str) -> str:
    """Return the first line of a restart: which run, whether it lives, and where the new one begins."""
    run = begun.spec.run_id
    if not resume:
        begin = "fresh"
    elif resume != run:
        begin = f"from the checkpoint {resume}"
    else:
        begin = "from the checkpoint that its stop writes" if begun.alive else "from its last checkpoint"
    if begun.alive:
        return f"restarting run {run} ({begun.state}), {begin}"
    return (
        f"run {run} does not live ({begun.state}), nothing of it has to stop: starting with its configuration, {begin}"
    )


class Launch:
    """Passes the events of a start or restart on to `talk` and notes how far the far end has come.

    Not before the run was made is its id shown. `remember` is the configuration file that the next start at this
    destination is to use, "" for none.
    """

    def __init__(self, session: Session, request: StartRequest, talk: Talk, *, remember: str = "") -> None:
        self.timeline = Timeline()
        self._session = session
        self._request = request
        self._talk = talk
        self._remember = remember
        self._noted = False
        self._stopping = ""
        self._asked = 0

    def ask(self) -> RunStatus:
        """Ask the far end for the run, or after it."""
        self._asked += 1
        return self._session.client.start(self._request, self)

    def farewell(self) -> str:
        """Return what to say to somebody who presses Ctrl-C now."""
        run = self._request.spec.run_id
        if self._noted:
            return f"detached; the run goes on: `dflashctl status --run {run}`, `dflashctl logs -f`"
        if self._stopping:
            return (
                f"detached; the restart goes on over there: run {self._stopping} is stopped, then run {run} is launched: "
                "`dflashctl status`"
            )
        # The word of a launch may have been on its way: who has to be sure asks.
        untouched = ", no run was stopped" if isinstance(self._request, RestartRequest) else ""
        return f"interrupted{untouched}; nothing was launched that we were told of; `dflashctl status` makes sure"

    def say_untouched(self, error: DflashError) -> None:
        """Say, of a restart that was refused before the stop, what it left alone."""
        # Only of an only answer: one that was lost may have told of a stop.
        certain = self._asked <= 1 and error.code is not ExitCode.NO_ANSWER
        if isinstance(self._request, RestartRequest) and certain and not self._noted and not self._stopping:
            self._talk.say("refused before anything was stopped")

    def __call__(self, data: dict[str, Any]) -> None:
        """Take one event frame."""
        self.timeline.hear(data)
        phase = data.get("phase") if (data.get("kind"), data.get("role")) == (events.Phase.kind, "agent") else ""
        if phase == "launched":
            # A step or a profile heard before was the old run's.
            self._talk.latest.clear()
            self.note()
            return
        if phase == "stopping":
            self._stopping = str(data.get("detail"))
        self._talk(data)

    def note(self) -> None:
        """Say that there is a run, and remember what it was started with; once, for a retry is told again."""
        if self._noted:
            return
        self._noted = True
        how = f"resumed from {self._request.resume}" if self._request.resume else "fresh"
        if isinstance(self._request, RestartRequest):
            # Where it begins was said in the first line; the stop may have shown that there is no checkpoint.
            how = f"in the place of {self._request.run}"
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


def make_spec(session: Session, training: Training, *, name: str, note: str, restarted_from: str = "") -> RunSpec:
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
        restarted_from=restarted_from,
        stop_grace=session.settings.seconds("grace"),
        stall_timeout=config.stall_timeout,
    )


def start_run(launch: Launch, talk: Talk) -> RunStatus:
    """Start the run, or ask after it when the connection broke; return it at its first step or end."""
    try:
        status = ask_until_answered(launch.ask, talk)
    except DflashError as error:
        # A release from before the event `launched` tells it by its answer alone.
        if error.code in _LAUNCHED:
            launch.note()
        raise
    launch.note()
    return status


def ask_until_answered(ask: Callable[[], T], talk: Talk) -> T:
    """Return what `ask` does, a query or something that carries its run id; asked again when the connection breaks off.

    Raises ConnectionLost when it could not be had back: what was asked may have been done.
    """
    lost = False
    for pause in (*_RETRY_PAUSES, None):
        try:
            return ask()
        except NoAnswer as error:
            lost = lost or isinstance(error, ConnectionLost)
            # A destination that never answered is an error at once; one that did may be back in a moment.
            if not lost:
                raise
            if pause is None:
                raise ConnectionLost(error.error, cause=error.cause, hint=error.hint) from error
            talk.say(f"{error.error} ({error.cause}); asking again")
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def carry_out(
    session: Session, request: StartRequest, talk: Talk, *, remember: str, as_json: bool, resumed: Resumed | None = None
) -> int:
    """Start or restart, show what came of it, and return the exit code. Ctrl-C detaches."""
    launch = Launch(session, request, talk, remember=remember)
    try:
        status = session.here(start_run(launch, talk))
    except KeyboardInterrupt:
        ERR.line(f"\n{launch.farewell()}")
        return int(ExitCode.INTERRUPTED)
    except ConnectionLost:
        talk.say(
            "what was asked for goes on over there if it arrived: `dflashctl status` tells, once there is a connection"
        )
        raise
    except DflashError as error:
        launch.say_untouched(error)
        raise
    took = launch.timeline.parts() if isinstance(request, RestartRequest) else None
    show_started(status, talk, session, as_json, took)
    return judge_started(status, resumed)


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


def show_started(
    status: RunStatus, talk: Talk, session: Session, as_json: bool, took: Mapping[str, float] | None = None
) -> None:
    """Write start's answer: one line for a run that trains, its card for one that has ended already.

    `took`: the seconds of a restart's parts.
    """
    if as_json:
        OUT.line(dumps(plain(status) | ({} if took is None else {"seconds": took})))
        return
    if status.state in list(Lifecycle) and not Lifecycle(status.state).alive:
        for line in status_lines(status, session.label, OUT):
            OUT.line(line)
        return
    step, profile = talk.latest.get(events.Step), talk.latest.get(events.PipelineProfile)
    line = first_step_line(
        status,
        step if isinstance(step, events.Step) else None,
        profile if isinstance(profile, events.PipelineProfile) else None,
    )
    OUT.line(f"{line}; {took_text(took)}" if took else line)


def took_text(parts: Mapping[str, float]) -> str:
    """Return how long a restart took, in all and in its parts."""
    named = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items())
    return f"restarted in {duration(sum(parts.values()))}: {named}"
