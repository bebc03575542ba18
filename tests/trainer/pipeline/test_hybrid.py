"""A target with recurrent layers goes through the whole pipeline: both layouts, both handovers, both forms of fc."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remote.protocol import events as ev
from trainer.target.facts import target_facts

Trained = Callable[..., Any]

KINDS: dict[str, dict[str, Any]] = {
    "sync": {"transfer": "sync"},
    "sync, split-fc": {"transfer": "sync", "split_fc": "on"},
    "shared": {"drafter_gpus": [0]},
    "shared, split-fc": {"drafter_gpus": [0], "split_fc": "on"},
    "the multimodal wrapper": {},
}


@pytest.fixture(scope="module")
def wrapper(make_target: Callable[..., Path]) -> dict[str, Any]:
    return {
        "target_model": str(make_target("Qwen3_5ForConditionalGeneration", tie_word_embeddings=False)),
        "max_steps": 4,
    }


@pytest.fixture(scope="module")
def hybrid(wrapper: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The text class of the wrapper's own weights."""
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("hybrid")
    AutoModelForCausalLM.from_pretrained(wrapper["target_model"]).save_pretrained(path)
    assert target_facts(path).architecture == "Qwen3_5ForCausalLM"
    return wrapper | {"target_model": str(path)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_gives_the_same_losses(
    trained: Trained, hybrid: dict[str, Any], wrapper: dict[str, Any], kind: str
) -> None:
    reference = trained(**hybrid)
    run = trained(**(wrapper if kind == "the multimodal wrapper" else hybrid) | KINDS[kind])
    assert len(reference.losses) == 4
    assert list(run.losses.values()) == pytest.approx(list(reference.losses.values()), abs=1e-9)
    assert run.events(ev.AlarmRaised) == []


def test_another_target_gives_other_losses(trained: Trained, hybrid: dict[str, Any]) -> None:
    # Or the states could be anything and the runs above would still agree.
    assert trained(**hybrid).losses[1] != pytest.approx(trained(max_steps=4).losses[1], abs=1e-3)
