"""A run that goes on from a checkpoint in mid-epoch equals the run that was never interrupted, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remote.protocol import events as ev
from remote.protocol.errors import DflashError, ExitCode
from trainer.checkpoint_files import STATE_FILE, read_state, step_directory

# Everything that draws or counts: noise, anchors, a sub-vocabulary, the target's layers, warm-up, two epochs of some 16 rows
# in steps of 3, so that one step spans the epochs.
EVERYTHING = {
    "epochs": 2, "checkpoint_every": 2, "keep_checkpoints": 9, "noise_std": 0.05, "loss_vocab_extra": 4, "num_anchors": 4,
    "init_from_target": "on", "warmup_ratio": 0.5, "max_grad_norm": 0.5,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "float32, 2+2": {"dtype": "float32", "target_gpus": [0, 1], "drafter_gpus": [2, 3]},
    "bfloat16, 1+1": {"dtype": "bfloat16", "split_fc": "on"},
    "float32, shared, D-PACE": {"dtype": "float32", "drafter_gpus": [0], "objective": "dpace"},
}


def steps(run: Any) -> dict[int, tuple[Any, ...]]:
    """What a step computed and met, without what the clock says."""
    return {
        each.step: (each.loss, each.accuracy, each.accept_len, each.grad_norm, each.lr, each.epoch, each.tokens)
        for each in run.events(ev.Step)
    }


def everything_saved(checkpoint: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(checkpoint / "drafter.safetensors") | load_file(checkpoint / "optimizer.safetensors")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("at", "epoch"), [(4, 0), (8, 1)])
def test_a_run_resumed_in_mid_epoch_is_the_uninterrupted_run(
    trained: Callable[..., Any], kind: str, at: int, epoch: int
) -> None:
    keys = EVERYTHING | KINDS[kind]
    whole = trained(**keys)
    expected = steps(whole)
    last = max(expected)
    # Not at an epoch's end: the step behind the checkpoint takes rows of the epoch that the checkpoint's own step took.
    assert expected[at][5] == expected[at + 1][5] == epoch
    rest = trained(**keys, resume=str(step_directory(whole.layout.checkpoints, at)))
    assert steps(rest) == {step: figures for step, figures in expected.items() if step > at}
    for step in [*range(at + 2, last, 2), last]:
        one, other = (everything_saved(step_directory(each.layout.checkpoints, step)) for each in (whole, rest))
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) and value.dtype == other[name].dtype for name, value in one.items())
    assert read_state(rest.checkpoints[-1]).loss == read_state(whole.checkpoints[-1]).loss


# What EVERYTHING has not. KL runs with the decayed cross-entropy, and a hybrid's last layers start no drafter.
OTHERS = {
    "hybrid, D-PACE": {"objective": "dpace", "layer_types": ["sliding", "full"], "sliding_window": 6},
    "hybrid, KL, mixed": {"kl_weight": 0.5, "attention": "mixed", "sliding_window": 6, "split_fc": "on"},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_run_resumed_on_other_ranks_goes_the_same_way(
    trained: Callable[..., Any], make_target: Callable[..., Path], kind: str
) -> None:
    """To rounding, in float64: sums are taken in another order."""
    target = {"target_model": str(make_target("Qwen3_5ForCausalLM")), "init_from_target": "off"}
    keys = EVERYTHING | OTHERS[kind] | target | {"dtype": "float64", "max_steps": 8}
    whole = trained(**keys)
    others = {"target_gpus": [0, 1], "drafter_gpus": [2, 3, 4]}
    rest = trained(**keys | others, resume=str(step_directory(whole.layout.checkpoints, 4)))
    expected, found = steps(whole), steps(rest)
    assert list(found) == [5, 6, 7, 8]
    for step, figures in found.items():
        assert figures == pytest.approx(expected[step], rel=1e-8, abs=1e-8)
    one, other = everything_saved(whole.checkpoints[-1]), everything_saved(rest.checkpoints[-1])
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-8, atol=1e-8)


def test_the_comparison_sees_a_run_that_went_another_way(trained: Callable[..., Any]) -> None:
    keys = EVERYTHING | KINDS["bfloat16, 1+1"]
    assert steps(trained(**keys))[1] != steps(trained(**keys | {"noise_std": 0.051}))[1]


def test_another_target_of_the_same_shape_is_refused(
    trained: Callable[..., Any], start: Callable[..., Any], make_target: Callable[..., Path]
) -> None:
    keys = EVERYTHING | KINDS["bfloat16, 1+1"]
    checkpoint = step_directory(trained(**keys).layout.checkpoints, 4)
    assert len(json.loads((checkpoint / STATE_FILE).read_text())["target_fingerprint"]) == 128
    with pytest.raises(DflashError, match="belongs to another configuration") as caught:
        start(**keys | {"target_model": str(make_target(seed=1))}, resume=str(checkpoint))
    assert caught.value.code is ExitCode.PREFLIGHT
    assert caught.value.cause == "the target is another model"
