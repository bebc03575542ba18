"""Options that many verbs share, declared once as dataclasses, and how they become parameters of a verb."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

WHERE = "Where"
TALK = "Output"


@dataclass(frozen=True)
class Common:
    """What every verb understands. None: not given, so the layers below the flags decide."""

    host: Annotated[
        str | None,
        typer.Option("--host", metavar="NAME|local", help="Where runs live.", rich_help_panel=WHERE),
    ] = None
    ct: Annotated[
        str | None, typer.Option("--ct", metavar="ID", help="Container on that host.", rich_help_panel=WHERE)
    ] = None
    ssh_config: Annotated[
        str | None,
        typer.Option("--ssh-config", metavar="FILE", help="ssh configuration to use.", rich_help_panel=WHERE),
    ] = None
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="DIR", help="Directory of releases and runs there.", rich_help_panel=WHERE),
    ] = None
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="Python to use there.", rich_help_panel=WHERE)
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Data on stdout as JSON; talk stays on stderr.", rich_help_panel=TALK)
    ] = False
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say what is asked of the far end.", rich_help_panel=TALK)
    ] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=TALK)] = (
        False
    )

    def flags(self) -> dict[str, str | None]:
        """Return the flags that are settings, by key."""
        return {key: getattr(self, key) for key in ("host", "ct", "ssh_config", "root", "python")}


class ReaderGone(Exception):
    """Whoever read stdout has seen enough: `dflashctl logs | head -1`."""


class Interrupted(Exception):
    """Ctrl-C in a verb that does not detach on it."""


Verb = Callable[..., int]
V = TypeVar("V", bound=Verb)


def command(function: V) -> V:
    """Give a verb the signature typer reads: a parameter that is an option dataclass becomes one parameter a field.

    Typer has no option groups; without this each of a dozen verbs would repeat the same eight parameters.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {
        name: hint for name, hint in hints.items() if name != "return" and dataclasses.is_dataclass(hint)
    }
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in groups:
            parameters += _parameters_of(groups[parameter.name])
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))

    def expanded(**values: Any) -> int:
        for name, group in groups.items():
            keys = [field.name for field in dataclasses.fields(group)]
            values[name] = group(**{key: values.pop(key) for key in keys})
        try:
            return function(**values)
        except BrokenPipeError as error:
            # As an OSError it would never reach us: typer answers EPIPE with exit code 1 of its own.
            raise ReaderGone from error
        except KeyboardInterrupt as error:
            # Typer would turn it into a silent 130.
            raise Interrupted from error

    expanded.__doc__ = function.__doc__
    expanded.__module__ = function.__module__
    expanded.__dict__["__signature__"] = inspect.Signature(parameters)
    return expanded  # pyright: ignore[reportReturnType]  # the same verb, as typer will call it


def add_parameters(function: Verb, parameters: list[inspect.Parameter]) -> None:
    """Give a verb made by `command` further options, whose values reach its `**values`."""
    own: inspect.Signature = function.__dict__["__signature__"]
    function.__dict__["__signature__"] = own.replace(parameters=[*own.parameters.values(), *parameters])


def _parameters_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]
