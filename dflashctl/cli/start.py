"""`dflashctl start`: launch a run and return when its first step is trained."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from dflashctl.cli.options import Common, add_parameters, command
from dflashctl.cli.trainingflags import training_parameters


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

    Every key of the training configuration is a flag. Without --config they change the configuration of the run that
    --resume goes on from, else the one used last at this destination, else a preset. The run goes on without this
    command: Ctrl-C only stops watching.
    """
    from dflashctl.agent_client import StartRequest
    from dflashctl.console import ERR
    from dflashctl.launch import (
        NAME_LENGTH,
        NOTE_LENGTH,
        Launch,
        check_label,
        judge_started,
        make_spec,
        read_resume,
        show_started,
        start_run,
    )
    from dflashctl.session import Session
    from dflashctl.talk import Talk
    from dflashctl.training import resolve_training, typed_values
    from dflashctl.views import plan_lines
    from remote.protocol.errors import ExitCode

    session = Session.open(common.flags() | {"config": options.config, "limit": options.limit}, verbose=common.verbose)
    # Before any contact: what is wrong with the command line is said first.
    check_label("--name", options.name, NAME_LENGTH)
    check_label("--note", options.note, NOTE_LENGTH)
    typed = typed_values(training_flags, options.assignments or [])
    resumed = read_resume(session, options.resume) if options.resume else None
    base = resumed.spec if resumed is not None and options.config is None else None
    training = resolve_training(session.settings, session.remembered, session.deployed_source, typed, base)
    for line in plan_lines(training, ERR):
        ERR.line(line)
    spec = make_spec(session, training, name=options.name, note=options.note)
    resume = "" if resumed is None else resumed.name
    request = StartRequest(spec, session.settings.seconds("limit"), resume, options.wait_gpus)
    talk = Talk()
    launch = Launch(session, request, talk, remember=training.base if options.config is not None else "")
    try:
        status = session.here(start_run(session, request, talk, launch))
    except KeyboardInterrupt:
        ERR.line(f"\n{launch.farewell()}")
        return int(ExitCode.INTERRUPTED)
    show_started(status, talk, session, common.as_json)
    return judge_started(status, resumed)


add_parameters(verb, training_parameters())
