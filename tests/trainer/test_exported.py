"""A run that starts from an exported drafter: its weights to the bit, and no start from one that does not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remote.protocol.errors import DflashError, ExitCode
from trainer.config import TrainConfig
from trainer.drafter.config import DrafterConfig
from trainer.drafter.fresh import fresh_drafter
from trainer.drafter.model import Drafter
from trainer.export import export_drafter
from trainer.export_speculators import speculators_config
from trainer.exported import load_exported
from trainer.preflight import drafter_config, preflight
from trainer.target.facts import target_facts


@pytest.fixture(scope="module")
def config(make_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    data = tmp_path_factory.mktemp("data") / "data.jsonl"
    data.write_text("".join(json.dumps({"input_ids": list(range(4, 30)), "prompt_len": 3}) + "\n" for _ in range(20)))
    return TrainConfig(
        target_model=str(make_target()), data_dir=str(data), mask_token_id=3, block_size=4, drafter_layers=2,
        captured_layers=2, max_length=64, token_budget=128, bucket_tokens=16, num_anchors=8, row_anchors=24, device="cpu",
        ring_mib=8, dtype="float32", attention="full",
    )  # fmt: skip


@pytest.fixture(scope="module")
def earlier(config: TrainConfig) -> Drafter:
    """A drafter that another seed gave."""
    return fresh_drafter(dataclasses.replace(config, seed=7))


def exported(directory: Path, drafter: Drafter, dtype: str = "float32", layout: str = "zlab", **changes: Any) -> Path:
    """Export a drafter, its configuration changed where that keeps the shapes."""
    shape: DrafterConfig = dataclasses.replace(drafter.config, **changes)
    served = None if layout == "zlab" else speculators_config(shape, dtype, "target", ("LlamaForCausalLM",))
    export_drafter(drafter.state_dict(), shape, directory, dtype, served_config=served)
    return directory


def starting(config: TrainConfig, directory: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.from_mapping(config.to_dict() | {"init_from_drafter": str(directory)} | changes)


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_run_begins_with_the_weights_of_the_drafter(
    config: TrainConfig, earlier: Drafter, tmp_path: Path, layout: str, dtype: str
) -> None:
    directory = exported(tmp_path / "out", earlier, dtype, layout)
    given = starting(config, directory)
    preflight(given, tmp_path)
    drafter = fresh_drafter(given)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, earlier.state_dict()[name].to(getattr(torch, dtype)).float())
    assert not torch.equal(drafter.fc.weight, fresh_drafter(config).fc.weight)
    # What is loaded for decoding is frozen; this one is to be trained.
    assert drafter.training
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}


def test_block_size_and_attention_may_change(config: TrainConfig, earlier: Drafter, tmp_path: Path) -> None:
    directory = exported(tmp_path / "out", earlier)
    given = starting(config, directory, block_size=8, attention="sliding", sliding_window=16)
    preflight(given, tmp_path)
    assert fresh_drafter(given).config.block_size == 8
    assert torch.equal(fresh_drafter(given).fc.weight, earlier.fc.weight)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"drafter_layers": 3}, "drafter_layers: 2 there, 3 here"),
        ({"drafter_heads": 2}, "drafter_heads: 4 there, 2 here"),
        ({"drafter_ffn": 20}, "drafter_ffn: 64 there, 20 here"),
        ({"mask_token_id": 2}, "mask_token_id: 3 there, 2 here"),
        ({"drafter_rope_theta": 5.0}, "drafter_rope_theta: 10000.0 there, 5.0 here"),
        # The same shapes: without the comparison it would train on what the drafter never saw.
        ({"target_layer_ids": [1, 2]}, "target_layer_ids: (1, 3) there, (1, 2) here"),
    ],
)
def test_another_shape_is_refused_by_the_keys_that_set_it(
    config: TrainConfig, earlier: Drafter, tmp_path: Path, changes: dict[str, Any], cause: str
) -> None:
    given = starting(config, exported(tmp_path / "out", earlier), **changes)
    with pytest.raises(DflashError, match="cannot start from") as caught:
        preflight(given, tmp_path)
    assert caught.value.code is ExitCode.PREFLIGHT
    assert caught.value.cause == cause
    assert caught.value.hint == f"set {next(iter(changes))} to what it has"
    # The values that it has are a configuration that passes.
    preflight(starting(config, tmp_path / "out"), tmp_path)


def test_a_drafter_for_another_target_is_refused(
    config: TrainConfig, earlier: Drafter, tmp_path: Path, make_target: Callable[..., Path]
) -> None:
    other = make_target(vocab_size=64)
    with pytest.raises(DflashError, match="cannot start from") as caught:
        preflight(starting(config, exported(tmp_path / "out", earlier), target_model=str(other)), tmp_path)
    assert caught.value.cause == "vocab_size: 48 there, 64 here"
    assert "another shape" in caught.value.hint


@pytest.mark.parametrize("damage", ["no directory", "no weights", "cut off", "a checkpoint"])
def test_what_is_no_exported_drafter_is_found_before_the_launch(
    config: TrainConfig, earlier: Drafter, tmp_path: Path, damage: str
) -> None:
    directory = exported(tmp_path / "out", earlier)
    weights = directory / "model.safetensors"
    if damage == "no directory":
        shutil.rmtree(directory)
    elif damage == "no weights":
        weights.unlink()
    elif damage == "cut off":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        (directory / "config.json").rename(directory / "drafter_config.json")
    with pytest.raises(DflashError) as caught:
        preflight(starting(config, directory), tmp_path)
    assert caught.value.code is ExitCode.PREFLIGHT
    assert str(directory) in caught.value.error
    # A resumed run has its weights in the checkpoint: the drafter it started from may be gone.
    preflight(starting(config, directory, resume="/a/checkpoint"), tmp_path)


def test_there_is_one_start(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="init_from_drafter") as caught:
        starting(config, tmp_path, init_from_target="on")
    assert caught.value.code is ExitCode.USAGE


def test_the_shape_that_the_target_gives_is_that_of_the_drafter(config: TrainConfig, earlier: Drafter) -> None:
    assert drafter_config(config, target_facts(config.target_model)) == earlier.config


def test_loading_is_strict(earlier: Drafter, tmp_path: Path) -> None:
    directory = exported(tmp_path / "out", earlier)
    served = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(served | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    )
    with pytest.raises(DflashError, match="not that of the configured drafter") as caught:
        load_exported(directory)
    assert "missing tensor layers.2" in caught.value.cause
