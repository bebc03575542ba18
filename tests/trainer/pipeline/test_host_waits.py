"""No step waits for the device (rule 6): counted over the very steps of a run, with both roles in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from races.in_process import shared_session
from races.waits import HostWaits

from trainer.train import train

EVERYTHING = {"noise_std": 0.1, "objective": "dpace", "kl_weight": 0.5, "loss_vocab_extra": 8, "split_fc": "on"}


@pytest.mark.parametrize(
    ("architecture", "keys"), [("LlamaForCausalLM", EVERYTHING), ("Qwen3ForCausalLM", {}), ("Qwen3_5ForCausalLM", {})]
)
def test_no_operation_of_a_step_asks_the_device(
    make_target: Callable[..., Path],
    tiny_values: dict[str, Any],
    tmp_path: Path,
    architecture: str,
    keys: dict[str, Any],
) -> None:
    target = make_target(architecture, tie_word_embeddings=False)
    values = tiny_values | keys | {"target_model": str(target), "drafter_gpus": [0], "max_steps": 2}
    waits = HostWaits()
    with shared_session(values, tmp_path) as session:
        # A checkpoint takes the weights to the host, once in a while: not counted.
        session.checkpoint_due = lambda step: False  # type: ignore[method-assign]
        with waits:
            train(session)
        assert session.step == 2
    assert waits.found == []


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: torch.equal(x, x),
    ],
)
def test_whatever_asks_the_device_is_counted(ask: Callable[[torch.Tensor], Any]) -> None:
    x = torch.randn(8)
    with HostWaits() as waits:
        (x * 2).clamp(min=0).softmax(0)[torch.tensor([1, 2])].mean()
        assert waits.found == []
        ask(x)
    assert len(waits.found) == 1
    assert "test_host_waits.py" in waits.found[0]
