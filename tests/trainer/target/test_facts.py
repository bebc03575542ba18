"""What a target directory says of itself, and what is said of a broken one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from remote.protocol.errors import DflashError, ExitCode
from trainer.target.facts import target_facts

MakeTarget = Callable[..., Path]


@pytest.fixture
def copy(make_target, tmp_path):
    """A target directory that a test may break."""
    return shutil.copytree(make_target(), tmp_path / "model")


def refused(path) -> DflashError:
    with pytest.raises(DflashError) as caught:
        target_facts(path)
    assert caught.value.code is ExitCode.PREFLIGHT
    return caught.value


def test_a_tied_llama(make_target):
    facts = target_facts(make_target())
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (32, 6, 48)
    assert facts.tied
    assert facts.head_name == facts.embedding_name == "model.embed_tokens.weight"
    assert facts.eos_token_ids == (2,)
    assert not facts.hybrid


def test_an_untied_qwen3(make_target):
    facts = target_facts(make_target("Qwen3ForCausalLM", tie_word_embeddings=False, eos_token_id=[2, 7]))
    assert not facts.tied
    assert facts.head_name == "lm_head.weight"
    assert facts.eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("architecture", "embedding"),
    [
        ("Qwen3_5ForCausalLM", "model.embed_tokens.weight"),
        ("Qwen3_5ForConditionalGeneration", "model.language_model.embed_tokens.weight"),
    ],
)
def test_a_hybrid_text_class_and_its_wrapper(make_target, architecture, embedding):
    facts = target_facts(make_target(architecture, tie_word_embeddings=False))
    assert facts.hybrid
    assert facts.embedding_name == embedding
    assert facts.hidden_size == 32
    assert facts.text_config["num_hidden_layers"] == 6


def test_shards_are_read_through_their_index(make_target):
    path = make_target(max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    assert target_facts(path).tensors.keys() == target_facts(make_target()).tensors.keys()


def test_a_missing_directory(tmp_path):
    assert "no model directory" in refused(tmp_path / "nowhere").error


def test_a_directory_without_config(tmp_path):
    assert "config.json" in refused(tmp_path).cause


def test_a_config_that_is_no_json(copy):
    (copy / "config.json").write_text("{")
    assert "no JSON" in refused(copy).cause


def test_another_architecture_names_the_supported_ones(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    error = refused(copy)
    assert "GPT2LMHeadModel" in error.error
    assert "LlamaForCausalLM" in error.hint


def test_no_weights(copy):
    (copy / "model.safetensors").unlink()
    assert "safetensors" in refused(copy).cause


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_a_cut_off_file_is_named(copy, keep):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors" in refused(copy).cause


def test_one_byte_less_is_seen(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "cut off" in refused(copy).cause


def test_a_missing_shard_is_named(make_target, tmp_path):
    path = shutil.copytree(make_target(max_shard_size="20KB"), tmp_path / "model")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refused(path).cause


def test_a_head_that_is_neither_there_nor_tied(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert "lm_head.weight" in refused(copy).cause


def test_facts_need_no_torch(make_target):
    code = (
        "import sys; from trainer.target.facts import target_facts; "
        f"target_facts({str(make_target())!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FP8, INT8 = torch.float8_e4m3fn, torch.int8


def quantise(path: Path, dtype: torch.dtype, said: Any, *, nested: bool = False) -> None:
    """Convert the linear layers of a target as fp8 and compressed-tensors releases have them: plain names, scales beside."""
    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].abs().max() / (torch.finfo(dtype).max if dtype.is_floating_point else 127)
        weights[name] = (weights[name] / scale).to(dtype)
        weights[f"{name}_scale_inv"] = scale.reshape(1)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (config["text_config"] if nested else config)["quantization_config"] = said
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("dtype", "method"), [(FP8, "fp8"), (INT8, "compressed-tensors")])
def test_a_quantised_target_is_refused_by_what_it_says(
    make_target: MakeTarget, tmp_path: Path, dtype: torch.dtype, method: str
) -> None:
    path = shutil.copytree(make_target("Qwen3ForCausalLM"), tmp_path / "model")
    quantise(path, dtype, {"quant_method": method, "weight_block_size": [128, 128]})
    error = refused(path)
    assert "quantised" in error.error
    assert f"method {method}" in error.cause
    assert "bf16 release" in error.hint


def test_a_wrapper_may_say_it_inside(make_target: MakeTarget, tmp_path: Path) -> None:
    source = make_target("Qwen3_5ForConditionalGeneration", tie_word_embeddings=False)
    path = shutil.copytree(source, tmp_path / "model")
    quantise(path, torch.bfloat16, {"quant_method": "fp8"}, nested=True)
    assert "method fp8" in refused(path).cause


@pytest.mark.parametrize(("dtype", "kind"), [(FP8, "F8_E4M3"), (INT8, "I8")])
def test_a_quantised_target_that_says_nothing_is_known_by_its_tensors(
    make_target: MakeTarget, tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    path = shutil.copytree(make_target("Qwen3ForCausalLM"), tmp_path / "model")
    quantise(path, dtype, None)
    assert refused(path).cause == f"model.layers.0.mlp.down_proj.weight is of type {kind}, not F16, BF16, F32 or F64"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_plain_type_is_taken_and_other_parts_may_be_of_any(
    make_target: MakeTarget, tmp_path: Path, dtype: torch.dtype
) -> None:
    source = make_target("Qwen3_5ForConditionalGeneration", tie_word_embeddings=False)
    path = shutil.copytree(source, tmp_path / "model")
    weights = {name: value.to(dtype) for name, value in load_file(path / "model.safetensors").items()}
    # The vision tower is never loaded.
    weights["model.visual.extra"] = torch.zeros(2, dtype=torch.int8)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert target_facts(path).hybrid


def test_a_head_of_another_type_is_seen(make_target: MakeTarget, tmp_path: Path) -> None:
    path = shutil.copytree(make_target("Qwen3ForCausalLM", tie_word_embeddings=False), tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].to(FP8)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight is of type F8_E4M3" in refused(path).cause


@pytest.mark.parametrize(("outer", "inner", "tied"), [(True, True, True), (False, False, False), (False, True, False)])
def test_a_wrapper_that_says_two_things_is_judged_by_its_files(make_target, tmp_path, outer, inner, tied):
    path = shutil.copytree(
        make_target("Qwen3_5ForConditionalGeneration", tie_word_embeddings=False), tmp_path / "model"
    )
    config = json.loads((path / "config.json").read_text())
    config["tie_word_embeddings"] = outer
    config["text_config"]["tie_word_embeddings"] = inner
    (path / "config.json").write_text(json.dumps(config))
    assert target_facts(path).tied is tied


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_said(make_target, name):
    # Not below tmp_path, whose parents only root may enter: root itself reads every file, so it becomes somebody else here.
    with tempfile.TemporaryDirectory() as directory:
        path = Path(shutil.copytree(make_target(), Path(directory) / "model"))
        for each in (Path(directory), path, *path.iterdir()):
            each.chmod(0o755)
        (path / name).chmod(0)
        root = os.geteuid() == 0
        if root:
            os.chown(path / name, 1, 1)
            os.seteuid(65534)
        try:
            error = refused(path)
        finally:
            if root:
                os.seteuid(0)
    assert error.cause == f"{name} cannot be read: Permission denied"
    assert error.hint
