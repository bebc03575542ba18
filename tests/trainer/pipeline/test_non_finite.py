"""A number that is none never reaches the weights, and the run says in which step it arose."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remote.protocol import events as ev

LAYOUTS = {"1+1": ([0], [1]), "2+2": ([0, 1], [2, 3]), "shared 2": ([0, 1], [0, 1])}


@pytest.fixture(scope="module")
def poisoned(
    make_target: Callable[..., Path], data_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """A target whose embedding of token 47 is NaN, and data in which one document in the middle holds that token."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("poisoned")
    model = directory / "model"
    model.mkdir()
    source = make_target(tie_word_embeddings=False)
    for path in source.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][47] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    documents = [json.loads(line) for line in data_file.read_text().splitlines()]
    for number, document in enumerate(documents):
        document["input_ids"] = [46 if token == 47 else token for token in document["input_ids"]]
        if number == 20:
            document["input_ids"][1] = 47
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return {"target_model": str(model), "data_dir": str(data)}


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
    assert run.finished.result == "finished"
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
