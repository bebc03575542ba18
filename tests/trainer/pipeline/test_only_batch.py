"""A batch of a refused step, run alone: it shows the tensor that went wrong in the run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from remote.protocol import events as ev
from remote.protocol.errors import ExitCode
from trainer import __main__ as entry

Start = Callable[..., Any]
Finish = Callable[[Any], Any]


def saved(run: Any) -> Path:
    """The first saved batch of the one refused step."""
    (directory,) = run.layout.bad.iterdir()
    return sorted(directory.glob("batch-*.safetensors"))[0]


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return look(file, *flags): exit code and output of `train --only-batch file`."""

    def call(file: Path, *flags: str) -> tuple[int, str]:
        before = sorted((path, path.stat().st_mtime_ns) for path in file.parent.rglob("*"))
        code = entry.main(["train", "--only-batch", str(file), *flags])
        assert sorted((path, path.stat().st_mtime_ns) for path in file.parent.rglob("*")) == before
        out, errors = capsys.readouterr()
        return code, out + errors

    return call


@pytest.fixture(scope="module")
def poisoned_run(start: Start, finish: Finish, poisoned: dict[str, str]) -> Any:
    return finish(start(**poisoned, target_gpus=[0, 1], drafter_gpus=[2]))


@pytest.mark.parametrize("flags", [[], ["--split-fc", "on"], ["--dtype", "bfloat16"]])
def test_the_tensor_that_went_wrong_in_the_run_is_shown_first(
    poisoned_run: Any, look: Callable[..., tuple[int, str]], flags: list[str]
) -> None:
    code, out = look(saved(poisoned_run), *flags)
    assert code == ExitCode.FAILED
    assert "the run saw   states that were not finite when they were packed (target" in out
    assert "here there is states that were not finite when they were packed, as in the run" in out
    assert re.search(r"1\. output of target embed_tokens .*: 32 of \d+ numbers, the first is nan", out)
    assert "(document 20, position 1)" in out
    assert "more" in out


def test_a_sound_target_shows_nothing_and_says_what_else_it_may_be(
    poisoned_run: Any, look: Callable[..., tuple[int, str]], make_target: Callable[..., Path]
) -> None:
    code, out = look(saved(poisoned_run), "--target-model", str(make_target(tie_word_embeddings=False)))
    assert code == ExitCode.OK
    assert "here there is nothing that is not finite: look at the way that the states took" in out
    assert "1." not in out.partition("look at")[2]


def test_the_weights_that_the_batch_met_are_looked_at(
    poisoned_run: Any, look: Callable[..., tuple[int, str]], make_target: Callable[..., Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(saved(poisoned_run).parent, tmp_path / "step"))
    file, sound = directory / saved(poisoned_run).name, ["--target-model", str(make_target(tie_word_embeddings=False))]
    weights = load_file(directory / "drafter.safetensors")
    weights["layers.1.mlp.up_proj.weight"][3, 2] = float("inf")
    save_file(weights, directory / "drafter.safetensors")
    code, out = look(file, *sound)
    assert code == ExitCode.FAILED
    assert re.search(r"1\. weight of drafter layers\.1\.mlp\.up_proj\.weight .*: 1 of .* is inf at \[3, 2\]", out)
    assert "output of drafter layers.1.mlp" in out
    assert "output of drafter layers.0" not in out
    assert re.search(r"\d+\. loss", out)
    (directory / "drafter.safetensors").unlink()
    code, out = look(file, *sound)
    assert (code, "the drafter   is a fresh one" in out) == (ExitCode.OK, True)
    save_file({"fc.weight": torch.zeros(2, 2)}, directory / "drafter.safetensors")
    code, out = look(file, *sound)
    assert (code, "is not the drafter of this batch" in out) == (ExitCode.USAGE, True)


# What decides the numbers of a batch besides its tokens: noise and anchors by document id, the softmax by all of the data.
EVERYTHING = {"noise_std": 0.1, "loss_vocab_extra": 2, "micro_batches_per_step": 1, "num_anchors": 3}


@pytest.mark.parametrize(
    "shape",
    [{}, {"target_gpus": [0], "drafter_gpus": [0]}, {"split_fc": "on"}, {"kl_weight": 0.5, "objective": "dpace"}],
)
def test_the_batch_meets_the_numbers_of_the_run(
    start: Start,
    finish: Finish,
    broken_head: Callable[[float], str],
    look: Callable[..., tuple[int, str]],
    shape: dict[str, Any],
) -> None:
    # The loss is finite, so that it can be compared; the norm of its gradient is not.
    run = finish(start(target_model=broken_head(1e200), **EVERYTHING, **shape))
    (step,) = run.events(ev.Step)
    code, out = look(saved(run))
    assert code == ExitCode.FAILED
    assert f"loss {step.loss:.6g}, gradient norm inf" in out
    assert "here there is a gradient that is not finite, of finite losses, as in the run" in out
    assert "1. gradient norm float64[]: 1 of 1 numbers, the first is inf" in out


def test_a_head_that_is_not_finite_is_named(
    start: Start, finish: Finish, broken_head: Callable[[float], str], look: Callable[..., tuple[int, str]]
) -> None:
    run = finish(start(target_model=broken_head(float("nan"))))
    code, out = look(saved(run))
    assert code == ExitCode.FAILED
    assert "here there is a loss that is not finite, of finite states, as in the run" in out
    assert re.search(r"1\. head of the target .*\n +2\. loss", out)


@pytest.mark.parametrize("file", ["missing", "data"])
def test_no_saved_batch_is_a_usage_error(
    look: Callable[..., tuple[int, str]], data_file: Path, tmp_path: Path, file: str
) -> None:
    code, out = look(data_file if file == "data" else tmp_path / "missing")
    assert code == ExitCode.USAGE
    assert "is no batch of a refused step" in out
    assert "bad/step-N/batch-B.safetensors" in out


def test_a_target_that_is_gone_is_named(poisoned_run: Any, look: Callable[..., tuple[int, str]]) -> None:
    code, out = look(saved(poisoned_run), "--target-model", "/nowhere")
    assert code == ExitCode.PREFLIGHT
    assert "no model directory at /nowhere" in out
