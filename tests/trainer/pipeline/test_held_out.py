"""Held-out documents: measured alike by every layout, without a trace in the training, and the best checkpoint stays."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from remote.protocol import events as ev
from remote.protocol.errors import DflashError, ExitCode
from trainer.checkpoint_files import read_state, step_directory
from trainer.config import TrainConfig
from trainer.data.documents import open_dataset
from trainer.drafter.blocks import build_blocks
from trainer.drafter.config import gamma_for
from trainer.drafter.fresh import fresh_drafter
from trainer.drafter.step import drafter_forward
from trainer.pipeline.held_out import HeldOutFigures
from trainer.pipeline.layout import Layout
from trainer.pipeline.reporting import Reporter
from trainer.preflight import drafter_config
from trainer.target.ends import load_ends
from trainer.target.facts import target_facts
from trainer.target.load import load_target

LAYOUTS: dict[str, dict[str, Any]] = {
    "1+1": {},
    "2+2, sync": {"target_gpus": [0, 1], "drafter_gpus": [2, 3], "transfer": "sync"},
    "shared 2": {"target_gpus": [0, 1], "drafter_gpus": [0, 1]},
}
# Noise, D-PACE and shuffled anchors are the training's alone.
EVERY_OTHER = {"checkpoint_every": 2, "keep_checkpoints": 9, "noise_std": 0.1, "objective": "dpace", "row_anchors": 400}

Trained = Callable[..., Any]


@pytest.fixture(scope="module")
def held_out_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight documents of 10 to 40 tokens, the first of them with a token that the training data lacks."""
    draw = random.Random(7)
    documents = [[draw.randrange(4, 48) for _ in range(draw.randint(10, 40))] for _ in range(8)]
    documents[0][6] = 2
    path = tmp_path_factory.mktemp("held_out") / "data.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids, "prompt_len": 3}) + "\n" for ids in documents))
    return str(path)


def measured(run: Any) -> dict[int, tuple[float, float, float]]:
    return {each.step: (each.loss, each.accuracy, each.accept_len) for each in run.events(ev.HeldOutMeasured)}


def alone(config: TrainConfig, checkpoint: Path) -> tuple[float, float, float]:
    """Loss, accuracy and acceptance of a checkpoint, one held-out document at a time, by the parts themselves."""
    from safetensors.torch import load_file

    facts = target_facts(config.target_model)
    ids = drafter_config(config, facts).target_layer_ids
    target = load_target(config.target_model, dtype=torch.float64, device="cpu", target_layer_ids=ids)
    embed, head = load_ends(config.target_model, torch.float64, "cpu")
    drafter = fresh_drafter(config).double()
    drafter.load_state_dict(load_file(checkpoint / "drafter.safetensors"))
    dataset = open_dataset(config.held_out_dir, max_length=config.max_length)
    total = torch.zeros(6, dtype=torch.float64)
    for index in range(len(dataset)):
        document = dataset.document(index)
        length = len(document.input_ids)
        blocks = build_blocks(
            document.input_ids, document.loss_mask, np.full(length, index), np.arange(length, dtype=np.int32),
            seed=config.seed, epoch=0, num_anchors=config.num_anchors, row_budget=400 * 4, block_size=4, mask_token_id=3,
            gamma=gamma_for(4),
        )  # fmt: skip
        states = torch.cat(target.capture(torch.tensor(document.input_ids[None]).long()), dim=-1)[0]
        sums = drafter_forward(drafter, embed, head, states, blocks, num_target_layer_ids=2, chunk_rows=64)
        total += torch.cat([torch.stack([sums.loss_sum.detach(), sums.weight_sum]), sums.metrics[:4]])
    loss, weight, correct, supervised, accepted, count = total.tolist()
    return loss / weight, correct / supervised, accepted / count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_measures_the_same_and_trains_as_if_there_were_none(
    trained: Trained, held_out_dir: str, layout: str
) -> None:
    run = trained(**EVERY_OTHER, **LAYOUTS[layout], held_out_dir=held_out_dir)
    reference = trained(**EVERY_OTHER, held_out_dir=held_out_dir)
    assert list(measured(run)) == [step for step in run.losses if step % 2 == 0 or step == max(run.losses)]
    for step, figures in measured(run).items():
        assert figures == pytest.approx(measured(reference)[step], abs=1e-9)
    assert run.losses == pytest.approx(trained(**EVERY_OTHER).losses, abs=1e-9)
    assert run.events(ev.AlarmRaised) == []


@pytest.mark.parametrize("step", [2, 6])
def test_the_figures_are_those_of_the_checkpoint_saved_with_them(
    trained: Trained, held_out_dir: str, step: int
) -> None:
    run = trained(**EVERY_OTHER, held_out_dir=held_out_dir)
    checkpoint = step_directory(run.layout.checkpoints, step)
    assert measured(run)[step] == pytest.approx(alone(run.config, checkpoint), rel=1e-9)
    assert read_state(checkpoint).held_out_loss == measured(run)[step][0]


OVERFIT = {"epochs": 4, "checkpoint_every": 4, "keep_checkpoints": 1, "lr": 0.3, "warmup_ratio": 0.5}


@pytest.fixture(scope="module")
def overfit(trained: Trained, held_out_dir: str) -> Any:
    """A run that diverges when its learning rate has risen: it is at its best in the middle."""
    return trained(**OVERFIT, held_out_dir=held_out_dir)


def test_the_best_checkpoint_stays_beside_the_newest(overfit: Any) -> None:
    losses = {step: loss for step, (loss, *_) in measured(overfit).items()}
    best = min(losses, key=lambda step: losses[step])
    assert best < max(losses)
    lowest = [min(list(losses.values())[: place + 1]) for place in range(len(losses))]
    said = {event.step: event.best for event in overfit.events(ev.CheckpointSaved)}
    assert said == {step: losses[step] == low for step, low in zip(losses, lowest, strict=True)}
    directory = overfit.layout.checkpoints
    assert overfit.checkpoints == [step_directory(directory, best), step_directory(directory, max(losses))]
    assert (directory / "best").resolve() == step_directory(directory, best).resolve()
    states = [read_state(path) for path in overfit.checkpoints]
    assert [state.best_held_out_loss for state in states] == [losses[best]] * 2


def test_a_resumed_run_knows_how_good_the_best_was(overfit: Any, trained: Trained, held_out_dir: str) -> None:
    start = overfit.checkpoints[0]
    rest = trained(**OVERFIT, held_out_dir=held_out_dir, resume=str(start))
    assert measured(rest) == {step: each for step, each in measured(overfit).items() if step > read_state(start).step}
    # None of its own is better: what it began with stays the best.
    assert (rest.layout.checkpoints / "best").resolve() == start.resolve()
    assert read_state(rest.checkpoints[-1]).best_held_out_loss == read_state(start).best_held_out_loss


def test_other_held_out_documents_are_refused_on_resume(
    overfit: Any, start: Trained, held_out_dir: str, data_file: Path
) -> None:
    for other in (str(data_file), ""):
        with pytest.raises(DflashError, match="another configuration") as caught:
            start(**OVERFIT, held_out_dir=other, resume=str(overfit.checkpoints[0]))
        assert caught.value.cause == "the held-out data is another set"


def test_held_out_documents_that_are_missing_are_found_before_the_launch(start: Trained) -> None:
    with pytest.raises(DflashError) as caught:
        start(held_out_dir="/nowhere")
    assert caught.value.code is ExitCode.PREFLIGHT
    assert "/nowhere" in caught.value.error


@pytest.mark.parametrize("loss", [math.nan, math.inf, 2.5])
def test_a_loss_that_is_no_number_is_an_alarm(loss: float) -> None:
    seen: list[ev.Event] = []
    telemetry = SimpleNamespace(emit=seen.append, close=lambda: None)
    reporter = Reporter(telemetry, Layout.of(TrainConfig()), rank=1, total_steps=9, first_step=1)
    reporter.measured(4, HeldOutFigures(loss, 0.1, 1.0), 0.5)
    alarms = [event for event in seen if isinstance(event, ev.AlarmRaised)]
    assert len(alarms) == (not math.isfinite(loss))
    for alarm in alarms:
        assert (alarm.alarm, alarm.step) == ("held_out_non_finite", 4)
        assert f"behind step 4 is {loss}" in alarm.message


def test_a_run_whose_target_is_sick_on_held_out_documents_says_so(
    trained: Trained, poisoned: dict[str, str], held_out_dir: str, tmp_path: Path, data_file: Path
) -> None:
    """The training documents lack the token whose embedding is NaN; a held-out one has it."""
    sound = data_file.read_text().replace(" 47,", " 46,").replace("[47,", "[46,").replace(" 47]", " 46]")
    (tmp_path / "data.jsonl").write_text(sound)
    held_out = Path(held_out_dir).read_text().splitlines()
    held_out[0] = json.dumps({"input_ids": [47, *range(4, 20)], "prompt_len": 3})
    (tmp_path / "held_out.jsonl").write_text("\n".join(held_out))
    places = {"data_dir": str(tmp_path / "data.jsonl"), "held_out_dir": str(tmp_path / "held_out.jsonl")}
    run = trained(target_model=poisoned["target_model"], **places)
    (alarm,) = run.events(ev.AlarmRaised)
    assert (alarm.alarm, alarm.step) == ("held_out_non_finite", max(run.losses))
    assert read_state(run.checkpoints[-1]).held_out_loss is None
    assert not (run.layout.checkpoints / "best").exists()


def test_a_stop_between_measurements_ends_every_rank(
    start: Trained, finish: Callable[[Any], Any], held_out_dir: str
) -> None:
    run = start(drafter_gpus=[1, 2], held_out_dir=held_out_dir, epochs=400, checkpoint_every=1)
    run.wait_for_step(3)
    run.ask_to_stop()
    finish(run)
    assert set(run.codes) == {0}, run.log
    assert run.finished.result == "stopped"
    assert run.checkpoints[-1].name == f"step-{run.finished.step:08d}"
    assert read_state(run.checkpoints[-1]).held_out_loss is None  # A stop does not wait for a measurement.


def test_a_sub_vocabulary_has_a_place_for_held_out_labels(trained: Trained, held_out_dir: str) -> None:
    run = trained(loss_vocab_extra=0, held_out_dir=held_out_dir)
    plan = json.loads((run.layout.path / "plan.json").read_text())
    seen = np.load(plan["documents"])["token_ids_seen"].tolist()
    assert 2 in seen
    assert seen == sorted(set(seen))
    assert all(math.isfinite(value) for figures in measured(run).values() for value in figures)
