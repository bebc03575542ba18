"""Events: the file, the log line, and both read back."""

from __future__ import annotations

import dataclasses
import math
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.protocol.codec import plain
from remote.protocol.events import (
    KINDS,
    Message,
    Step,
    decode,
    encode,
    line_fields,
    parse_line,
    read_events,
    render_line,
)

NAMES = st.text(string.ascii_lowercase + '_ ="{}', min_size=1, max_size=8)
BY_TYPE = {
    "str": st.text(max_size=30),
    "int": st.integers(-(10**12), 10**12),
    "bool": st.booleans(),
    "float": st.floats(-1e12, 1e12) | st.sampled_from([math.nan, math.inf, -math.inf]),
    "tuple[float, ...]": st.lists(st.floats(0, 1) | st.just(math.nan), max_size=4).map(tuple),
    "dict[str, float]": st.dictionaries(NAMES, st.floats(-1e6, 1e6), max_size=4),
}


@st.composite
def some_event(draw: st.DrawFn):
    cls = draw(st.sampled_from(list(KINDS.values())))
    values = {field.name: draw(BY_TYPE[str(field.type)]) for field in dataclasses.fields(cls)}
    return cls(**{**values, "time": draw(st.floats(0, 4e9)), "rank": draw(st.integers(-1, 100))})


def expected(event) -> dict:
    """Return the fields of the line, each at the precision that its declaration gives."""
    kept = {}
    for field in line_fields(type(event)):
        value, spec = getattr(event, field.name), field.metadata["line"]
        if isinstance(value, float) and math.isfinite(value):
            value = float(format(value, spec))
        elif isinstance(value, dict):
            value = {key: round(item, 3) for key, item in value.items()}
        kept[field.name] = plain(value)
    return kept


@given(some_event())
def test_a_line_of_the_file_is_read_back(event):
    line = encode(event)
    assert line.isascii()
    assert "\n" not in line
    assert repr(decode(line)) == repr(event)


@given(some_event())
def test_a_line_of_the_log_is_read_back_at_its_precision(event):
    line = render_line(event)
    assert "\n" not in line
    parsed = parse_line(line)
    assert parsed is not None
    assert parsed.pop("kind") == event.kind
    assert abs(parsed.pop("time") - event.time) < 0.0011
    assert parsed == expected(event)


@given(st.text(max_size=200))
def test_other_peoples_lines_are_not_ours(line):
    parse_line(line)
    assert parse_line("Epoch 1: 100%|████| loss=1.0") is None


@given(some_event(), st.data())
def test_a_torn_log_line_never_raises(event, data):
    line = render_line(event)
    parse_line(line[: data.draw(st.integers(0, len(line)))])


@pytest.mark.parametrize(
    "text",
    [
        "step step=4 total_steps=9",
        "step step=NaN",
        'stage_profile role="x" device="c" interval=1.0 tokens=1 stages=5',
        'stage_profile role="x" device="c" interval=1.0 tokens=1 stages="x"',
        'stage_profile role={"a":1} device="c" interval=1.0 tokens=1 stages={}',
        "message level=info text=bare",
    ],
)
def test_a_line_without_all_its_fields_as_declared_is_none_of_ours(text):
    # A view that formats the fields of a step must find each of them, of its type.
    assert parse_line(f"2026-11-30T17:36:17.854Z {text}") is None


def test_a_field_of_a_later_writer_has_its_default_in_an_older_line():
    line = '2026-11-30T17:36:17.854Z phase role="target" phase="loading"'
    parsed = parse_line(line)
    assert parsed is not None
    assert parsed == parse_line(line + ' detail="" seconds=0.00')


@given(st.lists(some_event(), max_size=5), st.data())
def test_a_torn_last_line_waits_and_garbage_is_skipped(events, data):
    lines = [encode(event).encode() + b"\n" for event in events]
    noise = data.draw(
        st.sampled_from(
            [b"", b"\xff\n", b"{}\n", b'{"kind":"newer"}\n', b'{"kind":[]}\n', b"null\n", b'{"kind":"step"}\n']
        )
    )
    torn = data.draw(st.sampled_from([b"", b'{"kind":"st']))
    found = list(read_events(noise.join([b"", *lines]) + torn))
    assert repr(found) == repr(events)


@pytest.mark.parametrize("cls", KINDS.values())
def test_every_field_says_what_it_means(cls):
    for field in dataclasses.fields(cls):
        assert field.metadata["help"], (cls.kind, field.name)
        assert str(field.type) in BY_TYPE


def test_a_line_as_a_person_sees_it():
    step = Step(time=1764518400.5, step=1, total_steps=20, epoch=0, loss=11.9, accuracy=0.0, accept_len=1.0, lr=6e-4,
                grad_norm=math.nan, tokens=100, tokens_per_second=14500.0)  # fmt: skip
    assert render_line(step).startswith("2025-11-30T16:00:00.500Z step step=1 total_steps=20 epoch=0 loss=11.9000")
    assert "grad_norm=NaN" in render_line(step)
    assert render_line(Message(time=0.0, level="info", text='a "b"\n')).endswith('text="a \\"b\\"\\n"')


def test_no_event_without_a_kind():
    for line in ("{}", '{"kind": 5}', "[]", "", '{"kind": "step"}'):
        with pytest.raises(ValueError):
            decode(line)
    assert decode('{"kind": "from_the_future", "x": 1}') is None
