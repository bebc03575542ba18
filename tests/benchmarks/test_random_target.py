"""The random target is a model like any other: for plain transformers, for our loader, and for a user's error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from benchmarks.random_target import QWEN36_27B, SHAPES, main, make_target
from trainer.target.facts import target_facts
from trainer.target.load import load_target
from trainer.target.weights import read_tensors


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "toy"
    assert make_target(path, "toy", device="cpu") == sum(file.stat().st_size for file in path.glob("*.safetensors")) - (
        sum(8 + _header_bytes(file) for file in path.glob("*.safetensors"))
    )
    return path


def _header_bytes(file: Path) -> int:
    with file.open("rb") as stream:
        return int.from_bytes(stream.read(8), "little")


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@torch.no_grad()
def test_our_loader_and_plain_transformers_compute_the_same_states(toy):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        toy, dtype=torch.float32, output_loading_info=True
    )
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    input_ids = torch.randint(128, (2, 70), generator=torch.Generator().manual_seed(0))
    reference = model.eval()(input_ids=input_ids, output_hidden_states=True).hidden_states
    captured = load_target(toy, dtype=torch.float32, device="cpu", target_layer_ids=(1, 3, 6)).capture(input_ids)
    for layer, states in zip((1, 3, 6), captured, strict=True):
        torch.testing.assert_close(states, reference[layer + 1], rtol=0, atol=1e-6)
        assert torch.isfinite(states).all()


def test_the_states_of_all_layers_stay_finite_and_of_sane_size_in_bfloat16(toy):
    target = load_target(toy, dtype=torch.bfloat16, device="cpu", target_layer_ids=(0, 6))
    first, last = target.capture(torch.arange(128)[None])
    assert torch.isfinite(last).all()
    assert first.float().std() > 1e-3
    assert last.float().std() < 10


def test_norms_begin_at_one_in_either_way_of_storing_them(toy):
    tensors = tensors_of(toy)
    # This architecture multiplies by 1 + weight everywhere but behind the gated recurrence.
    assert (tensors["model.norm.weight"] == 0).all()
    assert (tensors["model.layers.3.self_attn.q_norm.weight"] == 0).all()
    assert (tensors["model.layers.0.linear_attn.norm.weight"] == 1).all()
    decay = tensors["model.layers.0.linear_attn.A_log"].float().exp()
    assert decay.min() > 0
    assert decay.max() <= 16.1


def test_weights_are_drawn_as_a_training_begins_and_differ_from_layer_to_layer(toy):
    tensors = tensors_of(toy)
    one, other = (tensors[f"model.layers.{layer}.mlp.up_proj.weight"].float() for layer in (0, 1))
    assert one.std() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(one, other)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_the_seed_decides_the_weights(toy, tmp_path):
    for seed in (0, 1):
        make_target(tmp_path / str(seed), "toy", device="cpu", seed=seed)
    again, another = tensors_of(tmp_path / "0"), tensors_of(tmp_path / "1")
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors_of(toy).items())
    assert not torch.equal(again["lm_head.weight"], another["lm_head.weight"])


def test_every_tensor_is_in_the_index_and_in_the_facts(toy):
    index = json.loads((toy / "model.safetensors.index.json").read_text())["weight_map"]
    facts = target_facts(toy)
    assert set(index) == set(facts.tensors) == set(tensors_of(toy))
    assert facts.hybrid
    assert not facts.tied
    assert facts.eos_token_ids == (2,)
    ((_, head),) = read_tensors(facts.tensors, ["lm_head.weight"], dtype=torch.float32, device=torch.device("cpu"))
    assert head.shape == (128, 64)


def test_fewer_layers_keep_the_pattern(tmp_path):
    make_target(tmp_path / "four", "toy", layers=4, device="cpu")
    facts = target_facts(tmp_path / "four")
    assert facts.num_layers == 4
    assert facts.text_config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]


def test_the_27b_shape_has_the_size_that_was_measured():
    # 25.6 billion parameters without the head, which is not run (pipeline figures of 2026-11-30).
    config = transformers.Qwen3_5TextConfig(**QWEN36_27B)
    with torch.device("meta"):
        stack = transformers.AutoModel.from_config(config)
    assert sum(parameter.numel() for parameter in stack.parameters()) / 1e9 == pytest.approx(25.6, abs=0.05)
    assert config.layer_types.count("full_attention") == 16


@pytest.mark.parametrize("key", ["linear_num_key_heads", "linear_key_head_dim", "head_dim", "rope_parameters"])
def test_every_shape_names_what_the_architecture_would_else_choose_itself(key):
    assert all(key in shape for shape in SHAPES.values())


def test_the_command_line_refuses_a_directory_that_is_there(toy, capsys):
    assert main([str(toy), "--shape", "toy", "--device", "cpu"]) == 7
    assert "exists already" in capsys.readouterr().err


def test_the_command_line_says_what_it_made(tmp_path, capsys):
    assert main([str(tmp_path / "new"), "--shape", "toy", "--layers", "4", "--device", "cpu"]) == 0
    assert "new: toy, 0.0 GB" in capsys.readouterr().out
