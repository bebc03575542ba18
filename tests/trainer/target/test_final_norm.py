"""The last layer's output, the final norm and the head together are the target's own logits, on every architecture."""

from __future__ import annotations

import pytest
import torch
import transformers

from remote.protocol.errors import DflashError, ExitCode
from trainer.target.ends import load_ends
from trainer.target.load import load_final_norm, load_target

ARCHITECTURES = ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"]


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(3, 48, (2, 11), generator=torch.Generator().manual_seed(0))


def with_uneven_norm(path, tmp_path):
    """Copy a target and give its final norm random weights: fresh ones are all 1, or, where 1 is added, all 0."""
    import shutil

    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(path, tmp_path / "uneven")
    state = load_file(copy / "model.safetensors")
    (name,) = [each for each in state if each.endswith(("model.norm.weight", "language_model.norm.weight"))]
    state[name] = torch.rand(32, generator=torch.Generator().manual_seed(1))
    save_file(state, copy / "model.safetensors", {"format": "pt"})
    return copy


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_they_make_the_targets_own_logits(make_target, tmp_path, tokens, architecture):
    path = with_uneven_norm(make_target(architecture, tie_word_embeddings=False), tmp_path)
    target = load_target(path, dtype=torch.float32, device="cpu", target_layer_ids=(0, 2), last_output=True)
    captured = target.capture(tokens)
    assert len(captured) == 3
    _, head = load_ends(path, torch.float32, "cpu")
    logits = load_final_norm(path, dtype=torch.float32, device="cpu")(captured[-1]) @ head.T
    model = getattr(transformers, architecture).from_pretrained(path).eval()
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-4)
    unnormed = captured[-1] @ head.T
    assert (unnormed - wanted).abs().max() > 1


def test_the_drafters_states_are_the_same_with_and_without_it(make_target, tokens):
    options = {"dtype": torch.float32, "device": "cpu", "target_layer_ids": (0, 2)}
    more = load_target(make_target(), **options, last_output=True).capture(tokens)
    fewer = load_target(make_target(), **options).capture(tokens)
    assert all(torch.equal(one, other) for one, other in zip(more, fewer, strict=False))


def test_the_last_layer_is_still_none_of_the_drafters(make_target):
    with pytest.raises(DflashError, match="target_layer_ids") as caught:
        load_target(make_target(), dtype=torch.float32, device="cpu", target_layer_ids=(0, 5), last_output=True)
    assert caught.value.code is ExitCode.PREFLIGHT


def test_the_norm_is_frozen_and_of_the_dtype_asked_for(make_target):
    norm = load_final_norm(make_target(), dtype=torch.bfloat16, device="cpu")
    assert {(each.dtype, each.requires_grad) for each in norm.parameters()} == {(torch.bfloat16, False)}
    assert norm(torch.ones(2, 32, dtype=torch.bfloat16)).dtype is torch.bfloat16
