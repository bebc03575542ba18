"""`dflashctl config show`: what a start would use, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl.cli.options import Common, add_parameters, command
from dflashctl.cli.trainingflags import training_parameters
from dflashctl.console import OUT
from remote.protocol.codec import dumps

if TYPE_CHECKING:
    from dflashctl.session import Session
    from dflashctl.training import Training


_UNSET = {"root": "(the far end's default)"}


@command
def verb(
    common: Common,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="Training configuration (TOML, flat keys).")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one key; may be repeated.")
    ] = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value came from.")] = False,
    **training_flags: str | None,
) -> int:
    """Show settings and training configuration, resolved as `start` would with the same flags."""
    from dflashctl.session import Session
    from dflashctl.training import resolve_training, typed_values
    from dflashctl.views import plan_lines, table

    session = Session.open(common.flags() | {"config": config}, verbose=common.verbose)
    typed = typed_values(training_flags, assignments or [])
    training = resolve_training(session.settings, session.remembered, session.deployed_source, typed)
    settings = _settings(session)
    if common.as_json:
        OUT.line(dumps(_as_json(settings, training)))
        return 0
    # Shown, not stored: an empty cell would look like a value that got lost.
    settings = [(key, text or _UNSET.get(key, ""), where) for key, text, where in settings]
    heading = ("setting", "value", "from") if origin else ("setting", "value")
    for line in table(heading, [row[: len(heading)] for row in settings], OUT):
        OUT.line(line)
    OUT.line()
    if not origin:
        for line in plan_lines(training, OUT):
            OUT.line(line)
        return 0
    values = training.config.to_dict()
    rows = [(key, str(value), training.origins.get(key, "default")) for key, value in values.items()]
    for line in table(("training key", "value", "from"), rows, OUT):
        OUT.line(line)
    return 0


def _settings(session: Session) -> list[tuple[str, str, str]]:
    values = session.settings.values
    rows = {key: (values[key].text, values[key].origin) for key in values}
    if not rows["python"][0]:
        rows["python"] = (session.python, "default")
    rows["source"] = (
        str(session.source.directory),
        values["source"].origin if rows["source"][0] else session.source.origin,
    )
    return [(key, text, origin) for key, (text, origin) in rows.items()]


def _as_json(settings: list[tuple[str, str, str]], training: Training) -> Mapping[str, Any]:
    return {
        "settings": {key: {"value": text, "origin": origin} for key, text, origin in settings},
        "training": {
            key: {"value": value, "origin": training.origins.get(key, "default")}
            for key, value in training.config.to_dict().items()
        },
        "config_file": {"value": training.base, "origin": training.base_origin},
    }


add_parameters(verb, training_parameters())
