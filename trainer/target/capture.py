"""Running the frozen target and catching the outputs of chosen decoder layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from trainer.target.facts import TargetFacts


class _EmptyCache(DynamicCache):
    """A cache that stays empty: transformers takes positions beside one for those of a single sequence."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


class Target:
    """The frozen text stack of a target, in eval mode, and the ids of the layers whose output is captured."""

    def __init__(self, stack: nn.Module, facts: TargetFacts, target_layer_ids: tuple[int, ...]) -> None:
        self.stack = stack
        self.facts = facts
        self.target_layer_ids = target_layer_ids

    @property
    def embedding(self) -> torch.Tensor:
        """The weight of the input embedding, f[V, H]."""
        return self.stack.get_parameter("embed_tokens.weight")

    @torch.no_grad()
    def capture(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """Return the output of each captured layer, L tensors [k, Lmax, H], for right-padded i64[k, Lmax].

        States at padding are meaningless. The caller drops the tensors when packed.
        """
        # Without a mask: attention, convolution and recurrence look back only, so that padding on the right reaches no real
        # token. transformers asks a mask's values on the host, three times a forward, which then waits for the GPU; and
        # attention without one takes the causal kernel, 8% of the demo's target forward.
        with self.capturing() as captured:
            self.stack(input_ids=input_ids, use_cache=False, **self._no_mask())
        return captured

    def _no_mask(self) -> dict[str, Any]:
        """Return what keeps a forward from looking for the bounds of packed sequences, which asks the device once more."""
        if self.facts.hybrid:
            return {"attention_mask": {"full_attention": None, "linear_attention": None}}
        return {"attention_mask": None, "past_key_values": _EmptyCache()}

    @contextmanager
    def capturing(self) -> Iterator[list[torch.Tensor]]:
        """Yield the list that one forward of `stack` inside the block fills, in the order of `target_layer_ids`.

        The output of layers[i] is transformers' hidden_states[i + 1].
        """
        captured: list[torch.Tensor] = []

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # Decoder layers return a tensor since transformers 5; some still wrap it in a tuple.
            captured.append(output if isinstance(output, torch.Tensor) else output[0])

        # Registered for one forward: a hook that stays would keep the last batch's states alive.
        layers = self.stack.get_submodule("layers")
        hooks = [layers.get_submodule(str(i)).register_forward_hook(keep) for i in self.target_layer_ids]
        try:
            yield captured
        finally:
            for hook in hooks:
                hook.remove()
