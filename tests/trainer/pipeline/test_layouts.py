"""Issue 2, check 5: how the work is dealt to processes changes no number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remote.protocol import events as ev
from trainer.data.documents import open_dataset
from trainer.data.schedule import Layout, Schedule
from trainer.preflight import packing_of

ONE = {"target_gpus": [0], "drafter_gpus": [1]}
LAYOUTS = {
    "2+2": {"target_gpus": [0, 1], "drafter_gpus": [2, 3]},
    "3+1": {"target_gpus": [0, 1, 2], "drafter_gpus": [3]},
    "1+2": {"target_gpus": [0], "drafter_gpus": [1, 2]},
    "shared 1": {"target_gpus": [0], "drafter_gpus": [0]},
    "shared 2": {"target_gpus": [0, 1], "drafter_gpus": [0, 1]},
}

Trained = Callable[..., Any]


def same_weights(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(value, other[name], rtol=0, atol=tolerance) for name, value in one.items()
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_same_loss_curve(trained: Trained, name: str) -> None:
    reference, run = trained(**ONE), trained(**LAYOUTS[name])
    assert run.losses.keys() == reference.losses.keys()
    assert list(run.losses.values()) == pytest.approx(list(reference.losses.values()), abs=1e-10)
    assert same_weights(run.weights(), reference.weights(), 1e-10)


def test_the_last_step_leaves_a_drafter_of_two_without_work(trained: Trained) -> None:
    # Or the layouts above would not show that it takes part in the all-reduce all the same.

    config = trained(**LAYOUTS["2+2"]).config
    data = open_dataset(Path(config.data_dir), max_length=config.max_length, vocab_size=48)
    packing = packing_of(config, data.lengths, data.candidates)
    schedule = Schedule(packing, Layout(1, 2, 2, False), epochs=config.epochs, micro_batches_per_step=3)
    assert len(schedule.step(schedule.total_steps)) == 1


def test_asynchronous_equals_synchronous_bit_for_bit(trained: Trained) -> None:
    fast, slow = trained(**ONE), trained(**ONE, transfer="sync")
    assert fast.losses == slow.losses
    assert same_weights(fast.weights(), slow.weights())
    assert same_weights(fast.weights("optimizer"), slow.weights("optimizer"))


def test_split_fc_is_the_same_function(trained: Trained) -> None:
    off, on = trained(**ONE), trained(**ONE, split_fc="on")
    assert list(on.losses.values()) == pytest.approx(list(off.losses.values()), abs=1e-10)


def test_another_seed_is_another_curve(trained: Trained) -> None:
    assert trained(**ONE).losses != trained(**ONE, seed=43).losses


def test_the_drafter_learns_something(trained: Trained) -> None:
    losses = list(trained(**ONE).losses.values())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_alarm_and_nothing_left_in_temporary_places(trained: Trained, name: str) -> None:

    run = trained(**LAYOUTS[name])
    assert run.events(ev.AlarmRaised) == []
    sockets = Path(run.layout.sockets.read_text().strip())
    assert not sockets.exists()
    assert not (Path("/dev/shm") / sockets.name).exists()


def test_what_the_run_says_of_itself(trained: Trained) -> None:
    run = trained(**LAYOUTS["2+2"])
    (started,) = run.events(ev.RunStarted)
    steps = run.events(ev.Step)
    assert started.topology == "2 targets / 2 drafters on cpu"
    assert [step.step for step in steps] == list(range(1, started.total_steps + 1))
    assert run.finished.result == "finished"
    assert run.finished.step == started.total_steps
    assert run.finished.tokens == sum(step.tokens for step in steps)
    assert (run.finished.first_loss, run.finished.last_loss) == (steps[0].loss, steps[-1].loss)
    assert run.finished.checkpoint == str(run.checkpoints[-1])
    roles = {(phase.rank, phase.role) for phase in run.events(ev.Phase)}
    assert roles == {(0, "target"), (1, "target"), (2, "drafter"), (3, "drafter")}
    profiles = {profile.rank for profile in run.events(ev.StageProfile)}
    assert profiles == {0, 1, 2, 3}
    (padding,) = {profile.padding for profile in run.events(ev.PipelineProfile)}
    assert 0 < padding < 0.5
