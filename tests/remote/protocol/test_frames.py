"""Frames: what one end writes the other reads, whatever surrounds or cuts it."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from remote.protocol.frames import MAX_DATA, MAX_PAYLOAD, Frame, FrameError, FrameParser, Kind, json_frame, new_nonce

NONCE = "0123456789abcdef"
frames = st.builds(Frame, st.just(NONCE), st.sampled_from(Kind), st.binary(max_size=200))
answers = st.lists(frames, min_size=1, max_size=8)
noise = st.one_of(st.binary(max_size=300), st.text(max_size=100).map(lambda text: text.encode()))


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """Cut bytes into pieces of the given sizes, over and over."""
    pieces, at, turn = [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        pieces.append(data[at : at + size])
        at, turn = at + size, turn + 1
    return pieces


def parse(pieces: list[bytes], nonce: str | None = NONCE) -> list[Frame]:
    parser = FrameParser(nonce)
    found = [frame for piece in pieces for frame in parser.feed(piece)]
    assert not parser.pending
    return found


@given(answers, st.lists(st.integers(1, 64), min_size=1, max_size=8), noise)
def test_frames_survive_any_cut_and_any_noise_before_them(sent, sizes, before):
    assume(NONCE.encode() not in before)
    assert parse(cut(before + b"".join(frame.encode() for frame in sent), sizes)) == sent


@given(answers, st.data())
def test_a_torn_end_is_pending_and_nothing_is_made_up(sent, data):
    whole = b"".join(frame.encode() for frame in sent)
    length = data.draw(st.integers(0, len(whole)))
    parser = FrameParser(NONCE)
    found = list(parser.feed(whole[:length]))
    assert found == sent[: len(found)]
    rest = whole[:length][sum(len(frame.encode()) for frame in found) :]
    # Only a torn first header is not known to be one of ours yet.
    assert parser.pending == bool(rest and (found or b"\n" in rest[:46]))


@given(answers, st.binary(min_size=50, max_size=80), answers)
def test_garbage_between_frames_is_an_error(first, garbage, second):
    assume(b"\n" not in garbage or not garbage.startswith(NONCE.encode()))
    assume(not any(garbage.startswith(frame.encode()[:20]) for frame in second))
    stream = b"".join(frame.encode() for frame in first) + garbage + b"".join(frame.encode() for frame in second)
    with pytest.raises(FrameError):
        list(FrameParser(NONCE).feed(stream))


@given(st.binary(max_size=2000))
def test_nothing_but_noise_yields_nothing_and_stays_small(data):
    assume(NONCE.encode() not in data)
    parser = FrameParser(NONCE)
    assert list(parser.feed(data)) == []
    assert len(parser._buffer) <= 64
    assert len(parser.noise) <= FrameParser.NOISE_KEPT
    assert data.startswith(parser.noise) or len(data) > FrameParser.NOISE_KEPT


def test_the_end_of_the_noise_is_kept_for_the_error_message():
    parser = FrameParser(NONCE)
    list(parser.feed(b"x" * 10_000 + b"lxc-attach: 200: No such file\n" + b"y" * 46))
    assert b"No such file" in parser.noise


def test_a_frame_of_another_nonce_before_ours_is_noise_and_after_it_an_error():
    other = json_frame("f" * 16, Kind.HELLO, {}).encode()
    ours = json_frame(NONCE, Kind.HELLO, {}).encode()
    assert [frame.nonce for frame in FrameParser(NONCE).feed(other + ours)] == [NONCE]
    with pytest.raises(FrameError, match="another request"):
        list(FrameParser(NONCE).feed(ours + other))


def test_the_agent_learns_the_nonce_from_the_request():
    stream = b"Last login: today\n" + b"a" * 16 + b" data 1\nx" + json_frame(NONCE, Kind.REQUEST, {"a": 1}).encode()
    parser = FrameParser()
    assert [frame.json() for frame in parser.feed(stream)] == [{"a": 1}]
    assert parser.nonce == NONCE


@pytest.mark.parametrize(
    "header",
    [b"0123456789abcdef hello 05\n", b"0123456789abcdef HELLO 5\n", b"0123456789abcdef unknown 5\n",
     b"0123456789abcdef data 1048577\n", b"0123456789abcdef result 16777217\n", b"0123456789ABCDEF hello 5\n",
     b"0123456789abcdef  hello 5\n", b"0123456789abcdef hello -5\n", b"\n"],
)  # fmt: skip
def test_bad_headers_after_the_first_frame(header):
    parser = FrameParser(NONCE)
    list(parser.feed(json_frame(NONCE, Kind.HELLO, {}).encode()))
    with pytest.raises(FrameError):
        list(parser.feed(header + b" " * 60))


def test_over_long_payloads_are_not_written_either():
    assert Frame(NONCE, Kind.DATA, b"x" * MAX_DATA).encode()
    with pytest.raises(FrameError):
        Frame(NONCE, Kind.DATA, b"x" * (MAX_DATA + 1)).encode()
    with pytest.raises(FrameError):
        Frame(NONCE, Kind.RESULT, b"x" * (MAX_PAYLOAD + 1)).encode()


def test_a_payload_that_is_no_object():
    for payload in (b"", b"[]", b"{", b"\xff"):
        with pytest.raises(FrameError):
            Frame(NONCE, Kind.RESULT, payload).json()


def test_nonces_differ():
    drawn = {new_nonce() for _ in range(100)}
    assert len(drawn) == 100
    assert {len(nonce) for nonce in drawn} == {16}
