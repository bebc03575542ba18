"""Targets on a GPU, hybrids with fla's kernels where they are installed. Skipped where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch

from trainer.target.decode import load_decoder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

# fla's kernels multiply tiles of 16 and more.
WIDE_HEADS = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}


@pytest.fixture(params=["LlamaForCausalLM", "Qwen3_5ForCausalLM"])
def decoder(request, make_target):
    """A random target on the GPU in float32; it is its own reference, since fla's kernels have no CPU path."""
    path = make_target(request.param, **(WIDE_HEADS if request.param.startswith("Qwen3_5") else {}))
    return load_decoder(path, dtype=torch.float32, device="cuda", target_layer_ids=(1, 3))


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(got - wanted) / torch.linalg.vector_norm(wanted))


@torch.inference_mode()
def test_what_was_taken_back_leaves_no_trace(decoder):
    batch = decoder.batch(2)
    batch.append([[3, 4, 5, 6, 7], [8, 9]])
    batch.append([[10, 11, 12], [13, 14, 15]])
    batch.keep([1, 2])
    _, states = batch.append([[16], [17]])
    for row, tokens in enumerate([[3, 4, 5, 6, 7, 10, 16], [8, 9, 13, 14, 17]]):
        with decoder.target.capturing() as captured:
            decoder.target.stack(input_ids=torch.tensor([tokens]).cuda(), use_cache=False)
        # 3e-4 is what a float32 product in tf32 costs (the kernels' default); a token too many in the state is 0.1 and more.
        assert relative(states[row, 0], torch.cat(captured, dim=-1)[0, -1]) < 5e-3


@torch.inference_mode()
def test_right_padding_of_a_batch_changes_nothing(decoder):
    rows = [[3, 4, 5, 6, 7, 8, 9], [10, 11, 12]]
    padded = torch.zeros(2, 7, dtype=torch.long)
    for row, tokens in enumerate(rows):
        padded[row, : len(tokens)] = torch.tensor(tokens)
    captured = decoder.target.capture(padded.cuda())
    for row, tokens in enumerate(rows):
        alone = decoder.target.capture(torch.tensor([tokens]).cuda())
        for layer, reference in zip(captured, alone, strict=True):
            assert relative(layer[row, : len(tokens)], reference[0]) < 5e-3
