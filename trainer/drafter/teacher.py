"""The target's own distribution as a teacher: KL(target || drafter), from one state more a token, the last layer's output.

Row k of a block predicts the token at anchor + k, and so does the target at position anchor + k - 1: its state BEFORE the
label. The state behind the last layer is normed by the target's own final norm and meets the same head as the drafter's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from trainer.drafter.blocks import Blocks
from trainer.drafter.model import States


def part_states(states: States, num_target_layer_ids: int) -> tuple[States, torch.Tensor]:
    """Part states of L + 1 layers, f[T, (L+1)·H] or L + 1 tensors f[T, H], into the drafter's L and the last, f[T, H]."""
    if isinstance(states, torch.Tensor):
        # Views: a matrix product takes rows that are wider apart, so nothing is copied.
        width = states.shape[-1] // (num_target_layer_ids + 1) * num_target_layer_ids
        return states[:, :width], states[:, width:]
    return states[:num_target_layer_ids], states[num_target_layer_ids]


def teaching_rows(blocks: Blocks, rows: torch.Tensor) -> torch.Tensor:
    """Return i64[m], the context row whose state predicts the label of each block row, of i64[m] in the flattened [N·B]."""
    # A supervised row has k >= 1 and lies inside its document, and so does the token before it.
    return blocks.anchor_rows[rows // blocks.block_size] + rows % blocks.block_size - 1


class Lesson(NamedTuple):
    """The target's probabilities f[m, V] of m rows, and Σ p·log p of each, f[m]."""

    probabilities: torch.Tensor
    negative_entropy: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> Lesson:
        """Return the lesson of f[m, V], as wide as the softmax is to be; `logits` are overwritten."""
        logits.sub_(logits.logsumexp(dim=-1, keepdim=True))
        probabilities = logits.exp()
        return cls(probabilities, _row_products(probabilities, logits))

    def divergence(self, shifted: torch.Tensor) -> torch.Tensor:
        """Return KL(target || drafter) f[m], nats, less log Σ exp(shifted), of the drafter's logits f[m, V] less any constant."""
        return self.negative_entropy - _row_products(self.probabilities, shifted)


def _row_products(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # As a product of matrices it needs no third [m, V]; autocast would round its factors to bfloat16.
    with torch.autocast(one.device.type, enabled=False):
        return torch.einsum("mv,mv->m", one, other)
