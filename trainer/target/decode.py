"""The whole target with its head: what speculative decoding verifies with, and what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from remote.protocol.errors import preflight_error
from trainer.target.batch import PlainBatch, TargetBatch
from trainer.target.capture import Target
from trainer.target.ends import load_ends
from trainer.target.facts import TargetFacts, target_facts
from trainer.target.load import load_target
from trainer.target.recurrent import RecurrentBatch


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

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return f[..., V] of final, normed states f[..., H].

        Ask for the rows that are needed: 16 prompts of 262 tokens times 248,320 entries are 4.2 GB in float32.
        """
        return functional.linear(hidden, self.head_weight)

    def batch(self, count: int) -> TargetBatch:
        """Return an empty batch of `count` sequences."""
        return RecurrentBatch(self.target, count) if self.target.facts.hybrid else PlainBatch(self.target)


def load_decoder(
    path: Path, *, dtype: torch.dtype, device: torch.device | str, target_layer_ids: Sequence[int]
) -> Decoder:
    """Load a whole target, plain or hybrid.

    Raises:
        DflashError: see `load_target` and `refuse_unknown_layers` (code 7).
    """
    refuse_unknown_layers(target_facts(path))
    target = load_target(path, dtype=dtype, device=device, target_layer_ids=target_layer_ids, whole=True)
    embed_weight, head_weight = load_ends(path, dtype, device)
    return Decoder(target, embed_weight, head_weight)


def refuse_unknown_layers(facts: TargetFacts) -> None:
    """Raise a DflashError (code 7) for a target with layers whose state is not taken back here, sliding ones say."""
    unknown = set(facts.text_config.get("layer_types") or ()) - {"full_attention", "linear_attention"}
    if unknown:
        raise preflight_error(
            f"{facts.architecture} cannot be evaluated here",
            cause=f"it has layers of the kind {', '.join(sorted(unknown))}",
            hint="measure acceptance in a serving engine that loads the exported drafter",
        )
