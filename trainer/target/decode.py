"""The whole target with its head, decoding many sequences at once, each rolled back on its own. Plain targets only.

One forward over 16 blocks of 8 rows costs 3 times one over a single block on two CPU cores, not 16 times: the weights
are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import DynamicCache

from remote.protocol.errors import preflight_error
from trainer.target.capture import Target
from trainer.target.ends import load_ends
from trainer.target.facts import TargetFacts, target_facts
from trainer.target.load import load_target


@dataclass(frozen=True)
class Decoder:
    """A whole target: text stack, embedding f[V, H] and head f[V, H]."""

    target: Target
    embed_weight: torch.Tensor
    head_weight: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Where the target runs."""
        return self.head_weight.device

    def successors(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the most likely next tokens i64[...] of final, normed states f[..., H]; the lowest id wins a tie."""
        return functional.linear(hidden, self.head_weight).argmax(dim=-1)

    @torch.inference_mode()
    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Return the target's own greedy continuation of each prompt, one token a forward, stop tokens ignored."""
        batch = TargetBatch(self)
        counts = [len(prompt) for prompt in prompts]
        successors, _ = batch.forward(prompts)
        chosen = [[row[count - 1]] for row, count in zip(successors.tolist(), counts, strict=True)]
        while len(chosen[0]) < max_new_tokens:
            successors, _ = batch.forward([tokens[-1:] for tokens in chosen])
            for tokens, (successor,) in zip(chosen, successors.tolist(), strict=True):
                tokens.append(successor)
        return chosen


class TargetBatch:
    """k sequences in one cache. A token that is taken back stays in the cache and is masked from then on.

    So sequences of different length share a forward, and nothing is moved when one of them loses a token.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._cache = DynamicCache()
        self._mask: torch.Tensor | None = None
        self._width = 0

    def forward(self, tokens: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens to each of the k sequences, at most m to one.

        Returns the greedy successor of each, i64[k, m], and the captured states f[k, m, L·H]; what lies beyond a
        sequence's own tokens is meaningless in both.
        """
        self._width = max(len(each) for each in tokens)
        padded = [[*each, *[0] * (self._width - len(each))] for each in tokens]
        device = self._decoder.device
        counts = torch.tensor([len(each) for each in tokens], device=device)
        real = torch.arange(self._width, device=device) < counts[:, None]
        before = real[:, :0] if self._mask is None else self._mask
        # Padding is on the right and masked like a token taken back: no row of queries ever sees nothing.
        self._mask = torch.cat([before, real], dim=1)
        # Positions count kept tokens alone, not columns: rotation must not notice the gaps.
        positions = before.sum(dim=1, keepdim=True) + torch.arange(self._width, device=device)
        target = self._decoder.target
        with target.capturing() as captured:
            output = target.stack(
                input_ids=torch.tensor(padded, device=device),
                attention_mask=self._mask.long(),
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
            )
        return self._decoder.successors(output.last_hidden_state), torch.cat(captured, dim=-1)

    def keep(self, counts: Sequence[int]) -> None:
        """Take back what the last forward appended to each sequence beyond its first `counts` tokens."""
        if self._mask is None:
            raise RuntimeError("nothing was appended yet")
        kept = (
            torch.arange(self._width, device=self._mask.device)
            < torch.tensor(counts, device=self._mask.device)[:, None]
        )
        self._mask[:, -self._width :] &= kept

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these sequences alone."""
        if self._mask is None:
            raise RuntimeError("nothing was appended yet")
        index = torch.tensor(rows, device=self._mask.device)
        self._mask = self._mask[index]
        self._cache.batch_select_indices(index)


def load_decoder(
    path: Path, *, dtype: torch.dtype, device: torch.device | str, target_layer_ids: Sequence[int]
) -> Decoder:
    """Load a whole plain target.

    Raises:
        DflashError: see `load_target` and `refuse_stateful` (code 7).
    """
    refuse_stateful(target_facts(path))
    target = load_target(path, dtype=dtype, device=device, target_layer_ids=target_layer_ids, whole=True)
    embed_weight, head_weight = load_ends(path, dtype, device)
    return Decoder(target, embed_weight, head_weight)


def refuse_stateful(facts: TargetFacts) -> None:
    """Raise a DflashError (code 7) for a target that keeps more than keys and values of every token."""
    types = set(facts.text_config.get("layer_types") or ["full_attention"])
    if facts.hybrid or types != {"full_attention"}:
        raise preflight_error(
            f"{facts.architecture} cannot be evaluated here",
            cause="its recurrent or sliding layers keep a state that does not forget a rejected token",
            hint="measure acceptance in a serving engine that loads the exported drafter",
        )
