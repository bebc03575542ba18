"""Every event a run emits, declared once with unit and meaning.

events.jsonl holds one event a line; the human log line, the tables and docs/metrics.md come from the same declaration.
A field with a `line` format appears in the log line; `parse_line(render_line(e))` gives those back at that precision.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar

from remote.protocol.codec import dumps, from_plain, loads_object, plain


def metric(help: str, *, unit: str = "", line: str | None = None, default: Any = dataclasses.MISSING) -> Any:
    """Declare an event field: its meaning, unit, format in the log line (None: not in it) and default."""
    metadata = {"help": help, "unit": unit, "line": line}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events. `time` is unix seconds, `rank` the global rank it arose on (-1: the run as a whole)."""

    kind: ClassVar[str] = ""

    time: float = metric("when it happened", unit="s since 1970")
    rank: int = metric("global rank it arose on; -1 for the run as a whole", default=-1)


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    kind: ClassVar[str] = "run_started"

    run_id: str = metric("the run", line="s")
    topology: str = metric("targets and drafters, e.g. '5 targets / 3 drafters on cuda'", line="s")
    total_steps: int = metric("optimizer steps of the whole run", line="d")
    first_step: int = metric(
        "the step that is trained first: 1, or the one after the checkpoint resumed from", line="d"
    )
    resumed_from: str = metric("checkpoint directory, empty for a fresh run", line="s", default="")


@dataclass(frozen=True, kw_only=True)
class Phase(Event):
    kind: ClassVar[str] = "phase"

    role: str = metric("leader, target or drafter", line="s")
    phase: str = metric("loading, warmup, training, saving, finishing", line="s")
    detail: str = metric("what exactly", line="s", default="")
    seconds: float = metric("how long the piece of work took; 0 at its beginning", unit="s", line=".2f", default=0.0)


@dataclass(frozen=True, kw_only=True)
class WarmedUp(Event):
    kind: ClassVar[str] = "warmed_up"

    role: str = metric("target or drafter: whose shape it is", line="s")
    device: str = metric("device of the rank", line="s")
    shape: str = metric(
        "what was run once: documents by padded width of a target's batch, positions and blocks of a drafter's row",
        line="s",
    )
    seconds: float = metric("how long it took, with the tuning of its kernels", unit="s", line=".3f")
    peak_bytes: int = metric("most bytes in tensors at once meanwhile; 0 on a CPU", unit="B", line="d", default=0)
    free_bytes: int = metric(
        "bytes of the device that could still be had at that moment", unit="B", line="d", default=0
    )


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    kind: ClassVar[str] = "step"

    step: int = metric("optimizer step, counted from 1", line="d")
    total_steps: int = metric("optimizer steps of the whole run", line="d")
    epoch: int = metric("epoch of the step's first micro-batch, counted from 0", line="d")
    loss: float = metric(
        "weighted loss of the objective over all ranks and micro-batches of the step", unit="nats", line=".4f"
    )
    accuracy: float = metric("share of supervised positions whose argmax is the label", line=".4f")
    accuracy_by_row: tuple[float, ...] = metric("accuracy of block rows 1 to block size - 1", default=())
    accept_len: float = metric(
        "mean over blocks of 1 + leading correct rows (teacher-forced)", unit="tokens", line=".3f"
    )
    lr: float = metric("learning rate of the step", line=".3e")
    grad_norm: float = metric("global gradient norm before clipping", line=".4f")
    tokens: int = metric("non-padding tokens trained in the step", unit="tokens", line="d")
    tokens_per_second: float = metric(
        "non-padding tokens trained per second since the last step", unit="tok/s", line=".1f"
    )
    eta_seconds: float = metric("time left at the pace so far", unit="s", line=".0f", default=0.0)
    applied: bool = metric("whether the optimizer step was applied", line="s", default=True)


@dataclass(frozen=True, kw_only=True)
class StageProfile(Event):
    kind: ClassVar[str] = "stage_profile"

    rank: int = metric("global rank whose time it is", line="d", default=-1)
    role: str = metric("target, drafter or shared", line="s")
    device: str = metric("device of the rank", line="s")
    interval: float = metric(
        "length of the profile interval; on a GPU as the device saw it, up to a step behind the host",
        unit="s",
        line=".2f",
    )
    tokens: int = metric("non-padding tokens in the interval", unit="tokens", line="d")
    stages: dict[str, float] = metric(  # noqa: RUF009  the call declares a field, it makes no shared default
        "seconds in each stage of the interval, without overlap; on a GPU those of the device, so that a wait is what it "
        "stood idle for",
        unit="s",
        line="json3",
    )
    copy_out: float = metric(
        "seconds in which states were copied out of the GPU, beside the stages", unit="s", line=".3f", default=0.0
    )
    copy_in: float = metric(
        "seconds in which states were copied into the GPU, beside the stages", unit="s", line=".3f", default=0.0
    )
    busy: float = metric(
        "share of the interval in stages in which the device computes, the gaps between their kernels included",
        line=".3f",
        default=0.0,
    )
    mfu: float = metric(
        "FLOP/s of the model's matrix products as a share of what one large product reached on this device before the run; "
        "0: not measured",
        line=".3f",
        default=0.0,
    )
    flops_per_second: float = metric(
        "FLOP/s of the matrix products that the tokens need, attention scores and recomputation left out",
        unit="FLOP/s",
        default=0.0,
    )
    memory_allocated: int = metric("bytes in tensors on the device now; 0 on a CPU", unit="B", default=0)
    memory_reserved: int = metric(
        "bytes that the allocator holds on the device, what others cannot use", unit="B", line="d", default=0
    )
    memory_peak: int = metric("most bytes in tensors at once, in training so far", unit="B", line="d", default=0)
    memory_total: int = metric("bytes the device has", unit="B", line="d", default=0)
    ring_bytes: int = metric("bytes this target has published and no drafter has taken", unit="B", default=0)


@dataclass(frozen=True, kw_only=True)
class PipelineProfile(Event):
    kind: ClassVar[str] = "pipeline_profile"

    interval: float = metric("length of the profile interval", unit="s", line=".2f")
    target_tokens_per_second: float = metric("what the targets would do without waiting", unit="tok/s", line=".1f")
    drafter_tokens_per_second: float = metric("what the drafters would do without waiting", unit="tok/s", line=".1f")
    tokens_per_second: float = metric("what the pipeline did", unit="tok/s", line=".1f")
    target_wait: float = metric("share of the interval the targets waited", line=".3f")
    drafter_wait: float = metric("share of the interval the drafters waited for states", line=".3f")
    ring_bytes: int = metric("bytes of published, unconsumed states at the end of the interval", unit="B", line="d")
    ring_capacity: int = metric("bytes the ring can hold", unit="B", line="d")
    padding: float = metric("share of the target's positions that were padding", line=".3f")
    limits: str = metric("which side limits: targets, drafters or neither", line="s")


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    kind: ClassVar[str] = "checkpoint_saved"

    step: int = metric("the last step it contains", line="d")
    path: str = metric("its directory", line="s")
    bytes: int = metric("its size", unit="B", line="d")
    seconds: float = metric("how long saving took", unit="s", line=".2f")
    best: bool = metric("whether its held-out loss is the lowest so far, so that it is kept", line="s", default=False)


@dataclass(frozen=True, kw_only=True)
class HeldOutMeasured(Event):
    kind: ClassVar[str] = "held_out"

    step: int = metric("the step whose drafter was measured", line="d")
    loss: float = metric("decayed cross-entropy over the held-out documents", unit="nats", line=".4f")
    accuracy: float = metric("share of their supervised positions whose argmax is the label", line=".4f")
    accept_len: float = metric(
        "mean over their blocks of 1 + leading correct rows (teacher-forced)", unit="tokens", line=".3f"
    )
    seconds: float = metric("how long measuring took", unit="s", line=".2f")


@dataclass(frozen=True, kw_only=True)
class SaveProgress(Event):
    kind: ClassVar[str] = "save_progress"

    step: int = metric("the step being saved", line="d")
    written: int = metric("bytes written so far", unit="B", line="d")
    total: int = metric("bytes to write", unit="B", line="d")


@dataclass(frozen=True, kw_only=True)
class AlarmRaised(Event):
    kind: ClassVar[str] = "alarm"

    alarm: str = metric("non_finite, loss_not_positive, accuracy_one, torn_metric, wrong_copy, stall, ...", line="s")
    message: str = metric("what was seen and where it arose", line="s")
    step: int = metric("the step it belongs to", line="d", default=0)


@dataclass(frozen=True, kw_only=True)
class Message(Event):
    kind: ClassVar[str] = "message"

    level: str = metric("info or warning", line="s")
    text: str = metric("what happened", line="s")


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    kind: ClassVar[str] = "run_finished"

    result: str = metric("finished, stopped or failed", line="s")
    step: int = metric("the last step trained", line="d")
    checkpoint: str = metric("the last complete checkpoint, empty if there is none", line="s", default="")
    seconds: float = metric("time spent in training steps", unit="s", line=".1f", default=0.0)
    tokens: int = metric("non-padding tokens trained by this run", unit="tokens", line="d", default=0)
    first_loss: float = metric("loss of the first step", unit="nats", line=".4f", default=0.0)
    last_loss: float = metric("loss of the last step", unit="nats", line=".4f", default=0.0)
    not_applied: int = metric(
        "steps refused for numbers that are not finite, or without a supervised position", line="d", default=0
    )


KINDS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        RunStarted, Phase, WarmedUp, Step, StageProfile, PipelineProfile, CheckpointSaved, HeldOutMeasured, SaveProgress,
        AlarmRaised, Message, RunFinished,
    )
}  # fmt: skip


def encode(event: Event) -> str:
    """Return the event's line in events.jsonl, without the newline."""
    return dumps({"kind": event.kind, **plain(event)})


def decode(line: str | bytes) -> Event | None:
    """Parse a line of events.jsonl; None for a kind of a newer writer. Raises ValueError when it is no event."""
    data = loads_object(line)
    kind = data.get("kind")
    if not isinstance(kind, str):
        raise ValueError("event without a kind")
    cls = KINDS.get(kind)
    return None if cls is None else from_plain(cls, data)


def read_events(data: bytes) -> Iterator[Event]:
    """Yield the known events of complete lines in `data`; a torn last line, unknown kinds and garbage are skipped."""
    # splitlines() would also cut at a lone CR, or U+2028 in decoded text.
    for line in data.split(b"\n")[:-1]:
        try:
            event = decode(line)
        except ValueError:
            continue
        if event is not None:
            yield event


E_ = TypeVar("E_", bound=Event)

_KEY = re.compile(r" *([a-z_]+)=")
_JSON = json.JSONDecoder()
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z ([a-z_]+)(?: (.*))?")


def line_fields(cls: type[Event]) -> list[dataclasses.Field[Any]]:
    """Return the fields that the log line of this kind carries, in order."""
    return [field for field in dataclasses.fields(cls) if field.metadata.get("line") is not None]


def _render_value(value: Any, spec: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if spec == "json3":
        # A line is for reading; events.jsonl has every digit.
        return dumps({key: round(item, 3) for key, item in value.items()})
    if isinstance(value, float):
        return str(plain(value)) if plain(value) != value else format(value, spec)
    if isinstance(value, int):
        return format(value, spec)
    return dumps(value)


def render_line(event: Event) -> str:
    """Return the human log line: UTC time, kind, key=value pairs."""
    # UTC: laptop and container seldom agree on a zone.
    stamp = datetime.fromtimestamp(event.time, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
    pairs = [
        f"{field.name}={_render_value(getattr(event, field.name), field.metadata['line'])}"
        for field in line_fields(type(event))
    ]
    return " ".join([f"{stamp}Z", event.kind, *pairs])


def _parse_value(value: Any, is_json: bool, hint: str) -> Any:
    """Return a pair's value as the field's type. Raises ValueError when it is of another."""
    if is_json or hint == "str" or hint.startswith("dict"):
        if not isinstance(value, str if hint == "str" else dict) or not is_json:
            raise ValueError(f"{value!r} is no {hint}")
        return value  # pyright: ignore[reportUnknownVariableType]
    if hint == "bool":
        return value == "yes"
    if hint == "int":
        return int(value)
    return value if value in ("NaN", "Infinity", "-Infinity") else float(value)


def _pairs(text: str) -> Iterator[tuple[str, Any, bool]]:
    """Yield key, value, and whether the value was JSON (strings and dicts are; they may hold spaces and `=`)."""
    position = 0
    while (match := _KEY.match(text, position)) is not None:
        position = match.end()
        if text[position : position + 1] in ('"', "{"):
            value, position = _JSON.raw_decode(text, position)
            yield match[1], value, True
        else:
            word = text[position:].partition(" ")[0]
            position += len(word)
            yield match[1], word, False


def parse_line(line: str) -> dict[str, Any] | None:
    """Return the fields of a rendered log line with `kind` and `time`, or None when the line is none of ours.

    A field that an older writer did not know has its default; a line without a field that has none was cut short.
    """
    match = _LINE.fullmatch(line.strip())
    if match is None or (cls := KINDS.get(match[2])) is None:
        return None
    hints = {field.name: str(field.type) for field in line_fields(cls)}
    values: dict[str, Any] = {"kind": cls.kind}
    values |= {field.name: field.default for field in line_fields(cls) if field.default is not dataclasses.MISSING}
    try:
        values["time"] = datetime.strptime(match[1], "%Y-%m-%dT%H:%M:%S.%f").replace(tzinfo=UTC).timestamp()
        for key, value, is_json in _pairs(match[3] or ""):
            if key in hints:
                values[key] = _parse_value(value, is_json, hints[key])
    except (ValueError, RecursionError):  # one of ours cut short, or somebody else's line that looks like ours
        return None
    return values if hints.keys() <= values.keys() else None
