"""The help pages. Plain text with headings in bold: rich would cost more CPU time than everything else together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand

from dflashctl.console import OUT
from remote.protocol.errors import usage_error


@dataclass(frozen=True)
class VerbInfo:
    """A verb as the main help page shows it; `module` is imported only when the verb is used."""

    name: str
    module: str
    help: str
    group: str


VERBS = (
    VerbInfo("deploy", "deploy", "Ship the trainer to a destination and remember it.", "Set up"),
    VerbInfo("doctor", "doctor", "Say what a start would lack over there.", "Set up"),
    VerbInfo("releases", "releases", "List the releases over there.", "Set up"),
    VerbInfo("rollback", "rollback", "Make an earlier release the current one.", "Set up"),
    VerbInfo("hosts trust", "hosts", "Learn the host keys of a destination.", "Set up"),
    VerbInfo("hosts list", "hostlist", "List the destinations that are remembered.", "Set up"),
    VerbInfo("config show", "config", "Show settings and training configuration.", "Set up"),
    VerbInfo("start", "start", "Start a run; return when its first step is trained.", "Run"),
    VerbInfo("stop", "stop", "Stop the run, with a checkpoint.", "Run"),
    VerbInfo("restart", "restart", "Stop the run and start again, with what is changed.", "Run"),
    VerbInfo("status", "status", "Say how the run is doing.", "Watch"),
    VerbInfo("logs", "logs", "Show or follow the run's log.", "Watch"),
    VerbInfo("runs", "runs", "List the runs over there, newest first.", "Watch"),
)

LAST_RUN = "last"
"""What a bare `--resume` means."""

MAY_BE_EMPTY = ("name", "note")

_QUICK = (
    ("dflashctl deploy --host 10.1.2.6 --ct 200", "ship the trainer into container 200"),
    ("dflashctl start --profile-interval 60 --split-fc off", "train; any configuration key is a flag"),
    ("dflashctl logs --follow", "watch it, Ctrl-C lets it run on"),
    ("dflashctl stop", "stop it with a checkpoint"),
)


def main_help() -> str:
    """Return the page of `dflashctl --help`."""
    lines = [
        f"{_heading('Usage:')} dflashctl VERB [OPTIONS]",
        "",
        "Train DFlash drafters on a machine you reach over ssh, in its containers, or on this one.",
    ]
    for group in dict.fromkeys(verb.group for verb in VERBS):
        lines += ["", _heading(f"{group}:")]
        lines += [f"  {_name(f'{verb.name:<12}')} {verb.help}" for verb in VERBS if verb.group == group]
    lines += ["", _heading("In four commands:")]
    lines += [f"  {_name(f'{line:<53}')} {what}" for line, what in _QUICK]
    lines += ["", "Try it on this machine with --host local. `dflashctl VERB --help` tells the rest."]
    return "\n".join(lines)


def _heading(text: str) -> str:
    return OUT.style(text, "bold")


def _name(text: str) -> str:
    return OUT.style(text, "cyan")


class VerbCommand(TyperCommand):
    """A verb whose help page groups its options by panel, and whose --resume may stand without a value."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for parameter in self.params:
            _keep_as_it_is(parameter)

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None and "process_value" not in vars(option):
            _keep_as_it_is(option)
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare `--resume` its meaning, the last run; typer has no options with an optional value."""
        words: list[str] = []
        for index, word in enumerate(args):
            words.append(word)
            follower = args[index + 1] if index + 1 < len(args) else "--"
            if word == "--resume" and follower.startswith("-"):
                words.append(LAST_RUN)
        rest = super().parse_args(ctx, words)
        self._refuse_empty(ctx)
        return rest

    def _refuse_empty(self, ctx: Any) -> None:
        """Raise a usage error for `--run "$RUN"` where the shell had no such variable: `stop` would take the live run."""
        for parameter in self.get_params(ctx):
            name = str(parameter.name)
            if ctx.params.get(name) != "" or ctx.get_parameter_source(name).name != "COMMANDLINE":
                continue
            # A text key of the training configuration may be emptied on purpose, and a name be left out.
            if name not in MAY_BE_EMPTY and not str(getattr(parameter, "rich_help_panel", "")).startswith("Training"):
                raise usage_error(
                    f"{parameter.opts[0]} is empty",
                    cause="a value was given, and it has no letters; an unset variable of the shell looks so",
                    hint="leave the option out, or give it a value",
                )

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section a panel, in the order in which they first appear; the verb's own options come first."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel: str | None = getattr(parameter, "rich_help_panel", None)
                sections.setdefault(panel or "Options", []).append(record)
        for panel in sorted(sections, key=lambda title: title != "Options"):
            with formatter.section(OUT.style(panel, "bold")):
                formatter.write_dl(sections[panel], col_max=32)


def _keep_as_it_is(parameter: Any) -> None:
    """Have a value that is of its type already, as text always is, taken unconverted, and what was not given left at that.

    Typer 0.26 and later ask pydantic even for that, and its import takes 65 ms of CPU: as much as all of typer.
    """
    if parameter.required or parameter.multiple or parameter.nargs != 1:
        return
    convert = parameter.process_value
    # Older versions have no such attribute, and no pydantic.
    wanted = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)

    def process_value(ctx: Any, value: Any) -> Any:
        # A callback acts on what was given: without this `--help` would show nothing, and run the verb.
        if value and parameter.callback is not None:
            return convert(ctx, value)
        return value if value is None or type(value) is wanted else convert(ctx, value)

    parameter.process_value = process_value
