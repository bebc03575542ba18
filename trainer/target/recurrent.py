"""Decoding with a hybrid target, whose recurrent layers cannot forget a token: their state is kept from before it.

transformers 5.19 crops the convolution of such a cache and leaves the recurrence as it is, so that output behind a
rejected guess is wrong. Here the state of before the block is kept, and committed tokens are run again from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import DynamicCache

from trainer.target.batch import Appended, device_of
from trainer.target.capture import Target

_LINEAR = "linear_attention"


@dataclass(frozen=True)
class _State:
    """What one sequence of `length` tokens left in the layers, two tensors each; never written to.

    Attention: keys and values f[num_key_value_heads, length, head_dim]. Linear attention: convolution f[channels, width]
    and recurrence f[heads, key, value].
    """

    length: int
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]


_NOTHING = _State(0, ())


class RecurrentBatch:
    """Sequences with a state each. Those that get equally many tokens share a forward.

    Never more: padding, masked or not, passes the convolution and lets the recurrence decay. The caches are small
    beside the weights (0.25 MB a token for the 27B shape), so they are stacked anew for each forward.
    """

    def __init__(self, target: Target, count: int) -> None:
        self._target = target
        self._before: list[_State] = [_NOTHING] * count
        self._after = self._before
        self._tokens: Sequence[Sequence[int]] = ()

    def append(self, tokens: Sequence[Sequence[int]]) -> Appended:
        """See `TargetBatch`."""
        self._before, self._tokens = self._after, tokens
        self._after = list(self._before)
        width = max(len(each) for each in tokens)
        rows: list[tuple[torch.Tensor, torch.Tensor]] = [(torch.empty(0), torch.empty(0))] * len(tokens)
        for members in self._alike([len(each) for each in tokens]):
            hidden, states = self._run(members, [tokens[i] for i in members])
            # Zeros behind a shorter sequence's own tokens, so that all stack.
            missing = width - hidden.shape[1]
            padded = (functional.pad(each, (0, 0, 0, missing)) for each in (hidden, states))
            for i, *row in zip(members, *padded, strict=True):
                rows[i] = (row[0], row[1])
        return Appended(*(torch.stack(part) for part in zip(*rows, strict=True)))

    def keep(self, counts: Sequence[int]) -> None:
        """See `TargetBatch`. One more forward for each different number of kept tokens below the whole block."""
        if not self._tokens:
            raise RuntimeError("nothing was appended yet")
        # A block that was committed whole left the right state already.
        again = [count if count < len(own) else 0 for count, own in zip(counts, self._tokens, strict=True)]
        for i, count in enumerate(counts):
            if count == 0:
                self._after[i] = self._before[i]
        for members in self._alike(again):
            if again[members[0]]:
                self._run(members, [self._tokens[i][: again[i]] for i in members])

    def select(self, rows: Sequence[int]) -> None:
        """See `TargetBatch`."""
        if not self._tokens:
            raise RuntimeError("nothing was appended yet")
        self._after = [self._after[i] for i in rows]
        self._tokens = [self._tokens[i] for i in rows]
        self._before = [self._before[i] for i in rows]

    def _alike(self, counts: Sequence[int]) -> list[list[int]]:
        """Group sequences that may share a forward: equally many tokens, and a state or none yet."""
        groups: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        for i, count in enumerate(counts):
            groups[count, self._before[i].length > 0].append(i)
        return list(groups.values())

    def _run(self, members: Sequence[int], tokens: Sequence[Sequence[int]]) -> Appended:
        """Run the target on tokens behind the kept states of `members` and note the states that they leave."""
        before = [self._before[i] for i in members]
        added, device = len(tokens[0]), device_of(self._target)
        lengths = torch.tensor([state.length for state in before], device=device)[:, None]
        columns = int(lengths.max())
        cache = self._cache(before, columns)
        # Shorter caches have a masked gap before the new columns; positions count tokens alone.
        seen = torch.arange(columns, device=device) < lengths
        with self._target.capturing() as captured:
            output = self._target.stack(
                input_ids=torch.tensor(tokens, device=device),
                attention_mask=torch.cat([seen, seen.new_ones(len(members), added)], dim=1).long(),
                position_ids=lengths + torch.arange(added, device=device),
                past_key_values=cache,
                use_cache=True,
            )
        for row, (i, state) in enumerate(zip(members, before, strict=True)):
            self._after[i] = self._row(cache, row, state.length, columns, added)
        return Appended(output.last_hidden_state, torch.cat(captured, dim=-1))

    def _cache(self, states: Sequence[_State], columns: int) -> DynamicCache:
        config: Any = self._target.stack.config
        cache = DynamicCache(config=config)
        if columns == 0:
            return cache
        for layer, kind in enumerate(config.layer_types):
            first, second = zip(*(state.layers[layer] for state in states), strict=True)
            if kind == _LINEAR:
                cache.update_conv_state(torch.stack(first), layer)
                cache.update_recurrent_state(torch.stack(second), layer)
            else:
                cache.update(_stack_padded(first, columns), _stack_padded(second, columns), layer)
        return cache

    def _row(self, cache: DynamicCache, row: int, length: int, columns: int, added: int) -> _State:
        """Return one sequence's state out of a batch's cache, without the gap behind its first `length` columns."""
        config: Any = self._target.stack.config
        layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for kind, layer in zip(config.layer_types, cache.layers, strict=True):
            held: Any = layer
            if kind == _LINEAR:
                layers.append((held.conv_states[0][row], held.recurrent_states[0][row]))
            else:
                keys, values = held.keys[row], held.values[row]
                layers.append((_without_gap(keys, length, columns), _without_gap(values, length, columns)))
        return _State(length + added, tuple(layers))


def _stack_padded(parts: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
    """Stack f[heads, length, d] of different lengths to f[k, heads, columns, d]."""
    return torch.stack([functional.pad(each, (0, 0, 0, columns - each.shape[1])) for each in parts])


def _without_gap(rows: torch.Tensor, length: int, columns: int) -> torch.Tensor:
    return torch.cat([rows[:, :length], rows[:, columns:]], dim=1)
