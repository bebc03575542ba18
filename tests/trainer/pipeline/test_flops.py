"""Floating-point operations: those that torch counts in the matrix products, and those of the 27B shape."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, Qwen3_5TextConfig

from benchmarks.random_target import QWEN36_27B
from remote.protocol import events as ev
from trainer.drafter.blocks import Blocks, build_blocks
from trainer.drafter.config import DrafterConfig, derive
from trainer.drafter.model import Drafter
from trainer.drafter.step import drafter_forward
from trainer.pipeline.flops import DrafterFlops, forward_flops
from trainer.pipeline.gpu_facts import GpuFacts

VOCABULARY, TOKENS, PADDED = 40, 30, 32


def tiny() -> DrafterConfig:
    target = {
        "num_hidden_layers": 6, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 24, "rms_norm_eps": 1e-6, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    }  # fmt: skip
    return derive(target, num_layers=2, block_size=4, mask_token_id=3, num_target_layer_ids=3)


def blocks() -> Blocks:
    documents = np.where(np.arange(PADDED) < TOKENS, np.arange(PADDED) // 15, -1).astype(np.int64)
    return build_blocks(
        np.arange(PADDED, dtype=np.int32),
        (np.arange(PADDED) % 15 >= 3).astype(np.uint8),
        documents,
        (np.arange(PADDED) % 15).astype(np.int32),
        seed=0,
        epoch=0,
        num_anchors=4,
        row_budget=32,
        block_size=4,
        mask_token_id=3,
        gamma=4.0,
    )


def test_a_drafters_row_takes_what_torch_counts_in_its_matrix_products() -> None:
    drafter, row = Drafter(tiny()), blocks()
    embed, head = torch.randn(VOCABULARY, 16), torch.randn(VOCABULARY, 16)
    assert row.count > 0
    with FlopCounterMode(display=False) as counter:
        states = torch.randn(PADDED, 3 * 16)
        sums = drafter_forward(drafter, embed, head, states, row, num_target_layer_ids=3, chunk_rows=8)
        sums.loss_sum.backward()
    counts = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    # Scores are batched products; matrices are not.
    products = counts["aten.mm"] + counts["aten.addmm"]
    flops = DrafterFlops.of(drafter, head)
    assert flops.row(PADDED, row) == products
    # Padding is work of the machine, not of the model.
    assert flops.row(TOKENS, row) < products


def test_a_target_takes_two_operations_a_weight_and_token() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 12, bias=False), torch.nn.Linear(12, 4))
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(5))
    assert forward_flops(model) * 5 == counter.get_total_flops()


@pytest.mark.parametrize(("layers", "gigaflops"), [(64, 48.7), (62, 47.2)])
def test_the_27b_shape(layers: int, gigaflops: float) -> None:
    with torch.device("meta"):
        stack = AutoModel.from_config(Qwen3_5TextConfig(**QWEN36_27B | {"num_hidden_layers": layers}))
    assert forward_flops(stack) / 1e9 == pytest.approx(gigaflops, abs=0.05)


def test_a_27b_drafters_row_is_what_was_planned_with() -> None:
    config = derive(
        QWEN36_27B | {"rms_norm_eps": 1e-6}, num_layers=5, block_size=16, mask_token_id=248070, num_target_layer_ids=5
    )
    with torch.device("meta"):
        drafter, head = Drafter(config), torch.empty(248320, 5120)
    flops = DrafterFlops.of(drafter, head)
    # 4,096 tokens, 512 blocks of 16 rows, all but the anchors supervised: about 125 TFLOP, a third of them in the head.
    total = flops.context_row * 4096 + flops.block_row * 512 * 16 + flops.supervised_row * 512 * 15
    assert total / 1e12 == pytest.approx(125, rel=0.03)
    assert flops.supervised_row * 512 * 15 / total == pytest.approx(1 / 3, abs=0.05)


# ---- the device


def test_on_a_cpu_there_is_nothing_to_measure() -> None:
    assert GpuFacts.measure(torch.device("cpu"), torch.float32) is None


PROFILE = ev.StageProfile(
    time=0.0, rank=0, role="target", device="cuda:0", interval=2.0, tokens=10, stages={}, flops_per_second=2e14
)


def test_a_profile_gets_its_share_of_the_peak_and_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:3")
    for place, name in enumerate(("memory_allocated", "memory_reserved", "max_memory_allocated"), 1):
        monkeypatch.setattr(torch.cuda, name, lambda of, place=place: place if of == device else 0)
    profile = GpuFacts(device, peak=8e14, total=4).add_to(PROFILE)
    assert profile.mfu == 0.25
    sizes = (profile.memory_allocated, profile.memory_reserved, profile.memory_peak, profile.memory_total)
    assert sizes == (1, 2, 3, 4)
    assert dataclasses.replace(
        profile, mfu=0.0, memory_allocated=0, memory_reserved=0, memory_peak=0, memory_total=0
    ) == (PROFILE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu_the_peak_and_the_memory_are_plausible() -> None:
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    before = torch.cuda.memory_allocated(device)
    facts = GpuFacts.measure(device, torch.bfloat16)
    assert facts is not None
    # What stays is the workspace of the matrix products, which the run needs as well.
    assert torch.cuda.memory_allocated(device) - before < 128 << 20
    assert 2e13 < facts.peak < 5e15
    kept = torch.ones(1 << 20, device=device)
    profile = facts.add_to(PROFILE)
    assert profile.mfu == pytest.approx(2e14 / facts.peak)
    assert before + kept.nbytes <= profile.memory_allocated <= profile.memory_peak < profile.memory_total
    assert profile.memory_allocated <= profile.memory_reserved
