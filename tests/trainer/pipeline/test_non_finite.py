"""A number that is none never reaches the weights, and the run says in which step it arose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from remote.protocol import events as ev
from remote.protocol.errors import DflashError
from trainer.drafter.fresh import fresh_drafter
from trainer.drafter.model import Drafter
from trainer.pipeline.bad_batch import BadBatch, Evidence
from trainer.pipeline.figures import StepFigures, Suspect
from trainer.pipeline.packed import RowTokens

LAYOUTS = {"1+1": ([0], [1]), "2+2": ([0, 1], [2, 3]), "shared 2": ([0, 1], [0, 1])}


def bad_steps(run: Any) -> list[Path]:
    return sorted(run.layout.bad.iterdir())


def saved_batches(run: Any) -> list[BadBatch]:
    """The saved batches of the one refused step, in order."""
    (directory,) = bad_steps(run)
    return [BadBatch.load(path) for path in sorted(directory.glob("batch-*.safetensors"))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_non_finite_step_stops_the_run_and_is_named(
    start: Callable[..., Any], finish: Callable[..., Any], poisoned: dict[str, str], name: str
) -> None:
    targets, drafters = LAYOUTS[name]
    run = finish(start(**poisoned, target_gpus=targets, drafter_gpus=drafters, checkpoint_every=1))
    assert any(code > 0 for code in run.codes), run.log
    (alarm,) = [event for event in run.events(ev.AlarmRaised) if event.alarm == "non_finite"]
    last = run.events(ev.Step)[-1]
    assert (last.step, last.applied) == (alarm.step, False)
    first_drafter = 0 if targets == drafters else len(targets)
    error = run.error(first_drafter)
    assert error.message == f"step {alarm.step} is not finite"
    assert "not applied" in error.cause
    assert "--on-nan continue" in error.hint
    assert error.phase == "training"
    # The last checkpoint is of the step before, and there is no run_finished that would call this an end.
    assert [path.name for path in run.checkpoints][-1:] == [f"step-{alarm.step - 1:08d}"] * (alarm.step > 1)
    assert run.events(ev.RunFinished) == []
    # Named, and saved by the drafter that met it; the weights beside it by the first drafter.
    (suspect,) = saved_batches(run)
    assert suspect.row.step == alarm.step
    assert (suspect.row.input_ids == 47).sum() == 1
    assert (suspect.seen, suspect.config) == ("states", run.config.to_dict())
    blamed = f"the states of batch {suspect.row.batch} were not finite when packed on the CPU (rank {suspect.target})"
    assert alarm.message == f"{blamed}: the step was not applied; saved in {bad_steps(run)[0]}"
    assert error.cause == f"{blamed}; the step was not applied to the weights"
    weights = load_file(bad_steps(run)[0] / "drafter.safetensors")
    assert weights.keys() == fresh_drafter(run.config).state_dict().keys()
    if alarm.step > 1:
        before = run.weights()
        assert all(bool((weights[name] == value).all()) for name, value in before.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_on_nan_continue_goes_on_with_finite_weights(
    trained: Callable[..., Any], poisoned: dict[str, str], name: str
) -> None:
    targets, drafters = LAYOUTS[name]
    run = trained(**poisoned, target_gpus=targets, drafter_gpus=drafters, on_nan="continue", epochs=2)
    steps = run.events(ev.Step)
    refused = [step.step for step in steps if not step.applied]
    assert len(refused) == 2  # The document comes once an epoch.
    assert [event.step for event in run.events(ev.AlarmRaised)] == refused
    assert all(step.loss == step.loss for step in steps if step.applied)
    assert (run.finished.result, run.finished.not_applied) == ("finished", 2)
    assert [int(path.name.removeprefix("step-")) for path in bad_steps(run)] == refused
    assert all(bool(value.isfinite().all()) for value in run.weights().values())
    assert all(bool(value.isfinite().all()) for value in run.weights("optimizer").values())


def test_every_layout_refuses_the_same_steps_and_learns_the_same(
    trained: Callable[..., Any], poisoned: dict[str, str]
) -> None:
    runs = [
        trained(**poisoned, target_gpus=targets, drafter_gpus=drafters, on_nan="continue", epochs=2)
        for targets, drafters in LAYOUTS.values()
    ]
    curves = [[step.loss for step in run.events(ev.Step)] for run in runs]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-9, nan_ok=True)


# ---- losses and gradients


@pytest.mark.parametrize(
    ("factor", "seen", "words"),
    [
        (float("nan"), "loss", "the loss of batch 0 is not finite on the CPU (rank "),
        # Logits of 1e200 give a loss of 1e200, whose gradient is finite in each number and not in its norm.
        (1e200, "gradient", "every loss is finite, but the gradient norm of batches 0, 1, 2 is inf"),
    ],
)
def test_losses_and_gradients_are_told_apart(
    start: Callable[..., Any],
    finish: Callable[..., Any],
    broken_head: Callable[[float], str],
    factor: float,
    seen: str,
    words: str,
) -> None:
    run = finish(start(target_model=broken_head(factor), target_gpus=[0], drafter_gpus=[1, 2]))
    assert any(code > 0 for code in run.codes), run.log
    assert [(each.row.batch, each.seen) for each in saved_batches(run)] == [(0, seen), (1, seen), (2, seen)]
    (alarm,) = [event for event in run.events(ev.AlarmRaised) if event.alarm == "non_finite"]
    assert alarm.message.startswith(words)


# ---- what is kept, and what is saved of it


def row(batch: int, step: int) -> RowTokens:
    ids = torch.arange(6, dtype=torch.int32) + batch
    documents = torch.tensor([4, 4, 9, 9, 9, -1])
    positions = torch.tensor([0, 1, 0, 1, 2, 0], dtype=torch.int32)
    return RowTokens(batch, step, 1, ids, torch.ones(6, dtype=torch.uint8), documents, positions, tokens=5)


def figures(step: int, *suspects: Suspect, skipped: bool = True) -> StepFigures:
    return StepFigures(step, 1.0, 0.0, 1.0, 1.0, 1.0, skipped, False, False, (), micro_batches=3, suspects=suspects)


@pytest.fixture
def evidence(tmp_path: Path, tiny_values: dict[str, Any]) -> Evidence:
    from trainer.config import TrainConfig

    drafter: Drafter = fresh_drafter(TrainConfig.from_mapping(tiny_values))
    np.savez(tmp_path / "documents.npz", token_ids_seen=np.array([3, 5]))
    return Evidence(tmp_path / "bad", {"lr": 1.0}, tmp_path / "documents.npz", drafter, writes_drafter=False)


def test_a_saved_batch_comes_back(tmp_path: Path) -> None:
    seen = torch.tensor([3, 5])
    BadBatch(row(34, 12), "loss", 2, {"lr": 1.0, "attention": "full"}, seen).save(tmp_path / "batch")
    back = BadBatch.load(tmp_path / "batch")
    assert (back.seen, back.target, back.config) == ("loss", 2, {"lr": 1.0, "attention": "full"})
    assert (back.row.batch, back.row.step, back.row.epoch, back.row.tokens) == (34, 12, 1, 5)
    for name in ("input_ids", "loss_mask", "document_ids", "position_ids"):
        one, other = getattr(back.row, name), getattr(row(34, 12), name)
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


@pytest.mark.parametrize("content", [b"", b"{}", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_file_that_is_no_saved_batch_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DflashError, match="no batch of a refused step"):
        BadBatch.load(tmp_path / "file")
    with pytest.raises(DflashError, match="no batch of a refused step"):
        BadBatch.load(tmp_path / "missing")


def test_a_step_that_was_applied_leaves_nothing(evidence: Evidence) -> None:
    evidence.keep(row(3, 2), 0)
    assert evidence.settle(figures(2, skipped=False)) is None
    assert not evidence.directory.exists()
    assert evidence._rows == {}


def test_only_what_is_suspect_is_saved_and_of_its_own_step(evidence: Evidence) -> None:
    for batch, step in ((3, 2), (5, 2), (6, 3)):
        evidence.keep(row(batch, step), 0)
    directory = evidence.settle(figures(2, Suspect(2, "copy"), Suspect(1, "loss")))  # Batch 4 is another drafter's.
    assert directory is not None
    assert [path.name for path in directory.iterdir()] == ["batch-00000005.safetensors"]
    bad = BadBatch.load(directory / "batch-00000005.safetensors")
    assert (bad.seen, bad.token_ids_seen.tolist()) == ("copy", [3, 5])
    assert list(evidence._rows) == [3]


def test_a_run_that_goes_on_regardless_does_not_fill_the_disk(evidence: Evidence) -> None:
    saved = []
    for step in range(2, 9):
        evidence.keep(row(step * 3, step), 0)
        saved.append(evidence.settle(figures(step, Suspect(0, "states"))))
    assert [path is not None for path in saved] == [True] * 3 + [False] * 4
    assert len(list(evidence.directory.iterdir())) == 3


def test_no_room_for_a_batch_is_an_alarm_and_the_step_is_blamed_all_the_same(
    start: Callable[..., Any], finish: Callable[..., Any], broken_head: Callable[[float], str]
) -> None:
    run = start(target_model=broken_head(float("nan")))
    run.layout.bad.write_text("in the way")  # A file where the directory would be made: as good as a full disk.
    finish(run)
    assert [event.alarm for event in run.events(ev.AlarmRaised)] == ["bad_batch_lost", "non_finite"]
    assert run.error(1).message == "step 1 is not finite"
