"""Export: what a serving engine reads is what was trained; what would break serving is refused."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from remote.protocol.errors import DflashError, ExitCode
from trainer import export
from trainer.drafter.config import DrafterConfig, derive
from trainer.drafter.model import Drafter

TARGET = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}


@pytest.fixture(scope="module")
def config() -> DrafterConfig:
    return derive(TARGET, num_layers=2, block_size=4, mask_token_id=3, num_target_layer_ids=3)


@pytest.fixture(scope="module")
def drafter(config) -> Drafter:
    torch.manual_seed(0)
    return Drafter(config)


@pytest.fixture
def checkpoint(tmp_path, config, drafter):
    directory = tmp_path / "step-7"
    directory.mkdir()
    save_file(drafter.state_dict(), directory / export.DRAFTER_FILE)
    (directory / export.DRAFTER_CONFIG_FILE).write_text(json.dumps(config.to_zlab("float32")))
    return directory


def run(*words):
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    return export.run(parser.parse_args([str(word) for word in words]))


def test_a_checkpoint_becomes_a_served_directory(checkpoint, tmp_path, drafter, capsys):
    out = tmp_path / "out"
    assert run("--checkpoint", checkpoint, "--output", out) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    served = json.loads((out / "config.json").read_text())
    assert served["dtype"] == "bfloat16"
    assert served["architectures"] == ["DFlashDraftModel"]
    assert served["block_size"] == served["dflash_config"]["block_size"] == 4
    assert "auto_map" not in served
    tensors = load_file(out / "model.safetensors")
    assert tensors.keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensors[name], tensor.bfloat16())


def test_what_was_exported_in_float32_is_loaded_bit_for_bit(tmp_path, config, drafter):
    export.export_drafter(drafter.state_dict(), config, tmp_path / "out", "float32")
    loaded = export.load_exported(tmp_path / "out")
    assert loaded.config == config
    assert not loaded.training
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def break_state(kind, state):
    state = dict(state)
    if kind == "prefix":
        return {f"draft_model.{name}": tensor for name, tensor in state.items()}
    if kind == "missing":
        del state["norm.weight"]
    if kind == "embedding":
        state["embed_tokens.weight"] = torch.zeros(40, 32)
    if kind == "shape":
        state["fc.weight"] = torch.zeros(32, 64)
    if kind == "nan":
        state["fc.weight"] = torch.full((32, 96), float("nan"))
    return state


@pytest.mark.parametrize("kind", ["prefix", "missing", "embedding", "shape", "nan"])
def test_what_breaks_serving_is_refused_and_nothing_is_left(tmp_path, config, drafter, kind):
    with pytest.raises(DflashError) as caught:
        export.export_drafter(break_state(kind, drafter.state_dict()), config, tmp_path / "out", "bfloat16")
    assert caught.value.code is ExitCode.PREFLIGHT
    assert caught.value.cause
    assert list(tmp_path.iterdir()) == []


def test_a_weight_too_large_for_the_type_is_refused(tmp_path, config, drafter):
    state = drafter.state_dict() | {"norm.weight": torch.full((32,), 1e6)}
    with pytest.raises(DflashError, match="not finite"):
        export.export_drafter(state, config, tmp_path / "out", "float16")
    export.export_drafter(state, config, tmp_path / "out", "bfloat16")


def test_an_existing_directory_is_not_overwritten(tmp_path, config, drafter):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").touch()
    with pytest.raises(DflashError, match="exists already"):
        export.export_drafter(drafter.state_dict(), config, tmp_path / "out", "bfloat16")


def test_an_unknown_type_is_refused(tmp_path, config, drafter):
    with pytest.raises(DflashError, match="int8"):
        export.export_drafter(drafter.state_dict(), config, tmp_path / "out", "int8")


def test_a_directory_that_is_no_checkpoint(tmp_path):
    with pytest.raises(DflashError, match="no checkpoint") as caught:
        run("--checkpoint", tmp_path, "--output", tmp_path / "out")
    assert caught.value.code is ExitCode.PREFLIGHT


def test_a_cut_off_checkpoint(checkpoint, tmp_path):
    weights = checkpoint / export.DRAFTER_FILE
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(DflashError, match="cannot read"):
        run("--checkpoint", checkpoint, "--output", tmp_path / "out")


def test_a_type_that_config_and_tensors_disagree_on(tmp_path, config, drafter):
    export.export_drafter(drafter.state_dict(), config, tmp_path / "out", "float32")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(config.to_zlab("bfloat16")))
    with pytest.raises(DflashError, match="inconsistent") as caught:
        export.load_exported(tmp_path / "out")
    assert "float32" in caught.value.cause
