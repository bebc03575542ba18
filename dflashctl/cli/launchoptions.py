"""The options that start and restart share, and what both do before they ask the far end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dflashctl.session import Session
    from dflashctl.talk import Talk
    from dflashctl.training import Training, Typed


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """What a new run is made of; the training configuration's own flags come from trainer.config."""

    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="Training configuration (TOML, flat keys).")
    ] = None
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one key; may be repeated.")
    ] = None
    name: Annotated[str | None, typer.Option("--name", metavar="TEXT", help="A name for the run.")] = None
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
    trace: Annotated[
        bool, typer.Option("--trace", help="Trace a few steps of every rank, as --trace-steps 3 does.")
    ] = False
    deploy: Annotated[
        bool, typer.Option("--deploy", help="Ship the source here first, as `dflashctl deploy` does.")
    ] = False

    def flags(self) -> dict[str, str | None]:
        """Return the flags that are settings, by key."""
        return {"config": self.config, "limit": self.limit}

    def typed(self, training_flags: Mapping[str, str | None]) -> list[Typed]:
        """Return what the command line sets. Raises usage errors for all of it that can be judged without contact."""
        from dflashctl.launch import NAME_LENGTH, NOTE_LENGTH, check_label
        from dflashctl.training import Typed, typed_values
        from trainer.config import TRACE_STEPS

        check_label("--name", self.name or "", NAME_LENGTH)
        check_label("--note", self.note, NOTE_LENGTH)
        traced = [Typed("trace_steps", TRACE_STEPS, "--trace")] if self.trace else []
        # First: a number that is given beside it is what is meant.
        return traced + typed_values(training_flags, self.assignments or [])

    def prepared(self, session: Session, training: Training, talk: Talk) -> Session:
        """Show the configuration and, with --deploy, ship first; else say when what is deployed is not the source here."""
        from dflashctl.console import ERR, harmless
        from dflashctl.shipping import difference, ship, tree_here
        from dflashctl.views import plan_lines

        for line in plan_lines(training, ERR):
            ERR.line(line)
        if self.deploy:
            result, session = ship(session, tree_here(session), talk)
            if result.changed:
                # Said as it happens: a start that is refused after this has switched it all the same.
                was = f", was {result.previous}" if result.previous else ""
                talk.say(f"release {result.release} is current now{was}")
            return session
        if notice := difference(session):
            ERR.line(harmless(notice))
        return session

    def to_remember(self, training: Training) -> str:
        """Return the configuration file that the next start here is to use, "" for none."""
        return training.base if self.config is not None else ""
