"""Captured states against transformers' own hidden states, on every supported architecture."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers

from remote.protocol.errors import DflashError, ExitCode
from trainer.target.ends import load_ends
from trainer.target.load import load_target

ARCHITECTURES = ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"]
IDS = (0, 2, 3)


def load(path, **overrides):
    values = {"dtype": torch.float32, "device": "cpu", "target_layer_ids": IDS}
    return load_target(path, **(values | overrides))


@torch.no_grad()
def hidden_states(path, architecture, input_ids):
    model = getattr(transformers, architecture).from_pretrained(path).eval()
    return model(input_ids=input_ids, output_hidden_states=True).hidden_states


def tokens(*shape):
    return torch.randint(3, 48, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_id_i_is_hidden_states_i_plus_one(make_target, architecture):
    path = make_target(architecture)
    input_ids = tokens(2, 11)
    captured = load(path).capture(input_ids)
    reference = hidden_states(path, architecture, input_ids)
    assert len(captured) == 3
    for layer, states in zip(IDS, captured, strict=True):
        torch.testing.assert_close(states, reference[layer + 1], rtol=0, atol=1e-5)
        assert (states - reference[layer]).abs().max() > 1e-2, "hidden_states[id] would be the layer's input"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_padded_batch_equals_each_sequence_alone(make_target, architecture):
    target = load(make_target(architecture))
    lengths = [7, 13, 1, 4]
    batch = tokens(4, 13)
    padded = batch.masked_fill(torch.arange(13) >= torch.tensor(lengths)[:, None], 2)
    captured = target.capture(padded)
    for row, length in enumerate(lengths):
        alone = target.capture(batch[row : row + 1, :length])
        for together, own in zip(captured, alone, strict=True):
            # States reach 50 here, so that float32 rounds at 1e-5.
            torch.testing.assert_close(together[row, :length], own[0], rtol=1e-5, atol=5e-5)


def test_layers_behind_the_last_captured_one_are_not_there(make_target):
    stack = load(make_target()).stack
    assert len(stack.get_submodule("layers")._modules) == 4
    assert len(load(make_target(), whole=True).stack.get_submodule("layers")._modules) == 6


def test_the_target_is_frozen_and_leaves_no_hook(make_target):
    target = load(make_target())
    captured = target.capture(tokens(1, 5))
    assert not any(parameter.requires_grad for parameter in target.stack.parameters())
    assert not any(module._forward_hooks for module in target.stack.modules())
    assert not target.stack.training
    assert all(not states.requires_grad for states in captured)


def test_dtype_is_that_asked_for(make_target):
    target = load(make_target(), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in target.stack.parameters()} == {torch.bfloat16}
    assert target.capture(tokens(1, 5))[0].dtype is torch.bfloat16


def test_shards_load_like_one_file(make_target):
    input_ids = tokens(1, 9)
    whole, shards = (load(make_target(**kind)) for kind in ({}, {"max_shard_size": "20KB"}))
    for one, other in zip(whole.capture(input_ids), shards.capture(input_ids), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ids", [(), (5,), (-1,), (3, 2), (2, 2), (0, 6)])
def test_layer_ids_out_of_range_or_order_are_refused(make_target, ids):
    with pytest.raises(DflashError, match="target_layer_ids") as caught:
        load(make_target(), target_layer_ids=ids)
    assert caught.value.code is ExitCode.PREFLIGHT


def test_a_missing_tensor_is_an_error_not_random_numbers(make_target, tmp_path):
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(make_target(), tmp_path / "model")
    state = load_file(path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, path / "model.safetensors")
    with pytest.raises(DflashError, match="lacks 1 tensors") as caught:
        load(path)
    assert "layers.1.mlp.up_proj" in caught.value.cause


def test_a_misshapen_tensor_is_named(make_target, tmp_path):
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(make_target(), tmp_path / "model")
    state = load_file(path / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(state, path / "model.safetensors")
    with pytest.raises(DflashError) as caught:
        load(path)
    assert "[3, 3]" in caught.value.cause


def test_tied_ends_are_one_tensor(make_target):
    embed, head = load_ends(make_target(), torch.float32, "cpu")
    assert embed is head
    assert embed.shape == (48, 32)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_untied_ends_are_the_models_own(make_target, architecture):
    path = make_target(architecture, tie_word_embeddings=False)
    model = getattr(transformers, architecture).from_pretrained(path)
    embed, head = load_ends(path, torch.float64, "cpu")
    assert torch.equal(embed, model.get_input_embeddings().weight.double())
    assert torch.equal(head, model.get_output_embeddings().weight.double())
    assert not torch.equal(embed, head)
