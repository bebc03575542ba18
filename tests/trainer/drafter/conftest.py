"""A tiny drafter configuration and packed rows of random documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from mutation.drafter_checks import written_kernel

from trainer.drafter.blocks import Blocks, build_blocks
from trainer.drafter.config import DrafterConfig, derive
from trainer.drafter.flex import FlexAttention

TARGET = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1]},
}


def tiny_config(target: Mapping[str, Any] | None = None, **overrides: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "num_layers": 3,
        "block_size": 4,
        "mask_token_id": 3,
        "num_target_layer_ids": 3,
    }
    return derive(TARGET | dict(target or {}), **(values | overrides))


@pytest.fixture(scope="session")
def config() -> Callable[..., DrafterConfig]:
    return tiny_config


def packed_row(lengths: list[int], padding: int = 0, seed: int = 0, holes: float = 0.0) -> dict[str, np.ndarray]:
    """Documents 100, 101, ... of these lengths in one row, then padding; the first two tokens of each are prompt."""
    random = np.random.default_rng(seed)
    total = sum(lengths) + padding
    mask = np.ones(total, dtype=np.uint8)
    ids = np.full(total, -1, dtype=np.int64)
    positions = np.zeros(total, dtype=np.int32)
    at = 0
    for number, length in enumerate(lengths):
        ids[at : at + length] = 100 + number
        positions[at : at + length] = np.arange(length)
        mask[at : at + min(2, length)] = 0
        at += length
    mask[random.random(total) < holes] = 0
    mask[at:] = 0
    return {
        "input_ids": random.integers(4, 40, total).astype(np.int32),
        "loss_mask": mask,
        "document_ids": ids,
        "position_ids": positions,
    }


def tiny_blocks(row: dict[str, np.ndarray], **overrides: Any) -> Blocks:
    values: dict[str, Any] = {
        "seed": 1,
        "epoch": 0,
        "num_anchors": 4,
        "row_budget": 64,
        "block_size": 4,
        "mask_token_id": 3,
        "gamma": 4.0,
    }
    return build_blocks(
        row["input_ids"], row["loss_mask"], row["document_ids"], row["position_ids"], **values | overrides
    )


@pytest.fixture(scope="session")
def row() -> Callable[..., dict[str, np.ndarray]]:
    return packed_row


@pytest.fixture(scope="session")
def blocks_of() -> Callable[..., Blocks]:
    return tiny_blocks


@pytest.fixture(scope="session")
def written_flex() -> Callable[[Blocks], FlexAttention]:
    """FlexAttention in all but its kernel."""
    return lambda blocks: FlexAttention(blocks, written_kernel)
