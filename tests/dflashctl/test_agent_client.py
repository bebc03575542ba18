"""Which agent is asked, how often, and what travels."""

from __future__ import annotations

import io
import tarfile

import pytest
from farend import HELLO, far_end, strip_agent

from dflashctl.agent_client import AgentClient, StartRequest
from dflashctl.errors import NoAnswer
from dflashctl.release import Release
from dflashctl.results import Deployed
from remote.protocol.codec import plain
from remote.protocol.frames import FrameParser, Kind
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
