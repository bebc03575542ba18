"""Floating-point operations that a step's matrix products need: what model FLOP/s utilisation counts.

An n-by-k matrix takes 2·n·k operations for each row that meets it. Attention scores, elementwise work and what is computed
twice to save memory are left out, and so is padding: the figure is what the model needs, not what the machine does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainer.drafter.blocks import Blocks
from trainer.drafter.model import Drafter


def _weights(module: nn.Module) -> int:
    return sum(each.weight.numel() for each in module.modules() if isinstance(each, nn.Linear))


def forward_flops(module: nn.Module) -> float:
    """Return the operations of one row through all matrices of `module`: a target's forward of one token.

    A target has only the layers that are run, and no head: 48.7 GFLOP for all 64 layers of the 27B shape.
    """
    return 2.0 * _weights(module)


@dataclass(frozen=True)
class DrafterFlops:
    """Operations of a drafter's forward and backward, by what a row is."""

    context_row: float
    block_row: float
    supervised_row: float

    @classmethod
    def of(cls, drafter: Drafter, head: torch.Tensor) -> DrafterFlops:
        """Return those of a drafter whose target has the head f[V, H].

        Forward, gradient of the input and of the weight cost the same. `fc` needs no gradient of its input, which is the
        frozen target's states; the head is frozen and needs none of its weight.
        """
        attentions = [each.get_submodule("self_attn") for each in drafter.layers]
        context = sum(_weights(each.get_submodule(name)) for each in attentions for name in ("k_proj", "v_proj"))
        return cls(
            context_row=4.0 * _weights(drafter.fc) + 6.0 * context,
            block_row=6.0 * _weights(drafter.layers),
            supervised_row=4.0 * head.numel(),
        )

    def row(self, tokens: int, blocks: Blocks) -> float:
        """Return the operations of a packed row with so many tokens that are no padding. All counts are on the host."""
        return (
            self.context_row * tokens
            + self.block_row * blocks.count * blocks.block_size
            + self.supervised_row * blocks.supervised_before[-1]
        )
