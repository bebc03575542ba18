"""What an exported drafter says of itself, and whether a run may start from it. Torch-free: the preflight asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remote.protocol.errors import preflight_error
from trainer.drafter.config import DrafterConfig
from trainer.export_speculators import zlab_of
from trainer.target.facts import read_config, read_header

WEIGHTS_FILE = "model.safetensors"

# What decides how weights are read, with the key that sets it, where one does. Block size and attention may be changed: the
# shapes stay, and the drafter learns the rest.
_KEYS = {
    "num_hidden_layers": "drafter_layers",
    "num_attention_heads": "drafter_heads",
    "num_key_value_heads": "drafter_kv_heads",
    "head_dim": "drafter_head_dim",
    "intermediate_size": "drafter_ffn",
    "rope_theta": "drafter_rope_theta",
    "target_layer_ids": "target_layer_ids",
    "mask_token_id": "mask_token_id",
    "hidden_size": "",
    "vocab_size": "",
    "num_target_layers": "",
    "rms_norm_eps": "",
}


def read_serving_config(directory: Path) -> dict[str, Any]:
    """Return config.json in the words of the z-lab layout, whichever of the two layouts it has.

    Raises:
        DflashError: directory or file missing, no JSON, or a drafter that computes something else (code 7).
    """
    raw = read_config(directory)
    return zlab_of(raw) if "speculators_model_type" in raw else raw


def check_start_from(directory: Path, drafter: DrafterConfig) -> None:
    """Raise a preflight error when the drafter of a run cannot start with the weights of an exported one.

    Else every drafter rank would find out by itself, after the target was loaded.
    """
    found = DrafterConfig.from_zlab(read_serving_config(directory), drafter.num_target_layers)
    read_header(directory / WEIGHTS_FILE)
    differences = [name for name in _KEYS if getattr(found, name) != getattr(drafter, name)]
    if not differences:
        return
    told = [
        f"{_KEYS[name] or name}: {getattr(found, name)} there, {getattr(drafter, name)} here" for name in differences
    ]
    keys = [_KEYS[name] for name in differences if _KEYS[name]]
    hint = f"set {', '.join(keys)} to what it has"
    if len(keys) < len(differences):
        hint = "it was made for a target of another shape: give another, or leave init_from_drafter out"
    raise preflight_error(f"the drafter cannot start from {directory}", cause="; ".join(told), hint=hint)
