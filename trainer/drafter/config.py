"""The drafter's shape: declared, checked, derived from a target, read from and written to the serving layout. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from remote.protocol.errors import DflashError, preflight_error

FULL = "full_attention"
SLIDING = "sliding_attention"
INITIALIZER_RANGE = 0.02


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter: N Qwen3-style decoder layers, `fc` and two norms; no embedding, no head.

    `target_layer_ids` count decoder layers of the target from zero; id i means the OUTPUT of layer i. `sliding_window`
    is a number of tokens. Raises DflashError (code 7) for a shape that cannot be trained or served.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    max_position_embeddings: int
    initializer_range: float = INITIALIZER_RANGE

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_target(self)
        _check_layer_types(self)

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens, None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def to_zlab(self, dtype: str) -> dict[str, Any]:
        """Return the `config.json` that PyPI dflash, vLLM and SGLang read; `dtype` names the tensors' type (bfloat16).

        block_size stands at the top level and in dflash_config: consumers differ in where they look.
        """
        rope_theta = self.rope_theta
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dtype": dtype,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": False,
            "use_cache": True,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": SLIDING in self.layer_types,
            # Older transformers slide from this layer on, where layer_types is not read.
            "max_window_layers": 0 if SLIDING in self.layer_types else self.num_hidden_layers,
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
            },
        }

    @classmethod
    def from_zlab(cls, config: Mapping[str, Any], num_target_layers: int | None = None) -> DrafterConfig:
        """Read a serving `config.json`; the inverse of `to_zlab`, and as lenient with older ones as PyPI dflash 0.1.0.

        What it looks for in dflash_config may stand at the top level too; layer ids, layer types, block size and widths
        that are missing get the defaults that it gives them. `num_target_layers` serves where the file does not say it.

        Raises:
            DflashError: a key is missing, the two block sizes differ, the shape is invalid, or the drafter computes
                something that this one does not (code 7).
        """
        try:
            nested = dict(config.get("dflash_config") or {})
            _refuse_other_functions(config, nested)
            block_size = nested.get("block_size", config.get("block_size", 16))
            if config.get("block_size", block_size) != block_size:
                raise preflight_error(
                    f"the drafter's config.json names two block sizes, {config['block_size']} and {block_size}",
                    hint="block_size at the top level and in dflash_config must agree",
                )
            layers, target_layers = config["num_hidden_layers"], config.get("num_target_layers", num_target_layers)
            if target_layers is None:
                raise KeyError("num_target_layers")
            types = _served_layer_types(config)
            ids = nested.get("target_layer_ids", config.get("target_layer_ids"))
            values = {field.name: config[field.name] for field in fields(cls) if field.name in config}
            heads = config["num_attention_heads"]
            defaults = {
                "num_key_value_heads": heads,
                "head_dim": config["hidden_size"] // heads,
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 32768,
            }
            read = {
                "rope_theta": _rope_theta(config),
                "block_size": block_size,
                "mask_token_id": nested["mask_token_id"] if "mask_token_id" in nested else config["mask_token_id"],
                "target_layer_ids": tuple(ids or default_target_layer_ids(target_layers, layers)),
                "num_target_layers": target_layers,
                "layer_types": types,
                "sliding_window": config.get("sliding_window") if SLIDING in types else None,
            }
            return cls(**defaults | values | read)
        except (KeyError, TypeError, AttributeError, ValueError) as problem:
            raise preflight_error(
                "this is no config.json of a DFlash drafter",
                cause=f"missing or malformed: {problem}",
                hint="a drafter's directory is what `python -m trainer export` writes",
            ) from problem


def default_target_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Spread `count` captured layers over the target: (64, 5) gives 1 16 31 46 61; the rule of the public releases.

    Raises:
        DflashError: the target is too shallow for `count` different layers (code 7).
    """
    if count == 1:
        return (num_target_layers // 2,)
    ids = tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))
    if count < 1 or len(set(ids)) != count or ids[0] < 0:
        raise preflight_error(
            f"cannot choose {count} different layers of a target with {num_target_layers}",
            cause=f"they are spread from layer 1 to layer {num_target_layers - 3}, each once",
            hint="lower captured_layers, or name target_layer_ids yourself",
        )
    return ids


def gamma_for(block_size: int) -> float:
    """Return the decay length γ, in block rows, of the loss weights exp(-(k-1)/γ).

    The published pairs are 16: 7, 10: 5, 8: 4 (arXiv 2602.06036 and its public trainers); others lie on the line
    through the two nearest of them, at least 1.
    """
    known = ((8, 4.0), (10, 5.0), (16, 7.0))
    (x0, y0), (x1, y1) = known[:2] if block_size <= 10 else known[1:]
    return max(1.0, y0 + (block_size - x0) * (y1 - y0) / (x1 - x0))


def derive(
    target_config: Mapping[str, Any],
    *,
    num_layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: Sequence[int] | None = None,
    num_target_layer_ids: int = 5,
    sliding_window: int | None = None,
    layer_types: str | Sequence[str] = "full",
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    rope_theta: float | None = None,
) -> DrafterConfig:
    """Shape a drafter after a target's text config; whatever is None is the target's own figure.

    Only plain widths are taken over. Nothing of the target's partial or multimodal rotation is: the drafter rotates its
    full head_dim (a leaked partial_rotary_factor breaks serving silently).

    Raises:
        DflashError: the resulting shape is invalid (code 7).
    """
    target_layers = int(target_config["num_hidden_layers"])
    hidden_size = int(target_config["hidden_size"])
    # `or`, not a default: 0 in a training configuration means the target's own figure as well.
    heads = num_attention_heads or int(target_config["num_attention_heads"])
    ids = target_layer_ids or default_target_layer_ids(target_layers, num_target_layer_ids)
    types = _expand_layer_types(layer_types, num_layers)
    return DrafterConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or int(target_config["intermediate_size"]),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=num_key_value_heads or int(target_config.get("num_key_value_heads") or heads),
        head_dim=head_dim or int(target_config.get("head_dim") or hidden_size // heads),
        rms_norm_eps=float(target_config.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta or _rope_theta(target_config),
        vocab_size=int(target_config["vocab_size"]),
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(ids),
        num_target_layers=target_layers,
        layer_types=types,
        sliding_window=sliding_window if SLIDING in types else None,
        max_position_embeddings=int(target_config.get("max_position_embeddings", 32768)),
    )


def _rope_theta(config: Mapping[str, Any]) -> float:
    # transformers 5 nests it; checkpoints of before have it at the top level.
    nested = config.get("rope_parameters") or {}
    return float(nested.get("rope_theta") or config.get("rope_theta") or 10_000.0)


def _served_layer_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return layer_types; a file of before that key has what transformers' Qwen3Config makes of the older ones."""
    types = config.get("layer_types")
    slides = config.get("use_sliding_window", types is not None)
    if types is not None:
        # Serving engines disagree on such a file: transformers drops the window, SGLang keeps it.
        if SLIDING in types and not slides:
            raise _invalid(
                "layer_types has sliding layers, use_sliding_window is false", "ask who made it which is right"
            )
        return tuple(types)
    first = config.get("max_window_layers", 28) if slides and config.get("sliding_window") else None
    layers = range(config["num_hidden_layers"])
    return tuple(SLIDING if first is not None and i >= first else FULL for i in layers)


def _refuse_other_functions(config: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    """Raise a DflashError for settings of newer drafters and of Qwen3 that change what is computed."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    said = {
        "architectures": (config.get("architectures") or ["DFlashDraftModel"])[0] == "DFlashDraftModel",
        "rope_type": rope.get("rope_type", rope.get("type", "default")) == "default",
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1) == 1,
        "attention_bias": not config.get("attention_bias"),
        "hidden_act": config.get("hidden_act", "silu") == "silu",
        "is_causal": config.get("is_causal") is None,
    }
    for name, usual in (("input_embedding_scale", 1), ("output_multiplier", 1), ("final_logit_softcapping", None)):
        said[name] = nested.get(name, config.get(name, usual)) in (usual, None)
    for name in (name for name, usual in said.items() if not usual):
        raise preflight_error(
            f"the drafter's config.json sets {name} to something that is not supported here",
            cause="its drafter computes another function than DFlash drafters of 2602.06036",
            hint="measure it with the package that it was made with",
        )


def _expand_layer_types(layer_types: str | Sequence[str], num_layers: int) -> tuple[str, ...]:
    named: dict[str, Callable[[int], tuple[str, ...]]] = {
        "full": lambda n: (FULL,) * n,
        "sliding": lambda n: (SLIDING,) * n,
        # As in the public 27B drafter: all sliding but the last.
        "mixed": lambda n: (SLIDING,) * (n - 1) + (FULL,),
    }
    if not isinstance(layer_types, str):
        return tuple(layer_types)
    if layer_types not in named:
        hint = f"one of {', '.join(named)}, or name each layer's in layer_types"
        raise preflight_error(f"unknown attention {layer_types!r}", hint=hint)
    return named[layer_types](num_layers)


def _invalid(cause: str, hint: str = "") -> DflashError:
    return preflight_error("the drafter's configuration is invalid", cause=cause, hint=hint)


def _check_sizes(config: DrafterConfig) -> None:
    sizes = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
    for name in sizes.split():
        if getattr(config, name) < 1:
            raise _invalid(f"{name} is {getattr(config, name)}", "it must be at least 1")
    if config.head_dim < 2 or config.head_dim % 2:
        raise _invalid(f"head_dim is {config.head_dim}", "it must be even: rotation works on pairs")
    if config.num_attention_heads % config.num_key_value_heads:
        raise _invalid(
            f"{config.num_attention_heads} heads cannot share {config.num_key_value_heads} key/value heads evenly",
            "drafter_heads must be a multiple of drafter_kv_heads (num_attention_heads, num_key_value_heads in a config.json)",
        )
    if config.block_size < 2:
        raise _invalid(f"block_size is {config.block_size}", "a block holds the anchor and at least one masked row")
    for name in ("rms_norm_eps", "rope_theta"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) > 0):
            raise _invalid(f"{name} is {getattr(config, name)}", "it must be a positive number")


def _check_target(config: DrafterConfig) -> None:
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise _invalid(
            f"mask token {config.mask_token_id} lies outside the vocabulary of {config.vocab_size}",
            f"mask_token_id must be a row of the target's embedding, 0 to {config.vocab_size - 1}",
        )
    ids = config.target_layer_ids
    # n - 1 is never one: transformers norms the last hidden state, so training and serving would read different things.
    last = config.num_target_layers - 2
    if not ids or any(not 0 <= i <= last for i in ids):
        raise _invalid(
            f"target_layer_ids {list(ids)} for a target with {config.num_target_layers} layers",
            f"each id lies in 0 to {last}: the last layer's output is only seen behind the final norm",
        )
    if list(ids) != sorted(set(ids)):
        raise _invalid(f"target_layer_ids {list(ids)} are not in strictly ascending order", "sort them, each once")


def _check_layer_types(config: DrafterConfig) -> None:
    types = config.layer_types
    if len(types) != config.num_hidden_layers or not set(types) <= {FULL, SLIDING}:
        raise _invalid(
            f"layer_types {list(types)} for {config.num_hidden_layers} layers",
            f"one of {FULL}, {SLIDING} for each layer",
        )
    if SLIDING in types and (config.sliding_window is None or config.sliding_window < 1):
        raise _invalid(f"sliding layers with sliding_window {config.sliding_window}", "give sliding_window in tokens")
    if SLIDING not in types and config.sliding_window is not None:
        raise _invalid(f"sliding_window {config.sliding_window} without a sliding layer", "leave it out")
