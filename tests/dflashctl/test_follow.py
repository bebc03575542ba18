"""Following survives lost connections: whatever the cut, every byte comes once and in order."""

from __future__ import annotations

import pytest
from farend import HELLO, far_end
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.agent_client import AgentClient
from dflashctl.errors import ConnectionLost, NoAnswer
from dflashctl.follow import Follower, LineAssembler, LogRequest, Notice
from dflashctl.results import LogEnd
from dflashctl.transport import Silence
from remote.protocol.errors import DflashError, ExitCode
from remote.protocol.frames import Kind


def follower_of(play):
    client = AgentClient(far_end(play), python="p", root="/r", release="0" * 12, pyz=lambda: b"")
    pauses = []
    return Follower(client, LogRequest(follow=True), sleep=pauses.append), pauses


def log_server(log, pieces, breaks):
    """A far end that serves `log` from the asked offset, breaking off after as many bytes as `breaks` says."""
    calls = iter(breaks)

    def play(verb, request, sent):
        offset = request.get("offset", 0)
        yield HELLO
        yield (Kind.EVENT, {"file": "train", "device": 1, "inode": 2, "offset": offset})
        left = next(calls, None)
        while offset < len(log):
            piece = log[offset : offset + pieces]
            if left is not None and left < len(piece):
                yield (Kind.DATA, piece[:left])
                yield Silence()
                return
            yield (Kind.DATA, piece)
            offset += len(piece)
            left = None if left is None else left - len(piece)
        yield (Kind.RESULT, {"state": "finished"})

    return play


@given(
    log=st.binary(max_size=400),
    pieces=st.integers(1, 50),
    breaks=st.lists(st.integers(1, 60), max_size=8),
)
def test_no_byte_is_lost_or_doubled_wherever_the_connection_breaks(log, pieces, breaks):
    follower, _ = follower_of(log_server(log, pieces, breaks))
    items = list(follower)
    assert b"".join(item for item in items if isinstance(item, bytes)) == log
    assert items[-1] == LogEnd("finished")


def test_a_resume_without_the_offset_would_be_noticed():
    """The negative of the test above: a far end that ignores the position doubles bytes."""

    def deaf(verb, request, sent):
        return log_server(b"abcdef", 6, [3])(verb, {}, sent)

    calls = []

    def play(verb, request, sent):
        calls.append(request)
        return deaf(verb, request, sent) if len(calls) == 1 else log_server(b"abcdef", 6, [])(verb, {}, sent)

    follower, _ = follower_of(play)
    assert b"".join(item for item in follower if isinstance(item, bytes)) == b"abcabcdef"
    assert calls[1] == {"root": "/r", "run": "", "file": "train", "follow": True, "device": 1, "inode": 2, "offset": 3}


def test_it_backs_off_and_gives_up_after_a_minute():
    calls = []

    def play(verb, request, sent):
        calls.append(request)
        yield HELLO
        if len(calls) == 1:
            yield (Kind.EVENT, {"file": "train", "device": 1, "inode": 2, "offset": 0})
        yield Silence()

    follower, pauses = follower_of(play)
    with pytest.raises(ConnectionLost):
        list(follower)
    assert pauses == sorted(pauses)
    assert 60 <= sum(pauses) < 90


def test_a_destination_that_never_answers_is_an_error_at_once():
    follower, pauses = follower_of(lambda verb, request, sent: [Silence()])
    with pytest.raises(NoAnswer):
        list(follower)
    assert pauses == []


def test_the_agents_own_error_is_not_retried():
    def play(verb, request, sent):
        yield from (HELLO, (Kind.ERROR, DflashError("no such run", code=ExitCode.NO_RUN).to_json()))

    follower, pauses = follower_of(play)
    with pytest.raises(DflashError, match="no such run"):
        list(follower)
    assert pauses == []


def test_notices_pass_and_the_run_is_pinned_by_the_first_position():
    calls = []

    def play(verb, request, sent):
        calls.append(request["run"])
        yield from (HELLO, (Kind.EVENT, {"device": 1, "inode": 2, "offset": 0, "run": "r1", "notice": "truncated"}))
        if len(calls) == 1:
            yield Silence()
        yield (Kind.RESULT, {"state": "finished"})

    follower, _ = follower_of(play)
    texts = [item.text for item in follower if isinstance(item, Notice)]
    assert texts[0] == texts[2] == "truncated"
    assert "reconnecting" in texts[1]
    assert calls == ["", "r1"]


@given(st.lists(st.binary(max_size=30), max_size=20))
def test_lines_are_the_same_however_they_arrive(pieces):
    assembler = LineAssembler()
    lines = [line for piece in pieces for line in assembler.feed(piece)] + assembler.finish()
    whole = b"".join(pieces)
    assert b"\n".join(lines) == (whole.removesuffix(b"\n"))


def test_an_endless_line_does_not_fill_the_memory():
    assembler = LineAssembler()
    lines = [line for _ in range(20) for line in assembler.feed(b"x" * 50_000)] + assembler.finish()
    assert sum(map(len, lines)) == 1_000_000
    assert max(map(len, lines)) <= LineAssembler.LONGEST
