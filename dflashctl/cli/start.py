"""`dflashctl start`: launch a run and return when its first step is trained."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated, Any

import typer

from dflashctl.cli.options import Common, add_parameters, command
from trainer.config import config_flags


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
    from dflashctl.agent_client import StartRequest
    from dflashctl.console import ERR
    from dflashctl.launch import make_spec, show_started, start_run
    from dflashctl.session import Session
    from dflashctl.talk import Talk
    from dflashctl.training import resolve_training
    from dflashctl.views import plan_lines
    from remote.protocol.errors import ExitCode
    from remote.protocol.records import Lifecycle

    session = Session.open(common.flags() | {"config": options.config, "limit": options.limit}, verbose=common.verbose)
    training = resolve_training(
        session.settings, session.remembered, session.deployed_source, training_flags, options.assignments or []
    )
    for line in plan_lines(training, ERR):
        ERR.line(line)
    spec = make_spec(session, training, name=options.name, note=options.note)
    ERR.line(f"run {spec.run_id} on {session.label}, {f'resumed from {options.resume}' if options.resume else 'fresh'}")
    if options.config is not None:
        # Before the launch: whatever becomes of it, a start without --config is to try the same again.
        known = dataclasses.replace(session.destination(), config=str(training.file))
        session.store.remember(known, make_current=False)
    request = StartRequest(spec, session.settings.seconds("limit"), options.resume, options.wait_gpus)
    talk = Talk()
    try:
        status = session.here(start_run(session, request, talk))
    except KeyboardInterrupt:
        ERR.line(f"\ndetached; what was launched goes on: `dflashctl status --run {spec.run_id}`, `dflashctl logs -f`")
        return int(ExitCode.INTERRUPTED)
    show_started(status, talk, session, common.as_json)
    return int(ExitCode.FAILED if status.state in (Lifecycle.FAILED, Lifecycle.LOST) else ExitCode.OK)


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
