"""`dflashctl start`: launch a run and return when its first step is trained."""

from __future__ import annotations

import dataclasses
import getpass
import inspect
import platform
import time
from typing import Annotated, Any

import typer

from dflashctl.agent_client import StartRequest
from dflashctl.cli.options import Common, add_parameters, command
from dflashctl.console import ERR, OUT
from dflashctl.errors import ConnectionLost
from dflashctl.session import Session
from dflashctl.talk import Talk
from dflashctl.training import Training, resolve_training
from dflashctl.views import first_step_line, plan_lines, status_lines
from remote.protocol import events
from remote.protocol.codec import dumps
from remote.protocol.errors import ExitCode
from remote.protocol.layout import new_run_id
from remote.protocol.records import Lifecycle, RunSpec, RunStatus
from trainer.config import config_flags

# A lost connection is asked again under the same run id: it becomes a query, never a second run.
_RETRY_PAUSES = (0.5, 1.0, 2.0, 4.0)


@dataclasses.dataclass(frozen=True)
class StartOptions:
    """The verb's own options; the training configuration's come from trainer.config."""

    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="Training configuration (TOML, flat keys).")
    ] = None
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one key; may be repeated.")
    ] = None
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="A name for the run.")] = ""
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="Why it is run, for later.")] = ""
    resume: Annotated[
        str,
        typer.Option("--resume", metavar="[RUN[@STEP]]", help="Go on from a checkpoint; bare: of the last run."),
    ] = ""
    limit: Annotated[
        str | None,
        typer.Option("--limit", metavar="SECONDS", help="Give up waiting after so long without a sign of progress."),
    ] = None
    wait_gpus: Annotated[bool, typer.Option("--wait-gpus", help="Wait until the GPUs are free instead of failing.")] = (
        False
    )


@command
def verb(common: Common, options: StartOptions, **training_flags: str | None) -> int:
    """Start a run; return when its first step is trained.

    Every key of the training configuration is a flag. Without --config it is the configuration used last at this
    destination, else a preset. The run goes on without this command: Ctrl-C only stops watching.
    """
    session = Session.open(common.flags() | {"config": options.config, "limit": options.limit})
    training = resolve_training(
        session.settings, session.remembered, session.source, training_flags, options.assignments or []
    )
    for line in plan_lines(training, ERR):
        ERR.line(line)
    spec = make_spec(session, training, options)
    ERR.line(f"run {spec.run_id} on {session.label}, {f'resumed from {options.resume}' if options.resume else 'fresh'}")
    request = StartRequest(spec, session.settings.seconds("limit"), options.resume, options.wait_gpus)
    talk = Talk()
    try:
        status = session.here(_start(session, request, talk))
    except KeyboardInterrupt:
        ERR.line(f"\ndetached; what was launched goes on: `dflashctl status --run {spec.run_id}`, `dflashctl logs -f`")
        return int(ExitCode.INTERRUPTED)
    if options.config is not None:
        known = dataclasses.replace(session.destination(), config=str(training.file))
        session.store.remember(known, make_current=False)
    _show(status, talk, session, common.as_json)
    return int(ExitCode.FAILED if status.state in (Lifecycle.FAILED, Lifecycle.LOST) else ExitCode.OK)


def make_spec(session: Session, training: Training, options: StartOptions) -> RunSpec:
    """Return the run's spec as far as this side knows it; the agent adds argv, environment and packages."""
    config = training.config
    numbers = sorted({*config.target_gpus, *config.drafter_gpus})
    return RunSpec(
        run_id=new_run_id(),
        argv=(),
        environment={},
        devices=("cpu",) if config.device == "cpu" else tuple(str(number) for number in numbers),
        release=session.release,
        name=options.name,
        note=options.note,
        created=time.time(),
        by=f"{getpass.getuser()}@{platform.node()}",
        host=session.settings["host"],
        ct=session.settings["ct"],
        config=config.to_dict(),
        source=session.source.provenance(),
        stop_grace=session.settings.seconds("grace"),
        stall_timeout=config.stall_timeout,
    )


def _start(session: Session, request: StartRequest, talk: Talk) -> RunStatus:
    for pause in _RETRY_PAUSES:
        try:
            return session.client.start(request, talk)
        except ConnectionLost as error:
            talk.say(f"{error.error} ({error.cause}); asking again")
            time.sleep(pause)
    return session.client.start(request, talk)


def _show(status: RunStatus, talk: Talk, session: Session, as_json: bool) -> None:
    if as_json:
        OUT.line(dumps(status))
        return
    if not Lifecycle(status.state).alive:
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


def _training_parameters() -> list[inspect.Parameter]:
    """Return one parameter a key of the training configuration, all text: trainer.config checks and converts them."""
    # `resume` names a checkpoint directory there; here --resume names a run, and the agent finds the directory.
    return [
        inspect.Parameter(
            flag.key,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, _training_option(flag.name, flag.metavar, flag.help, flag.group)],
        )
        for flag in config_flags()
        if flag.key != "resume"
    ]


def _training_option(name: str, metavar: str, help: str, group: str) -> Any:
    return typer.Option(name, metavar=metavar, help=help, rich_help_panel=f"Training: {group}")


add_parameters(verb, _training_parameters())
