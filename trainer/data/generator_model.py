"""The causal language model that `generate` decodes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from remote.protocol.errors import preflight_error


def load_generator(path: Path, dtype: str, device: str, threads: int | None) -> Any:
    """Load the model in eval mode.

    Raises:
        DflashError: a hybrid model, whose recurrent state cannot be cut to the rows that go on.
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
    return model.to(device).eval()
