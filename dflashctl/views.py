"""What a person sees: pure functions from data to lines. Colours come from the stream, so piped output is plain."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from dflashctl.console import Stream, harmless, one_line, width
from dflashctl.training import Training
from remote.protocol.events import (
    AlarmRaised,
    CheckpointSaved,
    Event,
    HeldOutMeasured,
    Message,
    Phase,
    PipelineProfile,
    RunFinished,
    RunStarted,
    SaveProgress,
    Step,
    WarmedUp,
)
from remote.protocol.records import Alarm, HeldOut, Lifecycle, RunStatus
from trainer.config import config_flags

STATE_STYLES: dict[str, str] = {
    Lifecycle.STARTING: "yellow",
    Lifecycle.RUNNING: "green",
    Lifecycle.STOPPING: "yellow",
    Lifecycle.FINISHED: "green",
    Lifecycle.STOPPED: "cyan",
    Lifecycle.FAILED: "red bold",
    Lifecycle.ORPHANED: "red",
    Lifecycle.LOST: "red",
    Lifecycle.NONE: "dim",
}

_LINKED_WIDTH = 110
_LEAST_NAME, _LONGEST_NAME = 12, 200
"""Columns of a run's name in the table of runs: even on a narrow terminal, and where there is none."""


def duration(seconds: float) -> str:
    """Return a time as a person reads it: 8.2 s, 3m 20s, 5h 02m, 3d 4h."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours < 48 else f"{hours // 24}d {hours % 24}h"


def size(count: float) -> str:
    """Return bytes as a person reads them, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def card(rows: Iterable[tuple[str, str]], out: Stream) -> list[str]:
    """Return aligned `label  text` lines; rows without text are left out."""
    return [f"{out.style(f'{label:<11}', 'dim')} {one_line(text)}" for label, text in rows if text]


def status_lines(status: RunStatus, where: str, out: Stream, now: float | None = None) -> list[str]:
    """Return the card of one run."""
    now = time.time() if now is None else now
    if status.state == Lifecycle.NONE:
        return [f"no run yet on {where}; `dflashctl start` begins one"]
    state = out.style(harmless(status.state), STATE_STYLES.get(status.state, "bold"))
    name = f" ({one_line(status.name)})" if status.name else ""
    # A state of a newer far end is shown as it is.
    alive = status.state in list(Lifecycle) and Lifecycle(status.state).alive
    lines = alarm_lines(status.alarms, out)
    lines.append(f"{out.style(status.run_id, 'bold')}{name} on {where}: {state}")
    lines += card(
        [
            ("step", _step_text(status)),
            ("loss", "" if status.loss is None else f"{status.loss:.4f}"),
            ("held-out", "" if status.held_out is None else held_out_text(status.held_out)),
            ("not applied", not_applied_text(status.not_applied)),
            ("speed", "" if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f} tok/s"),
            ("phase", phase_text(status.phase) if alive else ""),
            ("layout", status.topology),
            ("last sign", f"{duration(max(now - status.last_event, 0))} ago" if alive and status.last_event else ""),
            ("begun", _begun(status, now)),
            ("resumed", status.resumed_from),
            ("restart of", status.restarted_from),
            ("checkpoint", status.last_checkpoint),
            *_best_rows(status.best, status.last_checkpoint),
            ("release", status.release),
            ("note", status.note),
            ("directory", status.run_dir),
            ("message", status.message),
            ("hint", status.hint),
        ],
        out,
    )
    if status.traceback and status.state == Lifecycle.FAILED:
        lines += ["", *indented(status.traceback)]
    return lines


def alarm_lines(alarms: Sequence[Alarm], out: Stream) -> list[str]:
    """Return one line a kind of alarm: how often it came, and its newest message."""
    times: dict[str, int] = {}
    # A run of an older release keeps each occurrence as an alarm of its own, with a count of 1.
    for alarm in alarms:
        times[alarm.kind] = times.get(alarm.kind, 0) + alarm.count
    newest = {alarm.kind: alarm.message for alarm in alarms}
    label = out.style("ALARM", "red bold")
    return [
        f"{label} {one_line(kind)}: {one_line(newest[kind])}{f' ({count} times)' if count > 1 else ''}"
        for kind, count in times.items()
    ]


def indented(text: str) -> list[str]:
    """Return foreign text (a traceback, last log lines) made harmless and set off by two spaces."""
    return ["  " + harmless(line) for line in text.rstrip().splitlines()]


def held_out_text(measured: HeldOut | HeldOutMeasured) -> str:
    """Return one measurement on the held-out documents."""
    figures = f"loss {measured.loss:.4f}, accuracy {measured.accuracy:.3f}, accept {measured.accept_len:.2f}"
    return f"{figures} at step {measured.step}"


def not_applied_text(count: int) -> str:
    """Return how many steps left the weights as they were, "" for none."""
    return f"{count} step{'s' if count > 1 else ''}" if count else ""


def _best_rows(best: HeldOut | None, newest: str) -> list[tuple[str, str]]:
    """Return the best checkpoint's rows; its path has one of its own, for two figures and a path wrap at 80 columns."""
    if best is None:
        return []
    figures = f"held-out loss {best.loss:.4f} at step {best.step}"
    if best.checkpoint == newest:
        return [("best", f"the newest, {figures}")]
    return [("best", figures), ("", best.checkpoint)]


def _step_text(status: RunStatus) -> str:
    if not status.total_steps:
        return str(status.step) if status.step else ""
    return f"{status.step} of {status.total_steps} ({status.step / status.total_steps:.0%})"


def _begun(status: RunStatus, now: float) -> str:
    if not status.created:
        return ""
    by = f" by {status.by}" if status.by else ""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.created))
    return f"{stamp}, {duration(max(now - status.created, 0))} ago{by}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], out: Stream) -> list[str]:
    """Return a table with columns as wide as their longest cell; styled cells count by what is seen."""
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    lines = ["  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip() for row in rows]
    heading = "  ".join(cell.ljust(wide) for cell, wide in zip(headings, widths, strict=True)).rstrip()
    return [out.style(heading, "bold"), *lines]


def runs_lines(runs: Sequence[RunStatus], out: Stream, now: float | None = None) -> list[str]:
    """Return the table of runs, newest first."""
    now = time.time() if now is None else now
    # A column as wide as a run id: only where there is something in it, and room for it. `status` and --json always tell.
    roomy = not out.file.isatty() or width() >= _LINKED_WIDTH
    linked = roomy and any(run.restarted_from for run in runs)
    rows = [
        [
            run.run_id,
            run.state,
            f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step),
            "" if run.loss is None else f"{run.loss:.4f}",
            f"{duration(max(now - run.created, 0))} ago" if run.created else "",
            run.release,
            *([run.restarted_from] if linked else []),
        ]
        for run in runs
    ]
    # A registry may hold what an older release let in: names with line breaks, or of a megabyte.
    rows = [[one_line(cell) for cell in row] for row in rows]
    headings = ("run", "state", "step", "loss", "begun", "release", *(["restart of"] if linked else []))
    used = sum(max(map(len, column)) + 2 for column in zip(headings, *rows, strict=True))
    # What reads a pipe may search for a name: there it is cut only where no name of today would be.
    room = max(width() - used, _LEAST_NAME) if out.file.isatty() else _LONGEST_NAME
    named = [[*row, shortened(one_line(run.name), room)] for row, run in zip(rows, runs, strict=True)]
    return table((*headings, "name"), named, out)


def shortened(text: str, columns: int) -> str:
    """Return `text` in at most `columns` characters, the last of them an ellipsis where it was cut."""
    return text if len(text) <= columns else text[: columns - 1] + "…"


def plan_lines(training: Training, out: Stream) -> list[str]:
    """Return the resolved configuration on one screen: grouped, what differs from the default marked with *."""
    groups: dict[str, list[str]] = {}
    values = training.config.to_dict()
    changed = training.config.changed()
    for flag in config_flags():
        text = _value_text(values[flag.key])
        if flag.key in changed:
            groups.setdefault(flag.group, []).append(f"{flag.key}={text}*")
        elif text:
            groups.setdefault(flag.group, []).append(f"{flag.key}={text}")
    lines = [f"configuration: {training.base} ({training.base_origin}); * differs from the default"]
    for group, pairs in groups.items():
        for index, line in enumerate(wrapped(pairs, width() - 15)):
            words = " ".join(out.style(word, "bold") if word.endswith("*") else word for word in line)
            label = (group if index == 0 else "").ljust(12)
            lines.append(f"  {out.style(label, 'cyan')} {words}")
    return lines


def wrapped(words: Sequence[str], columns: int) -> list[list[str]]:
    """Return `words` dealt to lines of at most `columns`; none is broken, for a path must stay one to copy."""
    lines: list[list[str]] = [[]]
    for word in words:
        if lines[-1] and sum(len(other) + 1 for other in lines[-1]) + len(word) > columns:
            lines.append([])
        lines[-1].append(word)
    return lines


def _value_text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(str(item) for item in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return f"{value:g}" if isinstance(value, float) else str(value)


def phase_text(name: str) -> str:
    """Return a phase as a person writes it."""
    return "warm-up" if name == "warmup" else name


def event_text(event: Event) -> str:
    """Return what an event means to somebody who waits, "" for what he need not see."""
    if isinstance(event, Phase):
        took = f" ({duration(event.seconds)})" if event.seconds else ""
        who = "" if event.role == "agent" else f"{event.role}: "
        return f"{who}{phase_text(event.phase)}{f' {event.detail}' if event.detail else ''}{took}"
    if isinstance(event, WarmedUp):
        left = f", {size(event.free_bytes)} left at a peak of {size(event.peak_bytes)}" if event.peak_bytes else ""
        return f"{event.role} on {event.device}: {event.shape} in {duration(event.seconds)}{left}"
    if isinstance(event, RunStarted):
        begin = f"resumed from {event.resumed_from}" if event.resumed_from else "fresh"
        return f"{event.topology}, {event.total_steps} steps, {begin}"
    if isinstance(event, SaveProgress):
        return f"saving step {event.step}: {size(event.written)} of {size(event.total)}"
    if isinstance(event, CheckpointSaved):
        best = ", the best so far" if event.best else ""
        return f"checkpoint of step {event.step}{best}: {event.path} ({size(event.bytes)}, {duration(event.seconds)})"
    if isinstance(event, HeldOutMeasured):
        return f"held-out {held_out_text(event)}"
    if isinstance(event, AlarmRaised):
        return f"ALARM {event.alarm}: {event.message}"
    if isinstance(event, RunFinished):
        return f"{event.result} at step {event.step}{_refused(event)}"
    return event.text if isinstance(event, Message) else ""


def finished_text(event: RunFinished) -> str:
    """Return the log's last event with all its figures; the checkpoint has a line of its own before and after it."""
    trained = f", {event.tokens:,} tokens in {duration(event.seconds)}" if event.tokens else ""
    losses = f", loss {event.first_loss:.4f} to {event.last_loss:.4f}" if event.tokens else ""
    return f"{event.result} at step {event.step}{trained}{losses}{_refused(event)}"


def _refused(event: RunFinished) -> str:
    return f", {not_applied_text(event.not_applied)} not applied" if event.not_applied else ""


def first_step_line(status: RunStatus, step: Step | None, profile: PipelineProfile | None) -> str:
    """Return start's last line: step, loss, layout and, once measured, who waits."""
    number, loss = (status.step, status.loss) if step is None else (step.step, step.loss)
    parts = [f"step {number}"]
    if loss is not None:
        parts.append(f"loss {loss:.4g}")
    if status.topology:
        parts.append(status.topology)
    if profile is not None:
        parts.append(f"targets wait {profile.target_wait:.0%}, drafters {profile.drafter_wait:.0%}")
    return ", ".join(parts)
