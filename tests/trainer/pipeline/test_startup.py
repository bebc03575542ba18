"""The time from a start to its first step, in its parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remote.protocol import events as ev
from trainer.pipeline.startup import OTHERS, TORCH, startup_line, startup_message


def phase(rank: int, name: str, end: float, seconds: float = 0.0, detail: str = "") -> ev.Phase:
    return ev.Phase(time=end, rank=rank, role="target", phase=name, detail=detail, seconds=seconds)


EVENTS: list[ev.Event] = [
    phase(-1, "preflight", 0.0, 1.0),
    phase(0, "loading", 10.0, detail=TORCH),
    phase(1, "loading", 16.0, 6.0, TORCH),
    phase(0, "loading", 15.5, 5.5, TORCH),
    phase(0, "loading", 18.5, 3.0, OTHERS),
    phase(1, "loading", 18.0, 2.0, OTHERS),
    phase(0, "loading", 38.5, 20.0, "target /m on cuda:0"),
    phase(1, "loading", 27.0, 9.0, "drafter on cuda:1"),
    phase(1, "warmup", 29.0, 2.0, "attention on cuda:1"),
    phase(1, "warmup", 39.0, 10.0, "12 shapes on cuda:1, 21.3 GiB left"),
    phase(0, "warmup", 49.5, 11.0, "30 shapes on cuda:0, 21.3 GiB left"),
    phase(1, "training", 50.0),
    phase(0, "training", 50.25),
]


def test_each_part_is_that_of_the_slowest_rank() -> None:
    assert startup_line(EVENTS, 51.5) == (
        "first step after 41.5 s: import 6.0 s, join 3.0 s, load target 20.0 s, load drafter 9.0 s, warm-up 12.0 s, "
        "first step 1.5 s"
    )


def test_a_part_that_was_lost_is_left_out() -> None:
    # A full disk costs events, not the run.
    assert startup_line([EVENTS[1], EVENTS[-1]], 51.0) == "first step after 41.0 s: import 0.0 s, first step 0.8 s"
    assert startup_line(EVENTS[:-2], 51.0) == ""
    assert startup_line([], 51.0) == ""


def test_events_that_cannot_be_read_give_no_line(tmp_path: Path) -> None:
    assert startup_message(tmp_path / "events.jsonl", 1) is None
    (tmp_path / "events.jsonl").write_text("".join(ev.encode(each) + "\n" for each in EVENTS))
    message = startup_message(tmp_path / "events.jsonl", 1)
    assert message is not None
    assert (message.rank, message.level) == (1, "info")


@pytest.mark.parametrize("layout", [{}, {"drafter_gpus": [0]}])
def test_a_run_tells_it_right_before_its_first_step(trained: Callable[..., Any], layout: dict[str, Any]) -> None:
    run = trained(**layout)
    told = [each.text for each in run.events(ev.Message) if each.text.startswith("first step after")]
    parts = ["import", "join", "load target", "load drafter", "warm-up", "first step"]
    (line,) = told
    assert re.findall(r"([a-z][a-z -]+?) [\d.]+ s", line.partition(": ")[2]) == parts
    kinds = [each.kind for each in run.events(ev.Event) if each.kind in ("step", "message")]
    assert kinds.index("message") < kinds.index("step")
