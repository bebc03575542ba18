"""Following files that grow: every event once, whatever the rhythm of writer and reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote.agent.tail import EventTail, first_events, last_events, last_lines, read_tail, size_of
from remote.protocol.events import Message, encode

texts = st.text(max_size=20)


def message(text: str) -> Message:
    return Message(time=1.0, level="info", text=text)


def line(text: str) -> bytes:
    return encode(message(text)).encode() + b"\n"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.lists(texts, max_size=12), cuts=st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_each_event_comes_once_and_in_order(tmp_path: Path, said, cuts):
    path = tmp_path / "events.jsonl"
    path.unlink(missing_ok=True)
    data = b"".join(map(line, said))
    tail, heard, at = EventTail(path), [], 0
    for turn in range(len(data) + 1):
        with path.open("ab") as file:
            file.write(data[at : at + cuts[turn % len(cuts)]])
        at += cuts[turn % len(cuts)]
        heard += tail.poll()
        if at >= len(data):
            break
    assert [event.text for event in heard] == said
    assert tail.poll() == []


def test_a_file_that_is_not_there_yet_and_one_that_goes_away(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert tail.poll() == []
    path.write_bytes(line("a"))
    assert tail.poll() == [message("a")]
    path.unlink()
    assert tail.poll() == []


def test_a_truncated_file_begins_anew(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    path.write_bytes(line("first") + b'{"kind": "mess')
    assert tail.poll() == [message("first")]
    path.write_bytes(line("b"))
    assert tail.poll() == [message("b")]


def test_garbage_costs_its_own_line_alone(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(line("a") + b"\xff\x00garbage\n" + b'{"kind":"message"}\n' + b"\n" + line("b"))
    assert EventTail(path).poll() == [message("a"), message("b")]


def test_more_than_one_poll_takes(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(line("x" * 1000) * 6000)
    tail, counts = EventTail(path), []
    while events := tail.poll():
        counts.append(len(events))
    assert sum(counts) == 6000
    assert len(counts) > 1, "bounded, so that a supervisor that begins late is not blocked"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.lists(texts, max_size=8), size=st.integers(0, 600))
def test_the_end_and_the_beginning_of_a_file(tmp_path: Path, said, size):
    path = tmp_path / "events.jsonl"
    data = b"".join(map(line, said))
    path.write_bytes(data)
    newest_first = [event.text for event in last_events(path, size)]
    assert newest_first == said[::-1][: len(newest_first)]
    oldest = [event.text for event in first_events(path, size)]
    assert oldest == said[: len(oldest)]
    assert read_tail(path, size) == data[max(0, len(data) - size) :]
    assert size_of(path) == len(data)


@pytest.mark.parametrize(
    "ask", [lambda path: list(last_events(path)), first_events, lambda path: [*read_tail(path, 9)]]
)
def test_a_missing_file_is_empty(tmp_path, ask):
    assert ask(tmp_path / "nothing") == []
    assert size_of(tmp_path / "nothing") == 0
    assert last_lines(tmp_path / "nothing", 5) == ""


def test_last_lines_for_people(tmp_path):
    path = tmp_path / "train.log"
    path.write_bytes(b"one\ntwo \xff\nthree\nno newline")
    assert last_lines(path, 2) == "three\nno newline"
    assert last_lines(path, 3).startswith("two \N{REPLACEMENT CHARACTER}")
    assert last_lines(path, 99).splitlines()[0] == "one"
