"""Typed answers: what was written comes back, a newer agent's fields are skipped, nonsense is no answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.errors import NoAnswer
from dflashctl.results import (
    Deployed,
    LogEnd,
    Position,
    ReleaseEntry,
    Releases,
    Resumed,
    RolledBack,
    Runs,
    Started,
    Stopped,
    parse,
)
from remote.protocol.codec import dumps, loads_object, plain
from remote.protocol.records import Alarm, ExitRecord, RunStatus

texts = st.text(max_size=10)
numbers = st.floats(allow_nan=False)
alarms = st.lists(st.builds(Alarm, texts, texts, numbers, st.integers()), max_size=2).map(tuple)
statuses = st.builds(RunStatus, texts, texts, step=st.integers(), loss=st.none() | numbers, alarms=alarms)
exits = st.builds(
    ExitRecord, texts, texts, numbers, texts, code=st.none() | st.integers(), failed_rank=st.none() | st.integers()
)
entries = st.builds(ReleaseEntry, texts, numbers, st.booleans())
answers = st.one_of(
    st.builds(Deployed, texts, texts, st.booleans(), st.booleans(), texts),
    st.builds(Started, statuses),
    st.builds(Stopped, statuses, texts, st.integers()),
    st.builds(Runs, st.lists(statuses, max_size=3).map(tuple)),
    st.builds(Releases, texts, st.lists(entries, max_size=3).map(tuple)),
    st.builds(RolledBack, texts, texts),
    st.builds(Position, st.integers(), st.integers(), st.integers(), texts, texts),
    st.builds(LogEnd, texts, texts, st.none() | exits),
)


@given(answers)
def test_an_answer_survives_the_wire(answer):
    assert parse(type(answer), loads_object(dumps(answer))) == answer


@given(answers)
def test_fields_of_a_newer_agent_are_skipped(answer):
    assert parse(type(answer), plain(answer) | {"from_the_future": [1, {"x": None}]}) == answer


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Deployed, {}),
        (Deployed, {"release": "r", "root": "/", "changed": "yes", "sent": False}),
        (Started, {"status": None}),
        (Started, {"status": {"run_id": 3, "state": "running"}}),
        (Resumed, {"spec": None, "checkpoint": "/c", "step": 1}),
        (Resumed, {"checkpoint": "/c", "step": 1}),
        (Resumed, {"spec": {"run_id": "r", "argv": [], "environment": {}, "devices": []}, "step": "1"}),
        (Runs, {"runs": {}}),
        (Runs, {"runs": [3]}),
        (Releases, {"current": None, "releases": []}),
        (Position, {"device": 1, "inode": 2, "offset": "3"}),
        (Position, {"device": True, "inode": 2, "offset": 3}),
        (LogEnd, {"state": "x", "exit": {"run_id": "r"}}),
        (LogEnd, None),
        (LogEnd, []),
        (LogEnd, "state"),
    ],
)
def test_nonsense_is_no_answer_with_a_way_out(kind, data):
    with pytest.raises(NoAnswer) as caught:
        parse(kind, data)
    assert "dflashctl deploy" in caught.value.hint
    assert caught.value.cause


def test_a_position_moves_by_bytes_and_forgets_its_notice():
    assert Position(1, 2, 10, "r", "truncated").after(5) == Position(1, 2, 15, "r")


def test_a_loss_that_is_no_number_travels():
    status = parse(RunStatus, {"run_id": "r", "state": "failed", "loss": "NaN"})
    assert status.loss != status.loss
