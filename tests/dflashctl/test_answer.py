"""What the client makes of a stream: noise, tearing, silence, garbage, and any way of cutting it into pieces."""

from __future__ import annotations

import pytest
from farend import HELLO, far_end
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.agent_client import AgentClient
from dflashctl.errors import ConnectionLost, NoAnswer
from dflashctl.transport import Silence
from dflashctl.transport.memory import Memory
from remote.protocol.errors import DflashError, ExitCode
from remote.protocol.frames import Frame, FrameParser, Kind, json_frame


def client_of(memory: Memory) -> AgentClient:
    return AgentClient(memory, python="/usr/bin/python3", root="/far/root", release="0" * 12, pyz=lambda: b"PYZ")


def test_events_and_data_come_in_order_and_the_result_last():
    def play(verb, request, sent):
        yield from (
            HELLO,
            (Kind.EVENT, {"n": 1}),
            (Kind.HEARTBEAT, {}),
            (Kind.DATA, b"\x00\n"),
            (Kind.RESULT, {"ok": 1}),
        )

    with client_of(far_end(play)).call("logs", {}) as answer:
        assert list(answer) == [{"n": 1}, b"\x00\n"]
        assert answer.result == {"ok": 1}
        assert answer.hello["root"] == "/far/root"


@given(
    noise=st.binary(max_size=200).filter(lambda data: b" hello " not in data),
    payloads=st.lists(st.binary(max_size=300), max_size=5),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=60),
)
def test_any_noise_and_any_cutting_give_the_same_frames(noise, payloads, cuts):
    def handler(argv, sent):
        (request, *_) = FrameParser().feed(sent)
        stream = noise + b"\n" + json_frame(request.nonce, *HELLO).encode()
        stream += b"".join(Frame(request.nonce, Kind.DATA, payload).encode() for payload in payloads)
        stream += json_frame(request.nonce, Kind.RESULT, {"end": True}).encode()
        position, turn = 0, 0
        while position < len(stream):
            length = cuts[turn % len(cuts)]
            yield stream[position : position + length]
            position, turn = position + length, turn + 1

    with client_of(Memory(handler)).call("logs", {}) as answer:
        assert list(answer) == payloads
        assert answer.result == {"end": True}


def test_an_error_frame_becomes_the_agents_own_error_with_its_code():
    sent_error = DflashError("no such run", cause="none", hint="see runs", code=ExitCode.NO_RUN).to_json()

    def play(verb, request, sent):
        yield from (HELLO, (Kind.ERROR, {**sent_error, "debug": "Traceback: here"}))

    with pytest.raises(DflashError) as caught:
        client_of(far_end(play)).status("x")
    assert (caught.value.error, caught.value.code) == ("no such run", ExitCode.NO_RUN)
    assert "Traceback: here" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "ending",
    [
        [],
        [b"0123456789abcdef event 99"],
        [Silence()],
        [b"garbage between frames, long enough to be no header\n"],
        [b"0123456789abcdef result 2\n{}"],
    ],
    ids=["early end", "torn frame", "silence", "garbage", "frame of another request"],
)
def test_a_broken_answer_is_a_lost_connection(ending):
    def play(verb, request, sent):
        yield from (HELLO, (Kind.EVENT, {}), *ending)

    with pytest.raises(ConnectionLost) as caught:
        client_of(far_end(play)).status()
    assert caught.value.code == ExitCode.NO_ANSWER
    assert "mid-answer" in caught.value.error


def test_silence_before_hello_tells_what_was_said_instead():
    def play(verb, request, sent):
        yield from (b"Welcome to host7\n" * 5, Silence())

    with pytest.raises(NoAnswer) as caught:
        client_of(far_end(play, stderr="sudo: a password is required")).status()
    assert not isinstance(caught.value, ConnectionLost)
    assert "sudo: a password is required" in caught.value.cause
    assert caught.value.code == 8


def test_a_newer_protocol_is_refused():
    def play(verb, request, sent):
        yield (Kind.HELLO, {"protocol": 2})

    with pytest.raises(NoAnswer, match="another protocol"):
        client_of(far_end(play)).status()


def test_the_channel_is_closed_whatever_happens():
    def play(verb, request, sent):
        yield from (HELLO, (Kind.ERROR, {"error": "no"}))

    memory = far_end(play)
    with pytest.raises(DflashError):
        client_of(memory).status()
    assert [channel.closed for channel in memory.channels] == [True]
