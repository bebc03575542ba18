"""Which agent is asked, how often, and what travels."""

from __future__ import annotations

import io
import tarfile
import threading
import time

import pytest
from farend import HELLO, far_end, strip_agent

from dflashctl.agent_client import STATUS_SECONDS, AgentClient, StartRequest
from dflashctl.errors import ConnectionLost, NoAnswer
from dflashctl.release import Release
from dflashctl.results import Deployed
from dflashctl.transport import EXPLANATION_SECONDS, Silence
from dflashctl.transport.memory import Memory
from dflashctl.transport.pct import PCT, Pct
from remote.protocol.codec import plain
from remote.protocol.errors import DflashError
from remote.protocol.frames import FrameParser, Kind, json_frame
from remote.protocol.layout import new_run_id
from remote.protocol.loader import LOADER
from remote.protocol.records import RunSpec, RunStatus

RELEASE = Release({"agent.pyz": b"zip", "remote/x.py": b"x = 1\n", "trainer/big.bin": b"\x07" * 3_000_000})


def answering(result):
    def play(verb, request, sent):
        yield from (HELLO, (Kind.RESULT, result))

    return far_end(play)


def client_of(memory, *, release="0" * 12, root="/far/root"):
    return AgentClient(memory, python="/usr/bin/python3", root=root, release=release, pyz=lambda: b"PYZ-BYTES")


def frames_sent(channel):
    return list(FrameParser().feed(strip_agent(channel.argv, bytes(channel.sent))))


def test_the_deployed_agent_is_used_where_it_lies_with_one_fixed_ascii_argv():
    memory = answering(plain(RunStatus("", "none")))
    client = client_of(memory)
    assert client.status("").state == "none"
    (channel,) = memory.channels
    assert channel.argv == ["/usr/bin/python3", "-I", f"/far/root/releases/{'0' * 12}/agent.pyz", "status"]
    assert [frame.kind for frame in frames_sent(channel)] == [Kind.REQUEST, Kind.END]
    assert client.calls == 1


def test_before_the_first_deploy_the_agent_travels_along():
    memory = answering(plain(RunStatus("", "none")))
    client_of(memory, release="", root="").status()
    (channel,) = memory.channels
    assert channel.argv == ["/usr/bin/python3", "-I", "-c", LOADER, "status"]
    assert channel.sent.startswith(b"9\nPYZ-BYTES")
    assert " ".join(channel.argv).isascii()


def test_a_vanished_release_is_replaced_by_the_travelling_agent():
    def play(verb, request, sent):
        if sent.startswith(b"9\n"):
            yield from (HELLO, (Kind.RESULT, plain(RunStatus("", "none"))))

    memory = far_end(play)
    client = client_of(memory)
    assert client.status().state == "none"
    assert client.calls == 2


def test_no_python_at_all_is_no_answer_and_quotes_the_far_end():
    memory = far_end(lambda verb, request, sent: [], stderr="bash: /usr/bin/python3: No such file or directory")
    with pytest.raises(NoAnswer) as caught:
        client_of(memory).status()
    assert "No such file" in caught.value.cause


GONE = "python3: can't open file '/far/root/releases/000000000000/agent.pyz': [Errno 2] No such file or directory"


class Host:
    """Container 200 behind a host whose commands tests answer; `asked` has what pct was asked, without its options."""

    def __init__(self, answer, *, status=b"status: running\n", stderr=""):
        def handler(argv, sent):
            if argv[:3] == [PCT, "exec", "200"]:
                yield from answer(argv, sent)
            elif argv[1] == "status":
                yield status

        self.memory = Memory(handler, stderr=stderr)

    def client(self, **options):
        return client_of(Pct(200, self.memory), **options)

    @property
    def asked(self):
        return [channel.argv[1] for channel in self.memory.channels]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("container '200' not running!", "container 200 on memory is stopped"),
        ('lxc-attach: 200: No such file or directory - Failed to exec "/usr/bin/python3"', "has no /usr/bin/python3"),
        ("sudo: a password is required", "sudo on memory wants a password for pct"),
        ("agent: Python 3.11 or newer is needed, this is 3.9.2", "is Python 3.9.2, and 3.11 or newer is needed"),
    ],
)
def test_a_cause_that_is_known_is_raised_without_a_second_attempt(words, sentence):
    host = Host(lambda argv, sent: [], stderr=words)
    client = host.client()
    with pytest.raises(DflashError) as caught:
        client.status()
    assert sentence in caught.value.error
    assert (client.calls, host.asked.count("exec")) == (1, 1)


def test_a_release_that_is_gone_asks_nobody_and_sends_the_agent_along():
    def answer(argv, sent):
        if argv[6] == "-c":
            (request, *_) = FrameParser().feed(strip_agent(argv[4:], sent))
            yield json_frame(request.nonce, *HELLO).encode()
            yield json_frame(request.nonce, Kind.RESULT, plain(RunStatus("", "none"))).encode()

    # A login shell's noise is there as well, and would mean something where no Python spoke.
    host = Host(answer, stderr=f"bash: /root/.cargo/env: No such file or directory\n{GONE}")
    assert host.client().status().state == "none"
    assert host.asked == ["exec", "exec"]


def test_the_normal_path_is_one_remote_call_and_no_question():
    def answer(argv, sent):
        (request, *_) = FrameParser().feed(sent)
        yield json_frame(request.nonce, *HELLO).encode()
        yield json_frame(request.nonce, Kind.RESULT, plain(RunStatus("", "none"))).encode()

    host = Host(answer)
    host.client().status()
    assert host.asked == ["exec"]


def test_silence_is_explained_within_the_bound_of_status():
    waits = []

    class Clocked(Memory):
        def open(self, argv):
            channel = super().open(argv)
            receive = channel.receive
            channel.receive = lambda timeout: (waits.append((argv[1], timeout)), receive(timeout))[1]
            return channel

    def handler(argv, sent):
        yield Silence() if argv[1] == "exec" else b"status: running\n"

    memory = Clocked(handler)
    with pytest.raises(NoAnswer, match="frozen or overloaded"):
        client_of(Pct(200, memory)).status()
    ((verb, patience), *_) = waits
    assert verb == "exec"
    assert 5.0 < patience <= STATUS_SECONDS - EXPLANATION_SECONDS - 1.0
    assert [channel.argv[1] for channel in memory.channels] == ["exec", "status", "config"]


def test_a_connection_that_does_not_come_about_ends_a_verb_that_has_a_bound(monkeypatch):
    monkeypatch.setattr("dflashctl.agent_client.STATUS_SECONDS", 0.0)
    hang = threading.Event()

    class Slow(Memory):
        def open(self, argv):
            hang.wait(10)
            return super().open(argv)

    client = client_of(Slow(lambda argv, sent: []))
    try:
        with pytest.raises(NoAnswer, match="no connection to memory"):
            client.status()
    finally:
        hang.set()


def test_a_container_that_stops_in_mid_answer_is_named_and_the_answer_was_lost():
    def answer(argv, sent):
        (request, *_) = FrameParser().feed(sent)
        yield json_frame(request.nonce, *HELLO).encode()

    host = Host(answer, status=b"status: stopped\n")
    with pytest.raises(ConnectionLost) as caught:
        host.client().status()
    assert caught.value.cause == "container 200 on memory is stopped"
    assert caught.value.hint == "start it there: `/usr/sbin/pct start 200`"


def test_an_agent_that_lives_and_does_not_answer_is_told_from_a_dead_one(monkeypatch):
    monkeypatch.setattr("dflashctl.agent_client.STATUS_SECONDS", EXPLANATION_SECONDS + 1.2)

    def answer(argv, sent):
        (request, *_) = FrameParser().feed(sent)
        yield json_frame(request.nonce, *HELLO).encode()
        for _ in range(4):
            time.sleep(0.1)
            yield json_frame(request.nonce, Kind.HEARTBEAT, {}).encode()
        yield Silence()

    host = Host(answer)
    with pytest.raises(NoAnswer) as caught:
        host.client().status()
    assert "takes too long" in caught.value.error
    assert "its agent is alive" in caught.value.cause
    assert host.asked == ["exec"]


@pytest.mark.parametrize("need", [True, False])
def test_deploy_sends_the_release_only_when_it_is_needed(need):
    def play(verb, request, sent):
        yield from (
            HELLO,
            (Kind.EVENT, {"need": need}),
            (Kind.RESULT, {"release": RELEASE.id, "root": "/far/root", "changed": need, "sent": need}),
        )

    memory = far_end(play)
    client = client_of(memory)
    deployed = client.deploy(RELEASE, selfcheck=False, on_event=lambda event: None)
    assert deployed == Deployed(RELEASE.id, "/far/root", changed=need, sent=need)
    request, *rest = frames_sent(memory.channels[0])
    assert request.json()["release"] == RELEASE.id
    assert client.calls == 1
    assert rest[-1].kind is Kind.END
    if not need:
        assert len(rest) == 1
        return
    with tarfile.open(fileobj=io.BytesIO(b"".join(frame.payload for frame in rest[:-1]))) as tar:
        assert {member.name: tar.extractfile(member).read() for member in tar} == dict(RELEASE.files)


def test_start_hands_on_events_and_returns_the_status():
    spec = RunSpec(new_run_id(), (), {}, ("cpu",), name="läuft; `$(x)`")
    status = RunStatus(spec.run_id, "running", step=1, loss=float("nan"))

    def play(verb, request, sent):
        assert request["spec"]["name"] == spec.name
        yield from (HELLO, (Kind.EVENT, {"kind": "step"}), (Kind.RESULT, {"status": plain(status)}))

    heard = []
    answer = client_of(far_end(play)).start(StartRequest(spec, limit=5.0), heard.append)
    assert (answer.run_id, answer.step, heard) == (spec.run_id, 1, [{"kind": "step"}])
    assert answer.loss != answer.loss


def test_a_status_that_is_none_is_no_answer():
    with pytest.raises(NoAnswer, match="makes no sense"):
        client_of(answering({"state": 7})).status()
