"""The causal language model that `generate` decodes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from remote.protocol.errors import preflight_error


def load_generator(path: Path, dtype: str, device: str, threads: int | None) -> tuple[Any, tuple[int, ...]]:
    """Load the model in eval mode.

    Returns:
        (model, its stop token ids).

    Raises:
        DflashError: a hybrid model, whose recurrent state cannot be cut to the rows that go on; or no stop token.
    """
    config: Any = AutoConfig.from_pretrained(path)
    if "linear_attention" in (getattr(config.get_text_config(), "layer_types", None) or ()):
        raise preflight_error(
            f"{path} has recurrent layers",
            cause="the built-in generator drops finished rows from an attention cache only",
            hint="make the replies with an OpenAI-compatible server",
        )
    if threads:
        torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    stops = model.generation_config.eos_token_id
    if stops is None:
        raise preflight_error(f"{path} names no stop token", hint="set eos_token_id in generation_config.json")
    return model.to(device).eval(), tuple(stops) if isinstance(stops, list) else (stops,)
