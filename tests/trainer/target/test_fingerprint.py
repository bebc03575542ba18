"""A target's fingerprint: the same wherever and however it is stored, another for another model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from trainer.target.facts import target_facts
from trainer.target.fingerprint import target_fingerprint


def fingerprint(directory: Path) -> str:
    return target_fingerprint(target_facts(directory))


def changed(source: Path, directory: Path, **keys: Any) -> Path:
    """A copy with other keys in its config.json."""
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | keys))
    return directory


def test_a_copy_elsewhere_in_other_files_is_the_same_model(make_target: Callable[..., Path], tmp_path: Path) -> None:
    whole, cut = make_target(), make_target(max_shard_size="20KB")
    assert len(list(cut.glob("*.safetensors"))) > 1
    assert fingerprint(whole) == fingerprint(cut)
    assert fingerprint(whole) == fingerprint(changed(whole, tmp_path / "copy", transformers_version="99.0"))


def test_other_weights_another_shape_or_configuration_is_another_model(
    make_target: Callable[..., Path], tmp_path: Path
) -> None:
    seen = {
        fingerprint(make_target()),
        fingerprint(make_target(seed=1)),
        fingerprint(make_target(intermediate_size=32)),
    }
    seen.add(fingerprint(changed(make_target(), tmp_path / "norm", rms_norm_eps=0.1)))
    assert len(seen) == 4


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight"])
def test_one_other_tensor_is_seen(make_target: Callable[..., Path], tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(make_target(), tmp_path / "copy"))
    weights = load_file(copy / "model.safetensors")
    weights[name] += 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(copy) != fingerprint(make_target())
