"""The causal language model that `generate` decodes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from remote.protocol.errors import preflight_error
from trainer.target.facts import HYBRID, read_config


def load_generator(path: Path, dtype: str, device: torch.device, threads: int | None) -> Any:
    """Load the model in eval mode; of a multimodal wrapper the text class alone.

    Raises:
        DflashError: recurrent layers of a class for which nobody has checked that they heed the mask of left padding.
    """
    config: Any = AutoConfig.from_pretrained(path)
    recurrent = "linear_attention" in (getattr(config.get_text_config(), "layer_types", None) or ())
    architecture = (read_config(path).get("architectures") or ["none"])[0]
    if recurrent and architecture not in HYBRID:
        raise preflight_error(
            f"{path} holds a {architecture}, whose recurrent layers are not known here",
            cause="left padding would pass into their state where they do not heed its mask",
            hint=f"supported: {', '.join(HYBRID)}; for others make the replies with an OpenAI-compatible server",
        )
    if threads:
        torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    return model.to(device).eval()
