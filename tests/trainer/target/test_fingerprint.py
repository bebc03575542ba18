"""A target's fingerprint: the same wherever and however it is stored, another for another model."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from trainer.target.facts import target_facts
from trainer.target.fingerprint import same_target, target_fingerprint


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


def test_a_finetune_of_any_one_tensor_of_many_is_seen(make_target: Callable[..., Path], tmp_path: Path) -> None:
    """With more than 64 tensors the first half looks at some of them only; the second at all."""
    source = make_target(num_hidden_layers=8)
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    file = copy / "model.safetensors"
    whole, before = file.read_bytes(), fingerprint(source)
    facts = target_facts(copy)
    assert len(facts.tensors) > 64
    first_halves = set()
    for entry in facts.tensors.values():
        changed_bytes = bytearray(whole)
        changed_bytes[entry.start] ^= 1
        file.write_bytes(changed_bytes)
        after = fingerprint(copy)
        assert after[64:] != before[64:]
        first_halves.add(after[:64] == before[:64])
    assert first_halves == {True, False}


def test_the_first_half_is_what_older_checkpoints_hold(make_target: Callable[..., Path]) -> None:
    facts = target_facts(make_target(num_hidden_layers=8))
    ignored = ("transformers_version", "_name_or_path", "use_cache", "architectures")
    config = {key: value for key, value in facts.text_config.items() if key not in ignored}
    tensors = {name: [list(entry.shape), entry.dtype] for name, entry in facts.tensors.items()}
    described = json.dumps([facts.architecture, config, tensors], sort_keys=True)
    digest = hashlib.sha256(b"dflash target 1\n" + described.encode())
    weights = load_file(facts.path / "model.safetensors")
    for name in sorted(facts.tensors)[::2]:
        digest.update(weights[name].numpy().tobytes()[:256])
    now = target_fingerprint(facts)
    assert now[:64] == digest.hexdigest()
    assert len(now) == 128


def test_what_an_older_checkpoint_wrote_down_still_is_the_model() -> None:
    first, second = "a" * 64, "b" * 64
    assert same_target("", first + second)
    assert same_target(first, first + second)
    assert same_target(first + second, first + second)
    assert not same_target(second, first + second)
    assert not same_target(first + first, first + second)
