"""`dflashctl restart`: a new run in the place of the one that lives, with its configuration and what is changed."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from dflashctl.cli.help import LAST_RUN
from dflashctl.cli.launchoptions import LaunchOptions
from dflashctl.cli.options import Common, add_parameters, command
from dflashctl.cli.trainingflags import training_parameters


@dataclasses.dataclass(frozen=True)
class RestartOptions:
    """What is stopped, and how."""

    run: Annotated[
        str, typer.Option("--run", metavar="ID", help="Whose configuration to begin with; else the live or last one's.")
    ] = ""
    now: Annotated[bool, typer.Option("--now", help="End the old run at once, without a checkpoint.")] = False
    grace: Annotated[
        str | None,
        typer.Option("--grace", metavar="SECONDS", help="Get rougher after so long without checkpoint progress."),
    ] = None


@command
def verb(common: Common, launch: LaunchOptions, options: RestartOptions, **training_flags: str | None) -> int:
    """Stop the run and start again with its configuration; return when the first step is trained.

    Every key of the training configuration is a flag that changes it. The new run is judged (release, model, data, GPUs)
    while the old one still trains, and a refusal leaves the old one as it is. The new run begins fresh; a bare --resume
    goes on from the checkpoint that the stop writes. From the stop on it goes on over there without this command.
    """
    from dflashctl.agent_client import RestartRequest
    from dflashctl.console import ERR, harmless
    from dflashctl.launch import ask_until_answered, carry_out, check_resume, make_spec, restart_line
    from dflashctl.session import Session
    from dflashctl.talk import Talk
    from dflashctl.training import resolve_training

    flags = common.flags() | launch.flags() | {"grace": options.grace}
    session = Session.open(flags, verbose=common.verbose)
    typed = launch.typed(training_flags)
    if launch.resume:
        check_resume(launch.resume)
    talk = Talk()
    begun = ask_until_answered(lambda: session.client.begun_with(options.run), talk)
    old = begun.spec
    resume = old.run_id if launch.resume == LAST_RUN else launch.resume
    base = old if launch.config is None else None
    training = resolve_training(
        session.settings, session.remembered, session.deployed_source, typed, base, "the run that is restarted"
    )
    ERR.line(harmless(restart_line(begun, resume)))
    session = launch.prepared(session, training, talk)
    name = old.name if launch.name is None else launch.name
    spec = make_spec(session, training, name=name, note=launch.note, restarted_from=old.run_id)
    settings = session.settings
    request = RestartRequest(
        spec,
        settings.seconds("limit"),
        resume,
        launch.wait_gpus,
        current=not launch.deploy,
        run=old.run_id,
        now=options.now,
        grace=settings.seconds("grace"),
    )
    return carry_out(session, request, talk, remember=launch.to_remember(training), as_json=common.as_json)


add_parameters(verb, training_parameters())
