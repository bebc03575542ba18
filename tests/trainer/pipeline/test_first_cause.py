"""Which of the records that a failed run left is shown, and how: what `train` says last when nobody supervises it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remote.protocol.errors import ExitCode, preflight_error
from remote.protocol.files import write_json
from remote.protocol.layout import RunLayout
from trainer.checkpoint_files import STATE_FILE
from trainer.config import TrainConfig
from trainer.pipeline import launcher
from trainer.pipeline.channel import PeerDied
from trainer.pipeline.first_cause import first_cause, records
from trainer.pipeline.leader import LEADER
from trainer.pipeline.membership import file_error
from trainer.pipeline.plan import RunPlan


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    RunLayout(tmp_path / "run").create()
    config = TrainConfig(device="cpu", target_gpus=(0, 1), drafter_gpus=(2,))
    return RunPlan(
        run_id="run", run_dir=str(tmp_path / "run"), config=config.to_dict(), leader_pid=1, sockets="", ring_file="",
        slot_bytes=1, slots_per_pair=2, captured_layers=2, hidden_size=16, documents="", data_fingerprint="",
        total_steps=9, first_step=1, output_dir=str(tmp_path / "out"),
    )  # fmt: skip


def fail(plan: RunPlan, rank: int, error: BaseException, time: float, blames: int = -1) -> None:
    try:
        raise error
    except BaseException as raised:
        file_error(plan.run, raised, rank=rank, role="target", device="cpu", phase="training", time=time, blames=blames)


def lost(rank: int) -> PeerDied:
    error = PeerDied.__new__(PeerDied)
    Exception.__init__(error, f"target {rank} is gone")
    return error


def test_the_first_failure_is_shown_and_not_what_followed_from_it(plan: RunPlan) -> None:
    fail(plan, 2, lost(1), time=1.0, blames=1)
    fail(plan, 1, ZeroDivisionError("bucket"), time=2.0)
    fail(plan, 0, KeyError("later"), time=3.0)
    error = first_cause(plan, 1)
    assert [record.rank for record in records(plan.run)] == [1, 0, 2]
    assert error.error == "ZeroDivisionError: bucket"
    assert error.cause.startswith("test_first_cause.py:")
    assert error.cause.endswith(" in fail; rank 1 (target, cpu) in training")
    assert error.hint == f"the whole traceback is in {plan.run.error(1)}"
    assert error.code is ExitCode.FAILED


def test_a_sentence_for_people_keeps_its_cause_its_hint_and_its_code(plan: RunPlan) -> None:
    fail(plan, 0, preflight_error("no room", cause="/out is full", hint="free some"), time=1.0)
    error = first_cause(plan, 1)
    assert (error.error, error.code) == ("no room", ExitCode.PREFLIGHT)
    assert error.cause == "/out is full; rank 0 (target, cpu) in training"
    assert error.hint == f"free some; the whole traceback is in {plan.run.error(0)}"


def test_the_last_checkpoint_is_named(plan: RunPlan, tmp_path: Path) -> None:
    for step in (4, 8):
        directory = tmp_path / "out" / f"step-{step:08d}"
        directory.mkdir(parents=True)
        (directory / STATE_FILE).touch()
    fail(plan, 0, ValueError("x"), time=1.0)
    assert f"--resume {tmp_path / 'out' / 'step-00000008'} goes on" in first_cause(plan, 1).hint


@pytest.mark.parametrize(("code", "said"), [(-9, "was killed by signal 9"), (3, "ended with code 3")])
def test_without_a_record_the_launcher_is_named(plan: RunPlan, code: int, said: str) -> None:
    plan.run.error(0).write_text('{"rank": 0, "ro')
    assert first_cause(plan, code).error == f"the launcher {said}"


def test_a_code_that_we_do_not_know_is_a_failure(plan: RunPlan) -> None:
    fail(plan, 0, ValueError("x"), time=1.0)
    record = json.loads(plan.run.error(0).read_text())
    write_json(plan.run.error(0), record | {"code": 75})
    assert first_cause(plan, 1).code is ExitCode.FAILED


@pytest.mark.parametrize(
    ("codes", "error", "cause"),
    [
        ({1: -9}, "target 1 (rank 1, cpu) died without a word", "signal SIGKILL"),
        ({2: -9, 1: 1}, "drafter 0 (rank 2, cpu) died without a word", "signal SIGKILL"),
        ({2: 3}, "drafter 0 (rank 2, cpu) died without a word", "it ended with code 3"),
    ],
)
def test_a_rank_that_left_no_record_is_filed_by_the_launcher(
    plan: RunPlan, codes: dict[int, int], error: str, cause: str
) -> None:
    if 1 in codes and codes[1] > 0:
        fail(plan, 1, lost(2), time=1.0, blames=2)
    launcher.file_silent(plan, codes)
    found = first_cause(plan, 1)
    assert found.error == error
    assert found.cause.startswith(cause)
    assert records(plan.run)[0].rank == LEADER


def test_ranks_that_left_records_need_no_other(plan: RunPlan) -> None:
    fail(plan, 0, ValueError("x"), time=1.0)
    launcher.file_silent(plan, {0: 1})
    assert not plan.run.error(LEADER).exists()
