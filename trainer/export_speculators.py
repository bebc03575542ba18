"""The `config.json` of vLLM's speculators layout (PyPI speculators 0.9.0); tensors and their names are the z-lab layout's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remote.protocol.errors import preflight_error
from trainer.drafter.config import FULL, SLIDING, DrafterConfig

VERSION = "0.9.0"
# Of the z-lab config what describes a Qwen3 transformer; the rest is DFlash's and stands one level up.
_TRANSFORMER_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "attention_bias", "attention_dropout", "rms_norm_eps", "rope_parameters", "vocab_size",
    "max_position_embeddings", "initializer_range", "tie_word_embeddings", "use_cache", "layer_types", "sliding_window",
    "use_sliding_window", "max_window_layers",
)  # fmt: skip


def speculators_config(
    config: DrafterConfig, dtype: str, target: str, target_architectures: tuple[str, ...]
) -> dict[str, Any]:
    """Return the configuration; `target` is the hub id or directory that vLLM loads the target from.

    Layers count from one here: `aux_hidden_state_layer_ids` is id + 1, and vLLM takes the 1 off again.

    Raises:
        DflashError: the target's architecture is not known; or full and sliding layers are mixed: one flag says for all
            layers whether a block's rows see one another in both directions, so one kind would be served wrongly (code 7).
    """
    kinds = set(config.layer_types)
    if len(kinds) > 1:
        raise preflight_error(
            "the speculators layout cannot hold a drafter with full and sliding layers",
            cause="its sliding_window_non_causal holds for all layers, and vLLM 0.32 applies it to all",
            hint="leave out --layout: the z-lab layout says it layer by layer",
        )
    # An empty list would be a valid file that says something wrong.
    if not target_architectures:
        raise preflight_error(
            "the speculators layout names the target's architecture, which is not known here",
            cause=f"the checkpoint does not say it, and {target} is no directory here",
            hint="give the target's directory as --target-name, or leave out --layout",
        )
    served = config.to_zlab(dtype)
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "dtype": dtype,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        # No reduced vocabulary: logits are the target's head's.
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "sliding_window_non_causal": kinds == {FULL},
        # Row 0 is the clean anchor, and only the masked rows are guesses.
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target, "architectures": list(target_architectures)},
        },
        "transformer_layer_config": {key: served[key] for key in _TRANSFORMER_KEYS},
    }


def zlab_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `DrafterConfig.from_zlab` reads out of a speculators config.json; it never says num_target_layers.

    Raises:
        DflashError: another algorithm, a reduced vocabulary, or blocks of another form (code 7).
    """
    transformer = dict(config.get("transformer_layer_config") or {})
    vocab_size = transformer.get("vocab_size")
    slides = SLIDING in (transformer.get("layer_types") or ())
    for problem, is_so in (
        (f"its algorithm is {config.get('speculators_model_type')}", config.get("speculators_model_type") != "dflash"),
        ("it has a vocabulary of its own", config.get("draft_vocab_size", vocab_size) != vocab_size),
        ("it samples from the anchor's row", bool(config.get("sample_from_anchor"))),
        ("its sliding layers see a block in both directions", slides and bool(config.get("sliding_window_non_causal"))),
    ):
        if is_so:
            raise preflight_error("this drafter in the speculators layout is not supported here", cause=problem)
    nested = {"mask_token_id": config.get("mask_token_id"), "block_size": config.get("block_size")}
    ids = [i - 1 for i in config.get("aux_hidden_state_layer_ids") or ()]
    dtype = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    return transformer | dtype | {"dflash_config": nested | {"target_layer_ids": ids}}
