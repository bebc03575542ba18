"""The lifecycle once with the real trainer: a toy target, two ranks under torch's launcher, on the CPU."""

from __future__ import annotations

import signal
import sys

import pytest

from remote.agent.processes import carriers, recorded_ranks
from remote.protocol.identity import read_pidfile
from remote.protocol.layout import new_run_id
from remote.protocol.locks import is_held
from remote.protocol.records import ExitRecord, read_record
from tests.remote.conftest import REPOSITORY


@pytest.fixture(scope="module")
def toy_files(tmp_path_factory):
    from trainer import toy

    folder = tmp_path_factory.mktemp("toy")
    toy.make_toy_target(folder / "target")
    toy.make_toy_data(folder / "data.jsonl", documents=400)
    return {**toy.toy_config(folder / "target", folder / "data.jsonl"), "max_steps": 0, "epochs": 500}


@pytest.fixture
def training(far, toy_files):
    return train(far, toy_files)


def train(far, config):
    """Return a far end on which the real trainer has trained its first step."""
    folder = REPOSITORY / "trainer"
    files = {path.relative_to(folder.parent).as_posix(): path.read_bytes() for path in folder.rglob("*.py")}
    assert far.deploy({**far.files(), **files}).result
    spec = {"run_id": new_run_id(), "devices": ["cpu"], "config": config}
    status = far.call("start", spec=spec, python=sys.executable, limit=60).result["status"]
    assert (status["state"], status["topology"]) == ("running", "1 target / 1 drafter on cpu")
    return far


def ended(far, wait_for, limit=30) -> ExitRecord:
    wait_for(lambda: not is_held(far.run.sup_lock), limit)
    assert not is_held(far.run.run_lock)
    assert not carriers(far.run.run_id)
    return read_record(ExitRecord, far.run.exit)


def test_a_killed_rank_ends_the_run_as_failed_and_is_named(training, wait_for):
    ranks = recorded_ranks(training.run)
    assert sorted(ranks) == [0, 1]
    ranks[1].send(signal.SIGKILL)
    record = ended(training, wait_for)
    assert (record.result, record.failed_rank) == ("failed", 1)
    assert "rank 1 (drafter) died without a word" in record.message


@pytest.mark.long
def test_a_frozen_rank_is_named_and_killed(far, toy_files, wait_for):
    training = train(far, toy_files | {"stall_timeout": 3})
    recorded_ranks(training.run)[0].send(signal.SIGSTOP)
    # 3 s until it is found silent, 30 s until the launcher gives up on its TERM and sends KILL.
    record = ended(training, wait_for, 90)
    assert (record.result, record.failed_rank) == ("failed", 0)
    assert record.message.startswith("target 0 (rank 0, cpu) gives no sign of life since ")
    assert "drafter 0 (rank 1, cpu) waits for target 0 (rank 0)" in record.message
    assert [alarm["kind"] for alarm in training.ok("status")["alarms"]] == ["stall"]


@pytest.mark.long
def test_a_killed_leader_leaves_no_rank(training, wait_for):
    ranks = list(recorded_ranks(training.run).values())
    read_pidfile(training.run.trainer_pid).send(signal.SIGKILL)
    record = ended(training, wait_for)
    assert (record.result, record.failed_rank, record.signal) == ("failed", None, signal.SIGKILL)
    assert not any(rank.is_alive() for rank in ranks)


@pytest.mark.long
def test_an_orphaned_run_is_stopped_with_a_checkpoint_and_goes_on_from_there(training, toy_files):
    training.kill_supervisor()
    assert training.ok("status")["state"] == "orphaned"
    status = training.ok("stop")["status"]
    assert status["state"] == "stopped"
    spec = {"run_id": new_run_id(), "devices": ["cpu"], "config": toy_files}
    reply = training.call("start", spec=spec, python=sys.executable, limit=60, resume=status["run_id"])
    assert reply.result["status"]["resumed_from"] == status["last_checkpoint"]
    assert reply.events[-1]["step"] == status["step"] + 1
    training.ok("stop", now=True)
