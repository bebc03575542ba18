"""Many sequences of a target decoded together, each rolled back on its own: the seam, and the batch of plain targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from transformers import DynamicCache

from trainer.target.capture import Target


class Appended(NamedTuple):
    """What the target makes of appended tokens: its final, normed states f[k, m, H] and the captured f[k, m, L·H].

    m is the most that was appended to one sequence; what lies beyond a sequence's own tokens is meaningless.
    """

    hidden: torch.Tensor
    states: torch.Tensor


class TargetBatch(Protocol):
    """k sequences that share forwards of the target."""

    def append(self, tokens: Sequence[Sequence[int]]) -> Appended:
        """Append at least one token to each of the k sequences and run the target on what is new."""
        ...

    def keep(self, counts: Sequence[int]) -> None:
        """Take back what the last `append` gave each sequence beyond its first `counts` tokens."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these sequences alone."""
        ...


def device_of(target: Target) -> torch.device:
    """Return where the target's text stack lies."""
    return next(target.stack.parameters()).device


class PlainBatch:
    """Causal attention only: one cache, in which a token that is taken back stays and is masked from then on.

    So sequences of different length share a forward, and nothing is moved when one of them loses a token. One forward
    over 16 blocks of 8 rows costs 3 times one over a single block on two CPU cores, not 16 times: the weights are read
    once.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._cache = DynamicCache()
        self._mask: torch.Tensor | None = None
        self._width = 0

    def append(self, tokens: Sequence[Sequence[int]]) -> Appended:
        """See `TargetBatch`."""
        self._width = max(len(each) for each in tokens)
        padded = [[*each, *[0] * (self._width - len(each))] for each in tokens]
        device = device_of(self._target)
        counts = torch.tensor([len(each) for each in tokens], device=device)
        real = torch.arange(self._width, device=device) < counts[:, None]
        before = real[:, :0] if self._mask is None else self._mask
        # Padding is on the right and masked like a token taken back: no row of queries ever sees nothing.
        self._mask = torch.cat([before, real], dim=1)
        # Positions count kept tokens alone, not columns: rotation must not notice the gaps.
        positions = before.sum(dim=1, keepdim=True) + torch.arange(self._width, device=device)
        with self._target.capturing() as captured:
            output = self._target.stack(
                input_ids=torch.tensor(padded, device=device),
                attention_mask=self._mask.long(),
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
            )
        return Appended(output.last_hidden_state, torch.cat(captured, dim=-1))

    def keep(self, counts: Sequence[int]) -> None:
        """See `TargetBatch`."""
        if self._mask is None:
            raise RuntimeError("nothing was appended yet")
        columns = torch.arange(self._width, device=self._mask.device)
        self._mask[:, -self._width :] &= columns < torch.tensor(counts, device=self._mask.device)[:, None]

    def select(self, rows: Sequence[int]) -> None:
        """See `TargetBatch`."""
        if self._mask is None:
            raise RuntimeError("nothing was appended yet")
        index = torch.tensor(rows, device=self._mask.device)
        self._mask = self._mask[index]
        self._cache.batch_select_indices(index)
