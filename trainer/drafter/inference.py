"""Drafting behind contexts that grow, whose keys and values are computed once; many sequences as one packed row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from trainer.drafter.attention import KeysValues
from trainer.drafter.blocks import Blocks, Run, lay_out
from trainer.drafter.model import Drafter


class DraftBatch:
    """k sequences as the drafter sees them: layer by layer, keys and values of every committed token's states."""

    def __init__(self, drafter: Drafter, count: int) -> None:
        self._drafter = drafter
        self._contexts: list[list[KeysValues]] = [[] for _ in range(count)]

    def extend(self, states: torch.Tensor, counts: Sequence[int]) -> None:
        """Append to each sequence the first `counts[i]` of the target's states f[k, m, L·H]: newly committed tokens."""
        rows = torch.cat([state[:count] for state, count in zip(states, counts, strict=True)])
        starts = [self._length(i) for i in range(len(counts))]
        positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
        added = self._drafter.context_keys_values(rows, positions.to(states.device))
        # One projection of all sequences' new rows, then each its own: fc alone is L·H·H weights to read.
        parts = [[each.split(list(counts)) for each in layer] for layer in added]
        for i, context in enumerate(self._contexts):
            new = [KeysValues(keys[i], values[i]) for keys, values in parts]
            self._contexts[i] = [_join(pair) for pair in zip(context, new, strict=True)] if context else new

    def select(self, sequences: Sequence[int]) -> None:
        """Go on with these sequences alone."""
        self._contexts = [self._contexts[i] for i in sequences]

    def draft(
        self, sequences: Sequence[int], anchors: Sequence[int], size: int, embed_weight: torch.Tensor
    ) -> torch.Tensor:
        """Return f[k, size - 1, H]: what the target's head makes guesses of, behind each of these sequences' anchors.

        The anchor is the token right behind the sequence's context. The embedding f[V, H] is the target's.
        """
        lengths = [self._length(i) for i in sequences]
        mask_token_id = self._drafter.config.mask_token_id
        blocks = _blocks_behind(anchors, lengths, size, mask_token_id).to(embed_weight.device)
        # The layout gives each anchor its row, as in training; no block sees it, so any content serves.
        contexts = [[_join((layer, _row(layer))) for layer in self._contexts[i]] for i in sequences]
        context = [_join(layers) for layers in zip(*contexts, strict=True)]
        embeds = functional.embedding(blocks.input_ids.flatten(), embed_weight)
        return self._drafter.draft(embeds, context, blocks).unflatten(0, (-1, size))[:, 1:]

    def _length(self, sequence: int) -> int:
        context = self._contexts[sequence]
        return len(context[0].keys) if context else 0


def _join(parts: Sequence[KeysValues]) -> KeysValues:
    return KeysValues(torch.cat([each.keys for each in parts]), torch.cat([each.values for each in parts]))


def _row(layer: KeysValues) -> KeysValues:
    return KeysValues(torch.zeros_like(layer.keys[:1]), torch.zeros_like(layer.values[:1]))


def _blocks_behind(anchors: Sequence[int], lengths: Sequence[int], size: int, mask_token_id: int) -> Blocks:
    """Lay out one block behind each context, by the code that lays out training blocks."""
    ends = np.cumsum([length + 1 for length in lengths])
    tokens = np.zeros(ends[-1], dtype=np.int32)
    tokens[ends - 1] = anchors
    return lay_out(
        tokens,
        np.zeros(ends[-1], dtype=np.uint8),
        np.concatenate([np.arange(length + 1, dtype=np.int32) for length in lengths]),
        [Run(int(end) - length - 1, int(end), i) for i, (end, length) in enumerate(zip(ends, lengths, strict=True))],
        [np.array([length]) for length in lengths],
        block_size=size,
        mask_token_id=mask_token_id,
        gamma=1.0,
    )
