"""KL to the target's logits through the whole pipeline: the right states arrive, whichever way they travel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from remote.protocol import events as ev
from trainer.data.documents import open_dataset
from trainer.drafter.blocks import build_blocks
from trainer.drafter.config import gamma_for
from trainer.drafter.fresh import fresh_drafter
from trainer.preflight import drafter_config, make_schedule, packing_of
from trainer.target.facts import target_facts

Trained = Callable[..., Any]

WAYS: dict[str, dict[str, Any]] = {
    "sync, split-fc": {"transfer": "sync", "split_fc": "on"},
    "shared": {"drafter_gpus": [0]},
    "3 drafters": {"drafter_gpus": [1, 2, 3]},
}
TARGETS = ["LlamaForCausalLM", "Qwen3_5ForCausalLM"]


@pytest.fixture(scope="module")
def values(make_target: Callable[..., Path]) -> Callable[[str], dict[str, Any]]:
    """Four steps of KL and cross-entropy in equal parts; shares of a row never bind, noise is on."""

    def of(architecture: str) -> dict[str, Any]:
        return {
            "target_model": str(make_target(architecture, tie_word_embeddings=False)),
            "kl_weight": 0.5, "noise_std": 0.1, "row_anchors": 400, "max_steps": 4,
        }  # fmt: skip

    return of


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_losses(trained: Trained, values: Callable[[str], dict[str, Any]], way: str) -> None:
    keys = values("LlamaForCausalLM") | {"objective": "dpace", "loss_vocab_extra": 4}
    reference, run = trained(**keys), trained(**keys, **WAYS[way])
    assert len(reference.losses) == 4
    assert list(run.losses.values()) == pytest.approx(list(reference.losses.values()), abs=1e-10)
    assert run.events(ev.AlarmRaised) == []


@pytest.mark.parametrize("architecture", TARGETS)
def test_the_first_loss_is_that_of_the_targets_own_logits(
    trained: Trained, values: Callable[[str], dict[str, Any]], architecture: str
) -> None:
    run = trained(**values(architecture) | {"noise_std": 0.0})
    assert run.losses[1] == pytest.approx(expected_loss(run.config), rel=1e-9)


def expected_loss(config: Any) -> float:
    """Return the loss of step 1 by transformers' own model, one document at a time, all logits at once."""
    from transformers import AutoModelForCausalLM

    # First: transformers loads with threads of its own, and the drafter is drawn from torch's one generator.
    drafter = fresh_drafter(config).double()
    facts = target_facts(Path(config.target_model))
    model = AutoModelForCausalLM.from_pretrained(config.target_model, dtype=torch.float64).eval()
    head = model.get_output_embeddings().weight
    ids = drafter_config(config, facts).target_layer_ids
    dataset = open_dataset(Path(config.data_dir), max_length=config.max_length, vocab_size=48)
    schedule = make_schedule(config, packing_of(config, dataset.lengths, dataset.candidates))
    loss = weight = 0.0
    for number in (document for each in schedule.step(1) for document in each.row.documents):
        document = dataset.document(number)
        length = len(document.input_ids)
        with torch.no_grad():
            tokens = torch.from_numpy(document.input_ids.astype(np.int64))[None]
            output = model(input_ids=tokens, output_hidden_states=True)
            blocks = build_blocks(
                document.input_ids, document.loss_mask, np.full(length, number), np.arange(length, dtype=np.int32),
                seed=config.seed, epoch=0, num_anchors=config.num_anchors, row_budget=10_000, block_size=4,
                mask_token_id=3, gamma=gamma_for(4),
            )  # fmt: skip
            states = torch.cat([output.hidden_states[each + 1][0] for each in ids], dim=-1)
            embeds = functional.embedding(blocks.input_ids.flatten(), model.get_input_embeddings().weight)
            log_p = (drafter(embeds, states, blocks) @ head.T).log_softmax(dim=-1).view(blocks.count, 4, -1)
            taught = output.logits[0].log_softmax(dim=-1)
        for n, k in blocks.supervised.nonzero().tolist():
            own, token = log_p[n, k], int(blocks.anchor_rows[n]) + k
            target = taught[token - 1]
            divergence = (target.exp() * (target - own)).sum()
            weight += float(blocks.weights[n, k])
            loss += float(blocks.weights[n, k] * (divergence - own[document.input_ids[token]]) / 2)
    return loss / weight


def test_it_is_another_objective(trained: Trained, values: Callable[[str], dict[str, Any]]) -> None:
    keys = values("LlamaForCausalLM")
    losses = [trained(**keys | {"kl_weight": share}).losses[1] for share in (0.0, 0.5, 1.0)]
    # A mixture at the fresh drafter; nothing else of the step depends on the share.
    assert losses[1] == pytest.approx((losses[0] + losses[2]) / 2, rel=1e-9)
    assert abs(losses[0] - losses[2]) > 0.01
