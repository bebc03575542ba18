"""What went before the first step, in one line: the parts that ranks have told in their phases. Torch-free."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from remote.protocol import events as ev

TORCH = "torch"
"""The detail of the phase that imports it."""

OTHERS = "the other ranks"
"""The detail of the phase that joins them: process groups, sockets and the ring, the driver's context on the GPU."""

_PARTS = ("import", "join", "load target", "load drafter", "warm-up")


def _part(event: ev.Phase) -> str:
    """Return which part of a start a phase belongs to, "" for one that comes later."""
    if event.phase == "warmup":
        return "warm-up"
    if event.phase != "loading":
        return ""
    known = {TORCH: "import", OTHERS: "join"}
    return known.get(event.detail) or f"load {event.detail.partition(' ')[0]}"


def startup_line(events: Iterable[ev.Event], now: float) -> str:
    """Return 'first step after 41 s: import 6.1 s, ..., first step 1.5 s', "" where no rank has told when it began to train.

    `now`: when the first step was known, unix seconds. Ranks work side by side, and each part is that of the slowest: they
    say what to make shorter, and add up to more than the whole.
    """
    took: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    began = trains = now
    for event in events:
        if isinstance(event, ev.Phase) and event.rank >= 0:
            began = min(began, event.time)
            took[_part(event)][event.rank] += event.seconds
            if event.phase == "training":
                trains = min(trains, event.time)
    if trains == now:
        return ""
    parts = {name: max(took[name].values()) for name in _PARTS if name in took} | {"first step": now - trains}
    return f"first step after {now - began:.1f} s: " + ", ".join(f"{name} {took:.1f} s" for name, took in parts.items())


def startup_message(file: Path, rank: int) -> ev.Message | None:
    """Return the line for the first step, which is known now, from the run's events so far; None where they cannot be read."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    now = time.time()
    line = startup_line(ev.read_events(data), now)
    return ev.Message(time=now, rank=rank, level="info", text=line) if line else None
