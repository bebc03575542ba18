"""Starting the drafter from the target's last layers, read from a real directory."""

from __future__ import annotations

import pytest
import torch

from remote.protocol.errors import DflashError, ExitCode
from trainer.drafter.config import derive
from trainer.drafter.model import Drafter
from trainer.drafter.start import start_from_target
from trainer.target.facts import target_facts
from trainer.target.weights import last_layers


def drafter_for(facts, **overrides):
    values = {"num_layers": 2, "block_size": 4, "mask_token_id": 3, "num_target_layer_ids": 2}
    return Drafter(derive(facts.text_config, **(values | overrides)))


def model_state(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).state_dict()


def test_llama_layers_are_copied_in_order(make_target):
    path = make_target()
    facts, state = target_facts(path), model_state(path)
    drafter = drafter_for(facts)
    start_from_target(drafter, *last_layers(facts, 2))
    own = drafter.state_dict()
    for index, source in enumerate((4, 5)):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm"):
            assert torch.equal(own[f"layers.{index}.{name}.weight"], state[f"model.layers.{source}.{name}.weight"])
    assert torch.equal(own["hidden_norm.weight"], state["model.layers.4.input_layernorm.weight"])
    assert torch.equal(own["norm.weight"], state["model.norm.weight"])


def test_fc_passes_the_last_captured_layer_through(make_target):
    facts = target_facts(make_target())
    drafter = drafter_for(facts)
    start_from_target(drafter, *last_layers(facts, 2))
    fc = drafter.fc.weight.detach()
    assert torch.allclose(fc[:, -32:].diagonal(), torch.ones(32), atol=0.2)
    assert float(fc[:, :32].std()) == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("kind", ["q", "k"])
def test_queries_and_keys_keep_their_size_without_head_norms_in_the_target(make_target, kind):
    path = make_target()
    facts, state = target_facts(path), model_state(path)
    drafter = drafter_for(facts)
    start_from_target(drafter, *last_layers(facts, 2))
    inputs = torch.randn(4000, 32, generator=torch.Generator().manual_seed(0))
    for index, layer in enumerate(drafter.layers):
        norm = state[f"model.layers.{4 + index}.input_layernorm.weight"]
        theirs = (inputs * norm) @ state[f"model.layers.{4 + index}.self_attn.{kind}_proj.weight"].T
        head_norm = getattr(layer.self_attn, f"{kind}_norm")
        ours = head_norm(theirs.unflatten(-1, (-1, 8))).detach()
        assert float(ours.square().mean().sqrt()) == pytest.approx(float(theirs.square().mean().sqrt()), rel=0.02)
        assert abs(float(ours.square().mean().sqrt()) - 1) > 0.2, "a norm left at 1 would pass this test too"


def test_qwen3_head_norms_are_copied(make_target):
    path = make_target("Qwen3ForCausalLM")
    facts, state = target_facts(path), model_state(path)
    drafter = drafter_for(facts)
    start_from_target(drafter, *last_layers(facts, 2))
    wanted = state["model.layers.5.self_attn.k_norm.weight"]
    assert torch.equal(drafter.state_dict()["layers.1.self_attn.k_norm.weight"], wanted)


@pytest.mark.parametrize("overrides", [{"head_dim": 16}, {"intermediate_size": 48}, {"num_key_value_heads": 4}])
def test_shapes_that_do_not_fit_are_refused(make_target, overrides):
    facts = target_facts(make_target())
    with pytest.raises(DflashError, match="cannot start") as caught:
        start_from_target(drafter_for(facts, **overrides), *last_layers(facts, 2))
    assert caught.value.code is ExitCode.PREFLIGHT


def test_the_number_of_layers_has_to_fit(make_target):
    facts = target_facts(make_target())
    with pytest.raises(DflashError, match="3 target layers"):
        start_from_target(drafter_for(facts), *last_layers(facts, 3))


def test_recurrent_layers_do_not_fit(make_target):
    facts = target_facts(make_target("Qwen3_5ForCausalLM"))
    with pytest.raises(DflashError, match="cannot start"):
        start_from_target(drafter_for(facts), *last_layers(facts, 2))
