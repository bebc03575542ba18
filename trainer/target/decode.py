"""The whole target with its head, decoding greedily with a cache that can be rolled back. Plain targets only."""

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
from trainer.target.facts import target_facts
from trainer.target.load import load_target


class TargetSequence:
    """One sequence in the target's cache: forwards extend it, `rollback` shortens it."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._cache = DynamicCache()

    def forward(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append i64[n]; return the greedy successor of each, i64[n], and the captured states f[n, L·H]."""
        target = self._decoder.target
        position = self._cache.get_seq_length()
        positions = torch.arange(position, position + len(token_ids), device=token_ids.device)
        with target.capturing() as captured:
            output = target.stack(
                input_ids=token_ids[None],
                position_ids=positions[None],
                past_key_values=self._cache,
                use_cache=True,
            )
        return self._decoder.successors(output.last_hidden_state[0]), torch.cat(captured, dim=-1)[0]

    def rollback(self, length: int) -> None:
        """Forget everything behind the first `length` tokens."""
        excess = self._cache.get_seq_length() - length
        if excess:
            # A negative number counts what is removed, in every supported transformers; a positive one does not.
            self._cache.crop(-excess)


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

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return f[n, H] for i64[n]."""
        return functional.embedding(token_ids, self.embed_weight)

    def successors(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the most likely next tokens i64[n] of final, normed states f[n, H]; the lowest id wins a tie."""
        return functional.linear(hidden, self.head_weight).argmax(dim=-1)

    @torch.inference_mode()
    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Return the target's own greedy continuation of each prompt, stop tokens ignored; one left-padded batch."""
        longest = max(len(prompt) for prompt in prompts)
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        inputs = torch.tensor(padded, device=self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        mask = (torch.arange(longest, device=self.device) >= longest - lengths[:, None]).long()
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        cache = DynamicCache()
        chosen: list[torch.Tensor] = []
        for _ in range(max_new_tokens):
            output = self.target.stack(
                input_ids=inputs, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            chosen.append(self.successors(output.last_hidden_state[:, -1]))
            inputs = chosen[-1][:, None]
            mask = functional.pad(mask, (0, 1), value=1)
            positions = positions[:, -1:] + 1
        return torch.stack(chosen, dim=1).tolist()


def load_decoder(
    path: Path, *, dtype: torch.dtype, device: torch.device | str, target_layer_ids: Sequence[int]
) -> Decoder:
    """Load a whole plain target.

    Raises:
        DflashError: see `load_target`; or a target whose cache cannot be rolled back by cropping (code 7).
    """
    facts = target_facts(path)
    types = set(facts.text_config.get("layer_types") or ["full_attention"])
    if facts.hybrid or types != {"full_attention"}:
        raise preflight_error(
            f"{facts.architecture} cannot be evaluated yet",
            cause="its recurrent or sliding layers keep a state that a cache cannot roll back after a rejected token",
            hint="evaluate through a serving engine that loads the exported drafter",
        )
    target = load_target(path, dtype=dtype, device=device, target_layer_ids=target_layer_ids, whole=True)
    embed_weight, head_weight = load_ends(path, dtype, device)
    return Decoder(target, embed_weight, head_weight)
