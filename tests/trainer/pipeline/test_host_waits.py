"""No step waits for the device (rule 6): counted over the very steps of a run, with both roles in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from races.waits import HostWaits

from remote.protocol import events as ev
from remote.protocol.layout import RunLayout, new_run_id
from trainer.config import TrainConfig
from trainer.pipeline import leader, roles
from trainer.pipeline.layout import Role
from trainer.pipeline.post import take_post
from trainer.pipeline.session import DrafterSession
from trainer.pipeline.world import World
from trainer.telemetry import PhaseLog
from trainer.train import train


class Deaf:
    """Telemetry that nobody reads."""

    def emit(self, event: ev.Event) -> None:
        return

    def close(self) -> None:
        return


@contextlib.contextmanager
def shared_session(values: dict[str, Any], directory: Path) -> Iterator[DrafterSession]:
    """Yield a rank that is target and drafter."""
    layout = RunLayout(directory / new_run_id())
    layout.create()
    layout.run_lock.touch()
    plan = leader.prepare(TrainConfig.from_mapping(values), layout)
    world = World(rank=0, local_rank=0, machine=0, machines=1, drafters=None, drafter_count=1)
    try:
        with take_post(plan, world, Deaf(), PhaseLog(Deaf(), role=Role.SHARED, rank=0)) as post:
            producer = roles.load_producer(post)
            yield roles.make_session(post, producer, *roles.build_drafter(post))
    finally:
        plan.forget_names()


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
