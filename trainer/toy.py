"""A target and a data set of toy size, made on the spot: what the selfcheck trains one step on."""

from __future__ import annotations

import json
import random
from pathlib import Path

VOCABULARY = 96
MASK_TOKEN = 3
_FIRST_TEXT_TOKEN = 4


def make_toy_target(directory: Path, *, layers: int = 6, hidden: int = 32, seed: int = 0) -> None:
    """Save a random Llama of about 60,000 parameters as a transformers directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def make_toy_data(file: Path, *, documents: int = 12, seed: int = 0) -> None:
    """Write documents of 8 to 40 random tokens as JSONL, all but the first three tokens supervised."""
    draw = random.Random(seed)
    with file.open("w", encoding="ascii") as lines:
        for _ in range(documents):
            tokens = [draw.randrange(_FIRST_TEXT_TOKEN, VOCABULARY) for _ in range(draw.randint(8, 40))]
            lines.write(json.dumps({"input_ids": tokens, "prompt_len": 3}) + "\n")


def toy_config(target: Path, data: Path) -> dict[str, object]:
    """Return a configuration that trains two steps of one target and one drafter on the CPU, in float32."""
    return {
        "target_model": str(target),
        "data_dir": str(data),
        "mask_token_id": MASK_TOKEN,
        "block_size": 4,
        "drafter_layers": 2,
        "captured_layers": 2,
        "max_length": 64,
        "token_budget": 128,
        "bucket_tokens": 16,
        "num_anchors": 8,
        "row_anchors": 24,
        "epochs": 1,
        "max_steps": 2,
        "micro_batches_per_step": 1,
        "device": "cpu",
        "dtype": "float32",
        "ring_mib": 8,
        "threads": 1,
        "verify_copies": "all",
    }
