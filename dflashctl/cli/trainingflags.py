"""One option a key of the training configuration, for the verbs that take them all."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from trainer.config import config_flags


def training_parameters() -> list[inspect.Parameter]:
    """Return one parameter a key of the training configuration, all text: trainer.config checks and converts them."""
    # `resume` names a checkpoint directory there; here --resume names a run, and the agent finds the directory.
    return [
        inspect.Parameter(
            flag.key,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, _option(flag.name, flag.metavar, flag.help, flag.group)],
        )
        for flag in config_flags()
        if flag.key != "resume"
    ]


def _option(name: str, metavar: str, help: str, group: str) -> Any:
    return typer.Option(name, metavar=metavar, help=help, rich_help_panel=f"Training: {group}")
