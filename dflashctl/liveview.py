"""A followed log on a terminal: lines above, a bar below. The only module that imports rich."""

from __future__ import annotations

import re
import time
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from dflashctl.console import OUT, width
from dflashctl.logview import LogView, end_line, readable
from dflashctl.profileview import profile_lines
from dflashctl.results import LogEnd
from dflashctl.views import duration, event_text, finished_text, phase_text
from remote.protocol.codec import from_plain
from remote.protocol.events import KINDS, PipelineProfile, RunFinished, StageProfile, parse_line

_STYLES = {
    "step": "default",
    "phase": "blue",
    "warmed_up": "dim",
    "run_started": "bold",
    "run_finished": "bold green",
    "checkpoint_saved": "cyan",
    "held_out": "green",
    "pipeline_profile": "magenta",
    "alarm": "bold white on red",
    "message": "yellow",
}
_STAMP = "%H:%M:%S "
_TROUBLE = re.compile(r"\b(Error|Exception|Traceback|CUDA out of memory|Killed)\b")


class _Figures(ProgressColumn):
    """Loss, speed and time left beside the bar."""

    def render(self, task: Task) -> Text:
        fields = task.fields
        parts: list[str | tuple[str, str]] = []
        if "loss" in fields:
            parts += ["loss ", (_figure(fields["loss"], ".4f"), "bold green"), "  "]
        if "speed" in fields:
            parts += [(_figure(fields["speed"], ",.0f"), "bold cyan"), " tok/s  "]
        if fields.get("eta"):
            parts += [f"{fields['eta']} left"]
        return Text.assemble(*parts)


class LiveView(LogView):
    """Colours, and a bar that knows the step, the loss, the speed and the time left."""

    def __init__(self) -> None:
        super().__init__()
        # Log lines are foreign text: no markup, no emoji, no highlighting of ours by guesswork.
        console = Console(file=OUT.file, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}", style="bold"),
            # Short of the right margin: the ^C that a terminal echoes there would wrap, and the bar could not be taken down.
            BarColumn(bar_width=max(width() - 84, 10), complete_style="cyan", finished_style="green"),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            _Figures(),
            console=console,
            transient=True,
            refresh_per_second=5,
        )
        self._task = self._bar.add_task("waiting", total=1, visible=False)
        self._ranks: dict[tuple[int, str, str], dict[str, Any]] = {}

    def __enter__(self) -> LiveView:
        self._bar.start()
        return self

    def close(self) -> None:
        self._bar.stop()

    def show(self, lines: list[bytes]) -> None:
        for line in lines:
            text = readable(line)
            fields = parse_line(text)
            if fields is not None and fields["kind"] in (StageProfile.kind, PipelineProfile.kind):
                self._profile(fields)
                continue
            if fields is None or fields["kind"] != "save_progress":  # that one moves the bar only
                self._print(_styled(text, fields, self._bar.console.width), folded=fields is not None)
            if fields is not None:
                self._advance(fields)

    def _profile(self, fields: dict[str, Any]) -> None:
        """Keep a rank's profile; show all of them as one table when the pipeline's own comes."""
        if fields["kind"] == StageProfile.kind:
            # Older trainers do not say the rank.
            self._ranks[fields["rank"], fields["role"], fields["device"]] = fields
            return
        summary, *table = profile_lines(fields, self._ranks.values(), self._bar.console.width)
        stamp = time.strftime(_STAMP, time.localtime(fields["time"]))
        lines = Text.assemble(
            (stamp, "dim"), (summary, _STYLES[PipelineProfile.kind]), *(f"\n{line}" for line in table)
        )
        self._print(lines, folded=False)

    def notice(self, text: str) -> None:
        self._print(Text(f"-- {text}", style="yellow"))

    def ended(self, end: LogEnd) -> None:
        style = "bold green" if end.state == "finished" else "bold cyan" if end.state == "stopped" else "bold red"
        self._print(Text(end_line(end), style=style))

    def _print(self, text: Text, *, folded: bool = True) -> None:
        """Print a line; `folded`: one of ours, which goes on between words under its beginning. A path is never cut."""
        console = self._bar.console
        console.print(_folded(text, console.width) if folded else text, soft_wrap=True)

    def _advance(self, fields: dict[str, Any]) -> None:
        if fields["kind"] == "step":
            self._bar.update(
                self._task,
                description="step",
                visible=True,
                completed=fields["step"],
                total=max(fields["total_steps"], 1),
                loss=fields["loss"],
                speed=fields["tokens_per_second"],
                eta=duration(fields["eta_seconds"]) if isinstance(fields["eta_seconds"], float) else "",
            )
        elif fields["kind"] == "save_progress":
            self._bar.update(self._task, description=f"saving {fields['written'] / max(fields['total'], 1):.0%}")
        elif fields["kind"] == "run_started":
            first = max(fields["first_step"] - 1, 0)
            self._bar.update(self._task, description="step", visible=True, completed=first, total=fields["total_steps"])
        elif fields["kind"] == "phase" and not self._bar.tasks[0].completed:
            self._bar.update(self._task, description=phase_text(fields["phase"]))
        elif fields["kind"] == "checkpoint_saved":
            self._bar.update(self._task, description="step")


def _figure(value: Any, spec: str) -> str:
    """Return a number in `spec`; NaN and Infinity, which travel as words, as they are."""
    return format(value, spec) if isinstance(value, float) else str(value)


def _folded(text: Text, columns: int) -> Text:
    """Return `text` in lines of at most `columns`, a longer word alone: rich's own folding would cut a path in two."""
    indent = " " * len(time.strftime(_STAMP))
    cuts: list[int] = []
    begin, room = 0, columns
    for word in re.finditer(r"\S+", text.plain):
        if word.start() > begin and cell_len(text.plain[begin : word.end()]) > room:
            cuts.append(word.start())
            begin, room = word.start(), columns - len(indent)
    lines = text.divide(cuts)
    for line in lines:
        line.rstrip()
    return Text(f"\n{indent}").join(lines)


def _styled(line: str, fields: dict[str, Any] | None, columns: int) -> Text:
    """Return a log line for the eye: an event in words, in local time and with its figures in colour, other text as it is."""
    if fields is None:
        return Text(line, style="red" if _TROUBLE.search(line) else "default")
    stamp = (time.strftime(_STAMP, time.localtime(fields["time"])), "dim")
    if fields["kind"] == "step":
        text = Text.assemble(stamp, *_step_parts(fields))
        return text if text.cell_len <= columns else Text.assemble(stamp, *_step_parts(fields, short=True))
    event = from_plain(KINDS[fields["kind"]], fields)
    words = finished_text(event) if isinstance(event, RunFinished) else event_text(event)
    return Text.assemble(stamp, (words, _STYLES[fields["kind"]]))


def _step_parts(fields: dict[str, Any], *, short: bool = False) -> list[str | tuple[str, str]]:
    """Return the figures of a step; `short`, those that fit 80 columns."""
    parts: list[str | tuple[str, str]] = [
        f"step {fields['step']}/{fields['total_steps']}  loss ",
        (_figure(fields["loss"], ".4f"), "bold green"),
        f"  accuracy {_figure(fields['accuracy'], '.3f')}  accept {_figure(fields['accept_len'], '.2f')}",
    ]
    if not short:
        parts.append(f"  lr {_figure(fields['lr'], '.2e')}  grad {_figure(fields['grad_norm'], '.2f')}")
    if fields["applied"] or not short:
        parts += ["  ", (_figure(fields["tokens_per_second"], ",.0f"), "bold cyan"), " tok/s"]
    return parts if fields["applied"] else [*parts, ("  not applied", "bold red")]
