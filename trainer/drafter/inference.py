"""Drafting one block at a time behind a growing context, whose keys and values are computed once."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from trainer.drafter.attention import KeysValues
from trainer.drafter.blocks import Blocks, Run, lay_out
from trainer.drafter.model import Drafter


class DraftSequence:
    """One sequence as the drafter sees it: the keys and values of every committed token's states, layer by layer."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._context: list[KeysValues] = []
        self._length = 0

    def extend(self, states: torch.Tensor) -> None:
        """Append the target's states f[n, L·H] of n newly committed tokens."""
        positions = torch.arange(self._length, self._length + len(states), device=states.device)
        added = self._drafter.context_keys_values(states, positions)
        before = self._context or [KeysValues(each.keys[:0], each.values[:0]) for each in added]
        self._context = [
            KeysValues(torch.cat([old.keys, new.keys]), torch.cat([old.values, new.values]))
            for old, new in zip(before, added, strict=True)
        ]
        self._length += len(states)

    def draft(self, anchor: int, size: int, embed_weight: torch.Tensor, head_weight: torch.Tensor) -> torch.Tensor:
        """Return the drafter's greedy tokens i64[size - 1] behind `anchor`, the token after the context so far.

        `embed_weight` and `head_weight`, f[V, H], are the target's.
        """
        blocks = _one_block(anchor, self._length, size, self._drafter.config.mask_token_id).to(embed_weight.device)
        embeds = functional.embedding(blocks.input_ids.flatten(), embed_weight)
        hidden = self._drafter.draft(embeds, self._context, blocks)
        return functional.linear(hidden[1:], head_weight).argmax(dim=-1)


def _one_block(anchor: int, position: int, size: int, mask_token_id: int) -> Blocks:
    """Lay out one block anchored behind `position` context rows, by the code that lays out training blocks."""
    tokens = np.zeros(position + 1, dtype=np.int32)
    tokens[position] = anchor
    return lay_out(
        tokens,
        np.zeros(position + 1, dtype=np.uint8),
        np.arange(position + 1, dtype=np.int32),
        [Run(0, position + 1, 0)],
        [np.array([position])],
        block_size=size,
        mask_token_id=mask_token_id,
        gamma=1.0,
    )
