"""The agent's side of the wire: requests of every kind, clients of every kind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote.agent.wire import Answer, ClientGone, Request
from remote.protocol.errors import DflashError
from remote.protocol.frames import Frame, FrameError, FrameParser, Kind, json_frame, new_nonce
from remote.protocol.loader import LOADER


def request_of(body: dict, *frames: Frame) -> Request:
    read, write = os.pipe()
    nonce = new_nonce()
    os.write(write, json_frame(nonce, Kind.REQUEST, body).encode() + b"".join(frame.encode() for frame in frames))
    os.close(write)
    try:
        request = Request.read(read)
        request._frames = iter(list(request._frames))
        return request
    finally:
        os.close(read)


def test_fields_are_typed():
    request = request_of(
        {"text": "a", "flag": True, "number": 3, "count": 4, "words": ["a"], "object": {"k": 1}, "null": None}
    )
    assert request.text("text", "") == "a"
    assert request.text("missing", "default") == request.text("null", "default") == "default"
    assert request.flag("flag", False) is True
    assert request.number("number", 0) == 3.0
    assert (request.count("count"), request.count("missing")) == (4, None)
    assert (request.words("words"), request.object("object")) == (["a"], {"k": 1})


@pytest.mark.parametrize(
    ("method", "value"),
    [
        (lambda request: request.text("x", ""), 5),
        (lambda request: request.flag("x", False), 1),
        (lambda request: request.number("x", 0), True),
        (lambda request: request.number("x", 0), "1"),
        (lambda request: request.number("x", 0), 10**400),
        (lambda request: request.count("x"), -1),
        (lambda request: request.count("x"), 1.5),
        (lambda request: request.words("x"), ["a", 1]),
        (lambda request: request.object("x"), []),
    ],
)
def test_what_does_not_fit_is_a_usage_error(method, value):
    with pytest.raises(DflashError) as caught:
        method(request_of({"x": value}))
    assert caught.value.code == 2


def frame(request_nonce: str, kind: Kind, payload: bytes = b"") -> Frame:
    return Frame(request_nonce, kind, payload)


@given(st.binary(max_size=200))
@settings(max_examples=50, deadline=None)
def test_a_stream_without_a_request_is_refused(noise):
    read, write = os.pipe()
    os.write(write, noise)
    os.close(write)
    try:
        with pytest.raises(FrameError):
            Request.read(read)
    finally:
        os.close(read)


def test_an_answer_survives_slow_readers_and_notices_gone_ones():
    read, write = os.pipe()
    with Answer("0" * 16, write) as answer:
        os.close(read)
        with pytest.raises(ClientGone):
            answer.say("anybody there?")
        for act in (answer.check, lambda: answer.result({})):
            with pytest.raises(ClientGone):
                act()
        answer.outlive_client()
        answer.check()
        answer.result({})
    os.close(write)


class TestProcess:
    """The real agent as a process."""

    @staticmethod
    def run(pyz, *arguments: str, sent: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-I", str(pyz), *arguments], input=sent, capture_output=True, timeout=30, check=False
        )

    def test_no_verb_no_request(self, agent_pyz):
        for arguments, sent in ((["nonsense"], b""), ([], b""), (["status"], b""), (["status"], b"hello\n" * 100)):
            done = self.run(agent_pyz, *arguments, sent=sent)
            assert (done.returncode, done.stdout) == (2, b"")
            assert done.stderr.startswith(b"agent: ")

    def test_noise_before_the_request_is_skipped(self, agent_pyz, tmp_path):
        sent = b"welcome to host\n" + json_frame("a" * 16, Kind.REQUEST, {"root": str(tmp_path)}).encode()
        frames = list(FrameParser("a" * 16).feed(self.run(agent_pyz, "status", sent=sent).stdout))
        assert [each.kind for each in frames] == [Kind.HELLO, Kind.RESULT]

    def test_a_bug_in_a_verb_is_an_error_frame_with_its_traceback(self, bare):
        run = bare.root.run("20200101-000000-aaaaaa")
        run.create()
        # What no code expects, as root too: a name that leads to itself.
        run.sup_lock.symlink_to(run.sup_lock)
        error = bare.call("logs").error
        assert error["error"] == "the agent failed in logs"
        assert "OSError: [Errno 40]" in error["cause"]
        assert "Traceback" in error["debug"]

    def test_the_loader_runs_a_verb_before_anything_is_there(self, agent_pyz, tmp_path):
        agent = agent_pyz.read_bytes()
        sent = f"{len(agent)}\n".encode() + agent + json_frame("b" * 16, Kind.REQUEST, {"root": str(tmp_path)}).encode()
        done = subprocess.run(
            [sys.executable, "-I", "-c", LOADER, "status"], input=sent, capture_output=True, timeout=30, check=True
        )
        frames = list(FrameParser("b" * 16).feed(done.stdout))
        assert frames[0].json()["agent"] == ""
        assert frames[1].json()["state"] == "none"

    @pytest.mark.parametrize("sent", [b"", b"12", b"100000\nshort", b"nonsense\n", b"999999999999999\n"])
    def test_the_loader_ends_loudly_without_its_agent(self, sent):
        done = subprocess.run(
            [sys.executable, "-I", "-c", LOADER, "status"], input=sent, capture_output=True, timeout=30, check=False
        )
        assert done.returncode != 0
        assert done.stdout == b""
        assert done.stderr

    def test_the_agent_answers_once_and_with_one_nonce(self, far):
        reply = far.call("status")
        assert [each.kind for each in reply.frames if each.kind in (Kind.RESULT, Kind.ERROR)] == [Kind.RESULT]
        assert len({each.nonce for each in reply.frames}) == 1
        assert reply.hello["protocol"] == 1
        assert reply.hello["root"] == str(far.root.path)


def test_the_loader_is_small_and_ascii():
    assert LOADER.isascii()
    assert len(LOADER) < 4096


def test_the_agent_imports_nothing_that_a_short_verb_does_not_need(far):
    done = subprocess.run(
        [sys.executable, "-I", "-X", "importtime", str(far.pyz), "status"],
        input=json_frame("a" * 16, Kind.REQUEST, {"root": str(far.root.path)}).encode(),
        capture_output=True,
        timeout=30,
        check=False,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines()}
    assert not imported & {"tarfile", "subprocess", "tempfile", "asyncio", "socket", "hashlib", "secrets", "shutil"} - {
        # What zipimport and the interpreter themselves may bring.
        *{line.rpartition("|")[2].strip() for line in bare_imports().splitlines()}
    }


def bare_imports() -> str:
    done = subprocess.run(
        [sys.executable, "-I", "-X", "importtime", "-c", "pass"], capture_output=True, timeout=30, check=False
    )
    return done.stderr.decode()


def test_work_that_outlives_its_client_is_not_held_up_by_a_full_pipe(monkeypatch):
    monkeypatch.setattr("remote.agent.wire._STUCK_SECONDS", 0.05)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    answer = Answer("0" * 16, writer)
    answer.outlive_client()
    answer.say("nobody reads this")
    # From then on nobody is waited for, until the work is done and an answer matters again.
    answer.say("nor this")
    answer.outlive_client(False)
    with pytest.raises(ClientGone):
        answer.check()
    os.close(reader)
    os.close(writer)
