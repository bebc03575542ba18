"""A stop is a message: where it is heeded, what it leaves, and how a run goes on from there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from remote.protocol import events as ev
from remote.protocol.errors import DflashError, ExitCode

ONE = {"target_gpus": [0], "drafter_gpus": [1]}
TWO = {"target_gpus": [0, 1], "drafter_gpus": [2, 3]}
SHARED = {"target_gpus": [0], "drafter_gpus": [0]}
# 6 steps an epoch: long enough that a stop always comes in the middle, short enough to be trained to its end twice.
LONG = {"epochs": 4, "checkpoint_every": 10, "keep_checkpoints": 9}
ENDLESS = {"epochs": 400}

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def stopped(start: Start, finish: Callable[..., Any]) -> Any:
    run = start(**TWO, **LONG)
    run.wait_for_step(3)
    run.ask_to_stop()
    return finish(run)


def test_a_stop_ends_every_rank_well_with_a_checkpoint_of_the_last_step(stopped: Any) -> None:
    assert stopped.codes == [0, 0, 0, 0], stopped.log
    assert stopped.finished.result == "stopped"
    assert 3 <= stopped.finished.step < 24
    assert stopped.finished.step == max(stopped.losses)
    assert stopped.checkpoints[-1].name == f"step-{stopped.finished.step:08d}"
    assert stopped.finished.checkpoint == str(stopped.checkpoints[-1])


@pytest.mark.parametrize(("layout", "tolerance"), [(TWO, 0.0), (ONE, 1e-9), (SHARED, 1e-9)])
def test_a_resumed_run_goes_on_at_the_next_batch(
    stopped: Any, trained: Start, layout: dict[str, Any], tolerance: float
) -> None:
    whole = trained(**TWO, **LONG)
    rest = trained(**layout, **LONG, resume=stopped.finished.checkpoint)
    (started,) = rest.events(ev.RunStarted)
    assert started.first_step == stopped.finished.step + 1 == min(rest.losses)
    assert started.resumed_from == stopped.finished.checkpoint
    joined = stopped.losses | rest.losses
    assert joined.keys() == whole.losses.keys()
    assert list(joined.values()) == pytest.approx(list(whole.losses.values()), rel=0, abs=tolerance)
    for name in ("drafter", "optimizer"):
        one, other = rest.weights(name), whole.weights(name)
        assert one.keys() == other.keys()
        assert all(torch.allclose(one[key], other[key], rtol=0, atol=tolerance) for key in one)


def test_a_resumed_run_keeps_to_its_own_directory(stopped: Any, trained: Start) -> None:
    before = list(stopped.checkpoints)
    rest = trained(**TWO, **LONG, resume=stopped.finished.checkpoint)
    assert stopped.checkpoints == before
    assert rest.checkpoints[-1].parent == rest.layout.checkpoints


@pytest.mark.parametrize(("key", "value"), [("lr", 2e-2), ("seed", 1), ("micro_batches_per_step", 4), ("epochs", 5)])
def test_a_changed_configuration_is_refused_with_its_difference(
    stopped: Any, start: Start, key: str, value: float
) -> None:
    changed = TWO | LONG | {key: value}
    with pytest.raises(DflashError) as caught:
        start(**changed, resume=stopped.finished.checkpoint)
    assert caught.value.code == ExitCode.PREFLIGHT
    assert f"{key}: " in caught.value.cause
    assert f"{value!r} now" in caught.value.cause


def test_other_training_data_are_refused(stopped: Any, start: Start, data_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(data_file.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(DflashError) as caught:
        start(**TWO, **LONG, data_dir=str(other), resume=stopped.finished.checkpoint)
    assert "training data" in caught.value.cause


def test_a_finished_run_has_nothing_to_resume(trained: Start, start: Start) -> None:
    done = trained(**ONE)
    with pytest.raises(DflashError, match="complete at step 6") as caught:
        start(**ONE, resume=done.finished.checkpoint)
    assert caught.value.hint.endswith("more than epochs = 1")


def test_a_run_that_max_steps_ended_is_told_so(trained: Start, start: Start) -> None:
    done = trained(**ONE, epochs=9, max_steps=2)
    with pytest.raises(DflashError, match="complete at step 2") as caught:
        start(**ONE, epochs=9, max_steps=2, resume=done.finished.checkpoint)
    assert caught.value.hint.endswith("more than max_steps = 2")


def test_resuming_from_no_checkpoint_names_the_newest_one(stopped: Any, start: Start) -> None:
    with pytest.raises(DflashError) as caught:
        start(**TWO, **LONG, resume=str(stopped.layout.checkpoints))
    assert str(stopped.checkpoints[-1]) in caught.value.hint


@pytest.mark.parametrize("place", ["runs/{run}/checkpoints", "out/{run}", "out/{run}/checkpoints"])
def test_resuming_from_a_directory_of_runs_names_the_newest_checkpoint_below(
    stopped: Any, start: Start, tmp_path: Path, place: str
) -> None:
    for number, run in enumerate(("20261130-120000-aaaaaa", "20261130-130000-bbbbbb")):
        newest = tmp_path / place.format(run=run) / f"step-{9 - number:08d}"
        shutil.copytree(stopped.finished.checkpoint, newest)
        os.utime(newest / "trainer_state.json", (number, number))
    with pytest.raises(DflashError) as caught:
        start(**TWO, **LONG, resume=str(tmp_path / place.partition("/")[0]))
    assert str(newest) in caught.value.hint


@pytest.mark.parametrize("layout", [ONE, TWO, SHARED])
def test_a_stop_that_asks_for_no_checkpoint_writes_none(
    start: Start, finish: Callable[..., Any], layout: dict[str, Any]
) -> None:
    run = start(**layout, **ENDLESS)
    run.wait_for_step(2)
    run.ask_to_stop(checkpoint=False)
    finish(run)
    assert set(run.codes) == {0}, run.log
    assert run.finished.result == "stopped"
    assert run.finished.checkpoint == ""
    assert run.checkpoints == []


@pytest.mark.parametrize("layout", [ONE, TWO, SHARED])
def test_a_stop_before_the_end_of_warm_up_trains_nothing(
    start: Start, finish: Callable[..., Any], layout: dict[str, Any]
) -> None:
    run = start(**layout)
    run.ask_to_stop()
    finish(run)
    assert set(run.codes) == {0}, run.log
    assert run.finished.result == "stopped"
    assert run.finished.step == 0
    assert run.losses == {}
    assert run.checkpoints == []
    sockets = Path(run.layout.sockets.read_text().strip())
    assert not sockets.exists()
    assert not (Path("/dev/shm") / sockets.name).exists()


@pytest.mark.parametrize(
    ("rank", "where", "detail"), [(0, "load_target", "target "), (3, "fresh_drafter", "drafter on")]
)
def test_a_stop_while_a_rank_loads_waits_for_the_load_and_trains_nothing(
    start: Start, finish: Callable[..., Any], rank: int, where: str, detail: str
) -> None:
    run = start(faults={rank: {"what": "pause", "where": f"trainer.pipeline.roles:{where}"}}, **TWO, checkpoint_every=1)
    run.wait_for(
        lambda: any(each.rank == rank and each.detail.startswith(detail) for each in run.events(ev.Phase)), "no load"
    )
    run.ask_to_stop()
    finish(run)
    assert run.codes == [0, 0, 0, 0], run.log
    assert (run.finished.result, run.finished.step, run.finished.checkpoint) == ("stopped", 0, "")
    assert "training" not in {phase.phase for phase in run.events(ev.Phase)}
    assert run.checkpoints == []


def test_targets_far_ahead_of_a_slow_drafter_end_with_it(start: Start, finish: Callable[..., Any]) -> None:
    # Three targets and one drafter: the rings are full, every publisher waits for a slot.
    run = start(target_gpus=[0, 1, 2], drafter_gpus=[3], **ENDLESS, drafter_layers=8)
    run.wait_for_step(4)
    run.ask_to_stop()
    finish(run)
    assert run.codes == [0, 0, 0, 0], run.log


def test_drafters_that_wait_for_slow_targets_end_with_them(start: Start, finish: Callable[..., Any]) -> None:
    # One target for two drafters: both drafters wait in a fetch, each reads the target's goodbye in its thread.
    run = start(target_gpus=[0], drafter_gpus=[1, 2], **ENDLESS, num_anchors=1, row_anchors=1, drafter_layers=1)
    run.wait_for_step(4)
    run.ask_to_stop()
    finish(run)
    assert run.codes == [0, 0, 0], run.log


def test_an_unreadable_stop_request_is_an_ordinary_stop(start: Start, finish: Callable[..., Any]) -> None:
    run = start(**ONE, **ENDLESS)
    run.wait_for_step(2)
    run.layout.stop.write_text("{")
    finish(run)
    assert run.codes == [0, 0], run.log
    assert run.finished.result == "stopped"
    assert len(run.checkpoints) == 1


def test_a_checkpoint_without_room_is_an_alarm_and_the_last_one_an_error(
    start: Start, finish: Callable[..., Any], tmp_path: Path
) -> None:
    # A file stands where the run's directory would be made: as good as a full disk, for any user.
    run = start(**ONE, checkpoint_every=2, output_dir=str(tmp_path))
    (tmp_path / run.layout.run_id).write_text("in the way")
    finish(run)
    alarms = [event for event in run.events(ev.AlarmRaised) if event.alarm == "checkpoint_failed"]
    assert [alarm.step for alarm in alarms] == [2, 4]
    assert sorted(run.losses) == [1, 2, 3, 4, 5, 6]
    assert any(code > 0 for code in run.codes)
    assert str(tmp_path) in run.error(1).message + run.error(1).cause
    assert run.events(ev.RunFinished) == []


@pytest.mark.parametrize(("layout", "rank"), [(ONE, 1), (SHARED, 0)])
def test_a_failed_load_is_filed_and_leaves_nothing_in_temporary_places(
    stopped: Any, start: Start, finish: Callable[..., Any], tmp_path: Path, layout: dict[str, Any], rank: int
) -> None:
    damaged = tmp_path / "checkpoint"
    shutil.copytree(stopped.finished.checkpoint, damaged)
    # Whole as a file, so that only the load finds out: moments of another drafter.
    save_file({"0.exp_avg": torch.zeros(1, 1)}, damaged / "optimizer.safetensors")
    run = finish(start(**layout, **LONG, resume=str(damaged)))
    assert run.codes[rank] == ExitCode.PREFLIGHT
    error = run.error(rank)
    assert (error.phase, error.hint) == ("loading", "resume from an earlier checkpoint")
    assert f"{damaged} cannot be restored" in run.log
    assert run.events(ev.RunFinished) == []
    sockets = Path(run.layout.sockets.read_text().strip())
    assert not sockets.exists()
    assert not (Path("/dev/shm") / sockets.name).exists()


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.safetensors", "drafter_config.json"])
def test_a_checkpoint_that_was_cut_off_is_refused_before_the_launch(
    stopped: Any, start: Start, tmp_path: Path, name: str
) -> None:
    copy = Path(shutil.copytree(stopped.finished.checkpoint, tmp_path / "copy"))
    (copy / name).write_bytes((copy / name).read_bytes()[:100])
    with pytest.raises(DflashError, match="cannot be resumed from") as caught:
        start(**TWO, **LONG, resume=str(copy))
    assert caught.value.code is ExitCode.PREFLIGHT
    assert name in caught.value.cause


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.safetensors", "drafter_config.json"])
def test_a_checkpoint_that_lacks_a_file_is_refused_before_the_launch(
    stopped: Any, start: Start, tmp_path: Path, name: str
) -> None:
    copy = Path(shutil.copytree(stopped.finished.checkpoint, tmp_path / "copy"))
    (copy / name).unlink()
    with pytest.raises(DflashError, match="cannot be resumed from") as caught:
        start(**TWO, **LONG, resume=str(copy))
    assert caught.value.code is ExitCode.PREFLIGHT
    assert name in caught.value.cause


def test_a_run_whose_directory_is_deleted_ends_and_does_not_make_it_anew(
    start: Start, finish: Callable[..., Any]
) -> None:
    # A checkpoint made the directory again, and the next start saw no run that lives: two trained at once.
    run = start(**ONE, **ENDLESS, checkpoint_every=1)
    run.wait_for_step(2)
    directory = run.layout.path
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)
    run = finish(run)
    assert all(code != 0 for code in run.codes)
    assert not run.layout.run_lock.exists()
