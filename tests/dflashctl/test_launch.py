"""Starting: what the spec says, and that a lost connection asks again and never starts twice."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest
from farend import HELLO, far_end
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.agent_client import AgentClient, RestartRequest, StartRequest
from dflashctl.errors import ConnectionLost
from dflashctl.launch import (
    Launch,
    ask_until_answered,
    carry_out,
    judge_started,
    make_spec,
    restart_line,
    show_started,
    start_run,
)
from dflashctl.results import Begun, Resumed
from dflashctl.session import Session
from dflashctl.talk import Talk
from dflashctl.training import Training
from dflashctl.transport import Silence
from remote.protocol import events as ev
from remote.protocol.codec import from_plain, plain
from remote.protocol.errors import DflashError, ExitCode
from remote.protocol.frames import Kind
from remote.protocol.layout import is_run_id
from remote.protocol.records import RunSpec, RunStatus
from trainer.config import TrainConfig


@pytest.fixture
def session(tmp_path):
    home = {"DFLASHCTL_HOME": str(tmp_path), "DFLASHCTL_GRACE": "33"}
    return Session.open({}, environment=home, directory=tmp_path)


def training_of(**values):
    return Training(TrainConfig.from_mapping(values), {}, "/c.toml", "test")


@pytest.mark.parametrize(
    ("values", "devices"),
    [
        ({"device": "cpu"}, ("cpu",)),
        ({"target_gpus": [0, 1, 2, 3, 4], "drafter_gpus": [5, 6, 7]}, tuple("01234567")),
        ({"target_gpus": [10, 2], "drafter_gpus": [10, 2]}, ("2", "10")),
    ],
)
def test_the_spec_names_the_devices(session, values, devices):
    assert make_spec(session, training_of(**values), name="", note="").devices == devices


def test_the_spec_is_complete_as_far_as_this_side_knows(session):
    spec = make_spec(session, training_of(lr=0.5, stall_timeout=7), name="n", note="why")
    assert is_run_id(spec.run_id)
    assert (spec.name, spec.note, spec.host, spec.stop_grace, spec.stall_timeout) == ("n", "why", "local", 33.0, 7.0)
    assert spec.config["lr"] == 0.5
    assert TrainConfig.from_mapping(spec.config) == training_of(lr=0.5, stall_timeout=7).config
    assert spec.by


class Far:
    """A far end that breaks off so many times before it answers."""

    def __init__(self, session, breaks, error=None):
        self.requests = []
        self._breaks = breaks
        self._error = error
        client = AgentClient(far_end(self._play), python="p", root="/r", release="0" * 12, pyz=lambda: b"")
        session.__dict__["client"] = client

    def _play(self, verb, request, sent):
        self.requests.append(request)
        yield HELLO
        if len(self.requests) <= self._breaks:
            yield Silence()
        if self._error is not None:
            yield (Kind.ERROR, self._error.to_json())
        yield (Kind.RESULT, {"status": plain(RunStatus(request["spec"]["run_id"], "running", step=1))})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("dflashctl.launch._RETRY_PAUSES", (0.0, 0.0, 0.0))


def request_for(session):
    return StartRequest(make_spec(session, training_of(device="cpu"), name="", note=""), 5.0)


def launch(session, request, remember=""):
    talk = Talk()
    return start_run(Launch(session, request, talk, remember=remember), talk)


def test_a_lost_connection_asks_again_for_the_same_run(session):
    far, request = Far(session, 2), request_for(session)
    assert launch(session, request).run_id == request.spec.run_id
    assert [sent["spec"]["run_id"] for sent in far.requests] == [request.spec.run_id] * 3
    assert far.requests[0] == far.requests[2]


def test_it_gives_up_in_the_end(session):
    far = Far(session, 99)
    with pytest.raises(ConnectionLost):
        launch(session, request_for(session))
    assert len(far.requests) == 4


def test_what_the_agent_says_is_not_asked_again(session):
    far = Far(session, 0, DflashError("a run is already there", code=ExitCode.ALREADY_RUNNING))
    with pytest.raises(DflashError, match="already there"):
        launch(session, request_for(session))
    assert len(far.requests) == 1


@pytest.mark.parametrize(
    ("error", "launched"),
    [
        (None, True),
        (DflashError("it crashed", code=ExitCode.CRASHED_AT_START), True),
        (DflashError("not ready", code=ExitCode.NOT_READY), True),
        (DflashError("no model", code=ExitCode.PREFLIGHT), False),
        (DflashError("it runs", code=ExitCode.ALREADY_RUNNING), False),
    ],
)
def test_a_release_without_the_event_launched_tells_by_its_answer(session, capsys, error, launched):
    Far(session, 0, error)
    request = request_for(session)
    with pytest.raises(DflashError) if error else contextlib.nullcontext():
        launch(session, request, remember="/c.toml")
    assert (f"run {request.spec.run_id} on local, fresh" in capsys.readouterr().err) is launched
    remembered = session.store.get("local", "")
    assert (remembered is not None and remembered.config == "/c.toml") is launched


def test_the_launch_is_told_once_however_often_it_is_heard(session, capsys):
    request, talk = request_for(session), Talk()
    heard = Launch(session, request, talk)
    phase = ev.Phase(time=0.0, rank=0, role="agent", phase="launched")
    for event in (
        phase,
        phase,
        dataclasses.replace(phase, phase="preflight"),
        dataclasses.replace(phase, role="leader"),
    ):
        heard({"kind": event.kind, **plain(event)})
    said = capsys.readouterr().err
    assert said.count("on local, fresh") == 1
    assert "preflight" in said
    assert "leader: launched" in said
    assert session.store.get("local", "") is None


def test_a_restart_that_breaks_off_is_asked_again_as_the_same_restart(session, capsys):
    far, plain_request = Far(session, 2), request_for(session)
    spec = dataclasses.replace(plain_request.spec, restarted_from="20260101-000000-abcdef")
    request = RestartRequest(spec, 5.0, run="20260101-000000-abcdef", now=True, grace=7.0)
    assert launch(session, request).run_id == spec.run_id
    assert far.requests[0] == far.requests[2]
    sent = far.requests[0]
    assert {key: sent[key] for key in ("run", "now", "grace", "by")} == {
        "run": spec.restarted_from, "now": True, "grace": 7.0, "by": spec.by,
    }  # fmt: skip
    assert f"in the place of {spec.restarted_from}" in capsys.readouterr().err


def test_a_refusal_after_a_lost_answer_claims_nothing_of_the_old_run(session, capsys):
    """The lost answer may have told of the stop: then it is the launch that was refused."""
    request = RestartRequest(request_for(session).spec, 5.0, run="R")
    for breaks, said in ((0, True), (1, False)):
        Far(session, breaks, DflashError("GPU 0 is held", code=ExitCode.PREFLIGHT))
        with pytest.raises(DflashError, match="held"):
            carry_out(session, request, Talk(), remember="", as_json=False)
        assert ("refused before anything was stopped" in capsys.readouterr().err) is said


def test_a_query_that_breaks_off_is_asked_again(session):
    answers = [ConnectionLost("lost"), ConnectionLost("lost"), 5]

    def ask():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert ask_until_answered(ask, Talk()) == 5


@pytest.mark.parametrize(
    ("state", "resume", "words"),
    [
        ("running", "", "restarting run R (running), fresh"),
        ("orphaned", "R", "restarting run R (orphaned), from the checkpoint that its stop writes"),
        ("running", "Q@7", "restarting run R (running), from the checkpoint Q@7"),
        (
            "stopped",
            "",
            "run R does not live (stopped), nothing of it has to stop: starting with its configuration, fresh",
        ),
        ("lost", "R", "from its last checkpoint"),
        ("a state of the future", "", "restarting run R (a state of the future), fresh"),
    ],
)
def test_the_first_line_of_a_restart_says_where_it_begins(state, resume, words):
    assert restart_line(Begun(RunSpec("R", (), {}, ()), state), resume).endswith(words)


def test_what_was_heard_of_the_old_run_is_not_told_of_the_new_one(session, capsys):
    spec = request_for(session).spec
    talk = Talk()
    heard = Launch(session, RestartRequest(spec, 5.0, run="R"), talk)
    heard.say_untouched(DflashError("no model", code=ExitCode.PREFLIGHT))
    assert "refused before anything was stopped" in capsys.readouterr().err
    heard.say_untouched(ConnectionLost("it broke off"))
    assert capsys.readouterr().err == ""
    stopping = ev.Phase(time=0.0, role="agent", phase="stopping", detail="R")
    profile = ev.PipelineProfile(
        time=0.0, interval=1, target_tokens_per_second=1, drafter_tokens_per_second=1, tokens_per_second=1,
        target_wait=0.03, drafter_wait=0.4, ring_bytes=0, ring_capacity=1, padding=0, limits="targets",
    )  # fmt: skip
    for event in (stopping, profile):
        heard({"kind": event.kind, **plain(event)})
    assert "the restart goes on over there: run R is stopped" in heard.farewell()
    heard.say_untouched(DflashError("it lives on", code=ExitCode.STOP_INCOMPLETE))
    assert "refused" not in capsys.readouterr().err
    heard({"kind": stopping.kind, **plain(dataclasses.replace(stopping, phase="launched"))})
    assert talk.latest == {}
    assert heard.farewell().startswith("detached; the run goes on")


@given(st.text(), st.text())
def test_any_name_and_note_arrive_unchanged(tmp_path_factory, name, note):
    directory = tmp_path_factory.getbasetemp()
    session = Session.open({}, environment={"DFLASHCTL_HOME": str(directory)}, directory=directory)
    far = Far(session, 0)
    spec = make_spec(session, training_of(device="cpu"), name=name, note=note)
    launch(session, StartRequest(spec, 5.0))
    assert from_plain(RunSpec, far.requests[0]["spec"]) == spec


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            RunStatus("r", "running", step=1, loss=11.94, topology="1 target / 1 drafter"),
            "step 1, loss 11.94, 1 target",
        ),
        (RunStatus("r", "finished", step=3), "r on local: finished"),
        (RunStatus("r", "a state of the future", step=2), "step 2"),
    ],
)
def test_start_answers_with_one_line_while_it_trains_and_with_the_card_after(session, capsys, status, words):
    show_started(status, Talk(), session, as_json=False)
    assert words in capsys.readouterr().out


def test_start_answers_a_script_with_the_status(session, capsys):
    show_started(RunStatus("r", "running", step=1), Talk(), session, as_json=True)
    assert from_plain(RunStatus, json.loads(capsys.readouterr().out)).step == 1


def test_the_last_line_takes_loss_and_waits_from_the_events_that_passed(session, capsys):
    talk = Talk()
    step = ev.Step(
        time=0.0, step=1, total_steps=9, epoch=0, loss=9.75, accuracy=0, accept_len=1, lr=1, grad_norm=1, tokens=1,
        tokens_per_second=1.0,
    )  # fmt: skip
    profile = ev.PipelineProfile(
        time=0.0, interval=1, target_tokens_per_second=1, drafter_tokens_per_second=1, tokens_per_second=1,
        target_wait=0.03, drafter_wait=0.4, ring_bytes=0, ring_capacity=1, padding=0, limits="targets",
    )  # fmt: skip
    for event in (step, profile):
        talk({"kind": event.kind, **plain(event)})
    show_started(RunStatus("r", "running", step=7), talk, session, as_json=False)
    assert capsys.readouterr().out == "step 1, loss 9.75, targets wait 3%, drafters 40%\n"


def test_ctrl_c_speaks_of_a_run_only_once_there_is_one(session):
    heard = Launch(session, request_for(session), Talk())
    assert "nothing was launched" in heard.farewell()
    phase = ev.Phase(time=0.0, rank=0, role="agent", phase="preflight")
    heard({"kind": phase.kind, **plain(phase)})
    assert "nothing was launched" in heard.farewell()
    launched = dataclasses.replace(phase, phase="launched")
    heard({"kind": launched.kind, **plain(launched)})
    assert heard.farewell().startswith("detached; the run goes on")


@pytest.mark.parametrize(
    ("state", "step", "resumed_at", "code"),
    [
        ("running", 1, None, 0),
        ("running", 0, None, 0),
        ("finished", 0, None, 0),
        ("stopped", 3, None, 0),
        ("stopped", 0, None, 1),
        ("stopped", 17, 17, 1),
        ("stopped", 0, 17, 1),
        ("stopped", 18, 17, 0),
        ("failed", 3, None, 1),
        ("lost", 3, None, 1),
    ],
)
def test_a_start_that_trained_no_step_and_did_not_finish_is_a_failure(session, capsys, state, step, resumed_at, code):
    spec = make_spec(session, training_of(device="cpu"), name="", note="")
    resumed = None if resumed_at is None else Resumed(spec, "/c", resumed_at)
    assert judge_started(RunStatus("r", state, step=step), resumed) == code
    said = "error: run r was stopped before its first step" in capsys.readouterr().err
    assert said is (state == "stopped" and code == 1)
