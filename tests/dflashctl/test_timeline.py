"""The parts of a restart's time, from events alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.launch import took_text
from dflashctl.timeline import Timeline
from remote.protocol import events as ev
from remote.protocol.codec import plain


def phase(role, name, time, seconds=0.0):
    event = ev.Phase(time=time, role=role, phase=name, seconds=seconds)
    return {"kind": event.kind, **plain(event)}


def step(time, number=1):
    event = ev.Step(
        time=time, step=number, total_steps=9, epoch=0, loss=1, accuracy=0, accept_len=1, lr=1, grad_norm=1, tokens=1,
        tokens_per_second=1.0,
    )  # fmt: skip
    return {"kind": event.kind, **plain(event)}


BEFORE = [phase("agent", "preflight", 1.0), phase("agent", "preflight", 9.0, 8.0), phase("agent", "stopping", 9.0)]
OLD = [step(10.0, 700), phase("drafter", "training", 11.0, 500.0), phase("agent", "stopped", 21.0, 12.0)]
NEW = [
    phase("agent", "launched", 21.5),
    phase("target", "loading", 22.0), phase("drafter", "loading", 22.0), phase("drafter", "loading", 25.0, 3.0),
    phase("target", "loading", 40.5, 18.0),
    phase("drafter", "training", 42.0), phase("target", "training", 42.5), step(44.0), step(45.0, 2),
]  # fmt: skip


def parts(frames):
    timeline = Timeline()
    for frame in frames:
        timeline.hear(frame)
    return timeline.parts()


def test_each_part_ends_where_the_next_begins():
    found = parts(BEFORE + OLD + NEW)
    assert found == {"preflight": 8.0, "stop": 12.0, "load": 19.0, "warm-up": 1.5, "first step": 2.0}
    assert list(found) == ["preflight", "stop", "load", "warm-up", "first step"]
    assert took_text(found) == (
        "restarted in 42 s: preflight 8.0 s, stop 12 s, load 19 s, warm-up 1.5 s, first step 2.0 s"
    )


def test_a_trainer_that_tells_less_has_fewer_parts():
    assert parts([NEW[0], NEW[-2]]) == {"first step": 22.5}
    assert parts([*NEW[:5], NEW[-2]]) == {"load": 19.0, "first step": 3.5}


def test_a_launch_that_is_told_anew_makes_no_part_of_what_came_before_it():
    # The answer that held the launch was lost; asked again, the agent tells it later than it was.
    again = [phase("agent", "launched", 41.0), *NEW[1:]]
    assert parts(again) == {"first step": 2.0}
    # Within one command the first word counts.
    assert parts(BEFORE + OLD + NEW[:4] + again)["load"] == 19.0


@pytest.mark.parametrize("frame", [{}, {"kind": 3}, {"kind": "phase"}, {"kind": "phase", "time": "x"}, {"kind": "new"}])
def test_what_is_no_event_is_skipped(frame):
    assert parts([frame, *NEW]) == parts(NEW)


@given(st.lists(st.sampled_from(BEFORE + OLD + NEW), max_size=30))
def test_whatever_is_lost_or_doubled_no_part_is_negative(frames):
    assert all(seconds >= 0 for seconds in parts(frames).values())
