"""Issue 4, check 6: the update is the same however many drafters there are, and however a step is cut into micro-batches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config import TrainConfig
from trainer.data.documents import open_dataset
from trainer.preflight import make_schedule, packing_of

Trained = Callable[..., Any]

TOLERANCE = 1e-10
LAYOUTS = {
    "2 drafters": {"target_gpus": [0], "drafter_gpus": [1, 2]},
    "3 drafters": {"target_gpus": [0], "drafter_gpus": [1, 2, 3]},
    "3 shared": {"target_gpus": [0, 1, 2], "drafter_gpus": [0, 1, 2]},
}
# Token budgets of a micro-batch, from 13 rows to one. An epoch is made one step, so every cut has the same documents in it.
CUTS = [(64, [1, 2, 3]), (200, [1, 2]), (4096, [1])]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 documents with holes, some shorter than a block: 7 rows of 128 tokens."""
    draw = random.Random(3)
    lines: list[dict[str, Any]] = []
    for number in range(30):
        length = draw.randint(2, 5) if number % 6 == 0 else draw.randint(8, 40)
        mask = [int(t >= min(3, length - 2) and draw.random() > 0.15) for t in range(length)]
        lines.append({"input_ids": [draw.randrange(4, 48) for _ in mask], "loss_mask": mask})
    path = tmp_path_factory.mktemp("data") / "holes.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def values(data: Path) -> dict[str, Any]:
    """One target, one drafter, D-PACE, noise; shares of a row never bind, or another cut would draw other anchors."""
    return {
        "data_dir": str(data), "objective": "dpace", "noise_std": 0.1, "epochs": 3, "row_anchors": 400,
        "token_budget": 128, "micro_batches_per_step": 4, "objective_rows": 64, "attention": "mixed", "sliding_window": 6,
    }  # fmt: skip


def steps_of(values: dict[str, Any], tiny_values: dict[str, Any]) -> list[list[int]]:
    """Return the drafter of each micro-batch, step by step."""
    config = TrainConfig.from_mapping(tiny_values | values)
    found = open_dataset(Path(config.data_dir), max_length=config.max_length, vocab_size=48)
    schedule = make_schedule(config, packing_of(config, found.lengths, found.candidates))
    return [[each.drafter for each in schedule.step(step)] for step in range(1, schedule.total_steps + 1)]


def assert_same_update(run: Any, reference: Any) -> None:
    assert run.losses.keys() == reference.losses.keys()
    assert list(run.losses.values()) == pytest.approx(list(reference.losses.values()), rel=0, abs=TOLERANCE)
    for file in ("drafter", "optimizer"):
        ours, theirs = run.weights(file), reference.weights(file)
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_number_of_drafters(trained: Trained, values: dict[str, Any], name: str) -> None:
    assert_same_update(trained(**values, **LAYOUTS[name]), trained(**values))


def test_a_drafter_has_nothing_to_do_in_the_last_step(values: dict[str, Any], tiny_values: dict[str, Any]) -> None:
    # Or the layouts above would not show that a drafter without work takes part in the all-reduce and adds nothing.
    # (Micro-batches without anchors, which no data set yields, are in tests/trainer/drafter/test_split.py.)
    steps = steps_of(values | LAYOUTS["3 drafters"], tiny_values)
    assert len(set(steps[0])) == 3
    assert len(set(steps[-1])) == 2


@pytest.mark.parametrize(("budget", "drafters"), CUTS)
def test_any_cut_into_micro_batches(
    trained: Trained, values: dict[str, Any], tiny_values: dict[str, Any], budget: int, drafters: list[int]
) -> None:
    def cut(tokens: int) -> dict[str, Any]:
        changed = values | {"token_budget": tokens}
        (epoch,) = steps_of(changed | {"epochs": 1, "micro_batches_per_step": 10_000}, tiny_values)
        return changed | {"micro_batches_per_step": len(epoch)}

    one, other = cut(128), cut(budget)
    assert one["micro_batches_per_step"] != other["micro_batches_per_step"]
    run = trained(**other, drafter_gpus=drafters)
    assert len(run.losses) == 3
    assert_same_update(run, trained(**one))


def test_another_objective_is_another_update(trained: Trained, values: dict[str, Any]) -> None:
    # Or the key could be without effect and the runs above would agree all the same.
    dpace, decay = trained(**values), trained(**values | {"objective": "decay"})
    assert abs(dpace.losses[1] - decay.losses[1]) > 1e-4
    assert trained(**values | {"dpace_alpha": 1.0}).losses[1] != dpace.losses[1]
