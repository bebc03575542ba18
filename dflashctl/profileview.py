"""The profile of a running pipeline as one table: rows are what time went into, columns the ranks. Pure, plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflashctl.views import size

Fields = Mapping[str, Any]
"""A profile's fields, as a log line gives them: numbers, or words where they are not finite."""

# In this order; waits and the model's own work always, what else there is where it took time.
_STAGES = {
    "read": "wait for input",
    "wait_states": "wait for states",
    "target_forward": "target forward",
    "pack": "pack",
    "publish": "publish",
    "wait_buffer": "wait to publish",
    "wait_slot": "wait for a slot",
    "wait_end": "wait for the end",
    "blocks": "blocks",
    "forward": "forward",
    "backward": "backward",
    "all_reduce": "all-reduce",
    "optimizer": "optimizer",
    "held_out": "held-out",
    "checkpoint": "checkpoint",
}
_ALWAYS = {
    "target": ("read", "target_forward", "pack", "wait_buffer"),
    "drafter": ("wait_states", "forward", "backward", "all_reduce", "optimizer"),
}
_LIMITS = {"targets": "targets limit", "drafters": "drafters limit", "neither": "balanced"}
_COPIES = {"copy_out": "(copy out)", "copy_in": "(copy in)"}

_LABEL, _SECONDS, _CELL = 17, 8, 6
_GAP = 4
_GIB = 1 << 30


def profile_lines(profile: Fields, ranks: Iterable[Fields], columns: int) -> list[str]:
    """Return the pipeline's profile and that of its ranks in at most `columns`, 80 or more; the first line is the summary's.

    Both halves side by side where there is room. `ranks` may hold profiles that are long past: those are left out.
    """
    oldest = _number(profile["time"]) - 2 * _number(profile["interval"]) - 1
    recent = sorted((each for each in ranks if each["time"] >= oldest), key=lambda each: each["rank"])
    roles = dict.fromkeys(each["role"] for each in recent)
    blocks = [_block(role, [each for each in recent if each["role"] == role], columns) for role in roles]
    return [*_summary(profile, columns), *_beside(blocks, columns)]


def _summary(profile: Fields, columns: int) -> list[str]:
    rate, targets, drafters = (
        f"{_number(profile[f'{side}tokens_per_second']):,.0f}" for side in ("", "target_", "drafter_")
    )
    waits = [f"{_number(profile[f'{side}_wait']):.0%}" for side in ("target", "drafter")]
    used, room = (_number(profile[name]) for name in ("ring_bytes", "ring_capacity"))
    limits = _LIMITS.get(profile["limits"], "unknown")
    first = (
        f"{_number(profile['interval']):.0f} s at {rate} tok/s, {limits}: targets wait {waits[0]}, drafters {waits[1]}"
    )
    alone = f"without waiting: targets {targets}, drafters {drafters} tok/s"
    more = f"padding {_number(profile['padding']):.1%}"
    if room:
        more += f"; ring {size(used)} of {size(room)}"
    both = f"{alone}; {more}"
    return [first, both] if len(both) <= columns else [first, alone, more]


def _block(role: str, ranks: Sequence[Fields], columns: int) -> list[str]:
    """Return the table of the ranks of one role."""
    single = len(ranks) == 1
    fits = _LABEL + _SECONDS + _CELL * (1 + len(ranks)) <= columns
    heads = [] if single else [_head(each) for each in ranks] if fits else ["least", "most"]
    title = f"{role} {ranks[0]['device']}" if single else f"{len(ranks)} {role if role == 'shared' else f'{role}s'}"

    def row(label: str, seconds: str, each: Sequence[float], spec: str, *, joined: float | None = None) -> str:
        """`each`: one figure a rank; `joined`: that of all, else their mean."""
        cells = [_mean(each) if joined is None else joined]
        cells += [] if single else each if fits else [min(each), max(each)]
        return _line(label, seconds, [format(cell, spec) for cell in cells])

    lines = [_line(title, "s", ["%", *heads])]
    lines += [
        row(label, f"{_mean(seconds):.1f}", [100 * share for share in _shares(seconds, ranks)], ".1f")
        for label, seconds in _times(role, ranks)
    ]
    lines.append(row("busy", "", [100 * _number(each["busy"]) for each in ranks], ".1f"))
    if any(_number(each["mfu"]) for each in ranks):
        lines.append(row("MFU", "", [100 * _number(each["mfu"]) for each in ranks], ".1f"))
    rates = [_number(each["tokens"]) / max(_number(each["interval"]), 1e-9) for each in ranks]
    lines.append(row("tok/s", "", rates, ".0f", joined=sum(rates)))
    total = max(_number(each["memory_total"]) for each in ranks) / _GIB
    if total:
        for label, name in ((f"GiB held of {total:.0f}", "memory_reserved"), ("GiB at the peak", "memory_peak")):
            sizes = [_number(each[name]) / _GIB for each in ranks]
            lines.append(row(label, "", sizes, ".1f", joined=max(sizes)))
    return lines


def _head(rank: Fields) -> str:
    # Older trainers did not say the rank.
    return f"#{rank['rank']}" if rank["rank"] >= 0 else str(rank["device"]).rpartition(":")[2][: _CELL - 1]


def _times(role: str, ranks: Sequence[Fields]) -> list[tuple[str, list[float]]]:
    """Return (label, seconds of each rank) of the rows of time: the stages, the rest, the total, and copies beside them."""
    names = [*_STAGES, *sorted({name for each in ranks for name in each["stages"]} - _STAGES.keys())]
    always = _ALWAYS.get(role, (*_ALWAYS["target"], *_ALWAYS["drafter"]))
    intervals = [_number(each["interval"]) for each in ranks]
    stages = {name: [_number(each["stages"].get(name, 0.0)) for each in ranks] for name in names}
    rows = [
        (_label(name, role), seconds)
        for name, seconds in stages.items()
        if (name in always and (role in _ALWAYS or any(seconds))) or max(_shares(seconds, ranks)) >= 0.0005
    ]
    staged = [sum(seconds[place] for seconds in stages.values()) for place in range(len(ranks))]
    rows.append(("other", [max(whole - part, 0.0) for whole, part in zip(intervals, staged, strict=True)]))
    rows.append(("total", intervals))
    copies = [(label, [_number(each[name]) for each in ranks]) for name, label in _COPIES.items()]
    return [*rows, *(each for each in copies if any(each[1]))]


def _label(name: str, role: str) -> str:
    if name == "target_forward" and role == "target":
        return "forward"
    return _STAGES.get(name, name.replace("_", " "))[: _LABEL - 1]


def _shares(seconds: Sequence[float], ranks: Sequence[Fields]) -> list[float]:
    return [part / max(_number(each["interval"]), 1e-9) for part, each in zip(seconds, ranks, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _line(label: str, seconds: str, cells: Sequence[str]) -> str:
    return f"{label:<{_LABEL}}{seconds:>{_SECONDS}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)


def _beside(blocks: Sequence[Sequence[str]], columns: int) -> list[str]:
    """Return the blocks one under another, or side by side where all of them fit."""
    widths = [max(map(len, block)) for block in blocks]
    if sum(widths) + _GAP * (len(blocks) - 1) > columns:
        return [line for block in blocks for line in block]
    rows = max(map(len, blocks), default=0)
    padded = [
        [line.ljust(wide) for line in block] + [" " * wide] * (rows - len(block))
        for block, wide in zip(blocks, widths, strict=True)
    ]
    return [(" " * _GAP).join(lines).rstrip() for lines in zip(*padded, strict=True)]


def _number(value: Any) -> float:
    """Return a figure of a log line, where NaN and Infinity travel as words."""
    return float(value)
