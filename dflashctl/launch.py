"""Starting a run: its spec as far as this side knows it, and asking until there is an answer."""

from __future__ import annotations

import time

from dflashctl.agent_client import StartRequest
from dflashctl.console import OUT
from dflashctl.errors import ConnectionLost
from dflashctl.session import Session, operator
from dflashctl.talk import Talk
from dflashctl.training import Training
from dflashctl.views import first_step_line, status_lines
from remote.protocol import events
from remote.protocol.codec import dumps
from remote.protocol.layout import new_run_id
from remote.protocol.records import Lifecycle, RunSpec, RunStatus

# A lost connection is asked again under the same run id: it becomes a query, never a second run.
_RETRY_PAUSES = (0.5, 1.0, 2.0, 4.0)


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


def start_run(session: Session, request: StartRequest, talk: Talk) -> RunStatus:
    """Start the run of `request`, or ask after it when the connection broke; return it at its first step or end."""
    for pause in _RETRY_PAUSES:
        try:
            return session.client.start(request, talk)
        except ConnectionLost as error:
            talk.say(f"{error.error} ({error.cause}); asking again")
            time.sleep(pause)
    return session.client.start(request, talk)


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
