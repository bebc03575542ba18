"""JSON of records: everything comes back as it was, and what does not fit is refused, not guessed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.protocol.codec import dumps, from_plain, loads_object, plain
from remote.protocol.records import Alarm, ExitRecord, Lifecycle, RankError, RunSpec, RunState, RunStatus, StopRequest

RECORDS = (RunSpec, RunState, StopRequest, RankError, ExitRecord, RunStatus, Alarm)


@dataclass(frozen=True)
class Inner:
    number: float
    text: str = ""


@dataclass(frozen=True)
class Outer:
    inner: Inner
    many: tuple[Inner, ...] = ()
    named: dict[str, Inner] = field(default_factory=dict)
    perhaps: Inner | None = None
    either: int | str = 0
    maybe: float | None = None
    anything: Any = None


JSON = st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=5), max_size=4)
numbers = st.floats(allow_nan=True, allow_infinity=True)
inners = st.builds(Inner, numbers, st.text(max_size=20))
outers = st.builds(
    Outer,
    inners,
    st.lists(inners, max_size=3).map(tuple),
    st.dictionaries(st.text(max_size=5), inners, max_size=3),
    st.none() | inners,
    st.integers() | st.text(max_size=5),
    st.none() | numbers,
    st.none() | st.booleans() | st.lists(st.integers(), max_size=3),
)


@given(outers)
def test_what_is_written_is_read(value):
    text = dumps(value)
    assert text.isascii()
    # repr, because NaN is not equal to itself.
    assert repr(from_plain(Outer, loads_object(text))) == repr(value)
    assert repr(from_plain(Outer, loads_object(dumps(value, indent=1)))) == repr(value)


@pytest.mark.parametrize("record", RECORDS)
@given(data=st.data())
def test_every_record_comes_back(record, data):
    value = data.draw(st.builds(record, config=JSON) if record is RunSpec else st.from_type(record))
    kept = loads_object(dumps(value))
    assert dumps(from_plain(record, kept)) == dumps(value)
    assert dumps(from_plain(record, {**kept, "a_field_of_a_newer_version": [1, {}]})) == dumps(value)


@pytest.mark.parametrize("record", RECORDS)
@given(
    data=st.dictionaries(
        st.sampled_from(["run_id", "state", "since", "alarms", "time", "rank", "config", "argv"]),
        st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    )
)
def test_garbage_raises_value_error_and_nothing_else(record, data):
    try:
        from_plain(record, data)
    except ValueError:
        return
    assert set(data) & {each.name for each in dataclasses.fields(record)} or not data


@pytest.mark.parametrize(
    "data",
    [{}, {"inner": 1}, {"inner": {"number": True}}, {"inner": {"number": "1.0"}}, {"inner": {"number": None}},
     {"inner": {"number": 1, "text": 5}}, {"inner": {"number": 1}, "many": {}}, {"inner": {"number": 1}, "many": [1]},
     {"inner": {"number": 1}, "named": {"a": 1}}, {"inner": {"number": 1}, "either": True},
     {"inner": {"number": 1}, "either": 1.5}, {"inner": {"number": 10**400}}],
)  # fmt: skip
def test_wrong_types_are_refused(data):
    with pytest.raises(ValueError):
        from_plain(Outer, data)


def test_non_finite_floats_travel_as_words():
    assert dumps([math.nan, math.inf, -math.inf]) == '["NaN","Infinity","-Infinity"]'
    assert math.isnan(from_plain(Inner, {"number": "NaN"}).number)
    assert plain({"a": (1, Lifecycle.LOST)}) == {"a": [1, "lost"]}


@given(st.binary(max_size=100))
def test_bytes_are_an_object_or_a_value_error(data):
    with contextlib.suppress(ValueError):
        assert isinstance(loads_object(data), dict)


def test_deep_nesting_is_a_value_error():
    with pytest.raises(ValueError, match="nested"):
        loads_object('{"a":' + "[" * 100_000)
