"""Running the frozen target and catching the outputs of chosen decoder layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.target.facts import TargetFacts


class Target:
    """The frozen text stack of a target, in eval mode, and the ids of the layers whose output is captured."""

    def __init__(self, stack: nn.Module, facts: TargetFacts, target_layer_ids: tuple[int, ...]) -> None:
        self.stack = stack
        self.facts = facts
        self.target_layer_ids = target_layer_ids

    @torch.no_grad()
    def capture(self, input_ids: torch.Tensor, lengths: torch.Tensor | Sequence[int]) -> list[torch.Tensor]:
        """Return the output of each captured layer, L tensors [k, Lmax, H], for right-padded i64[k, Lmax].

        `lengths` i64[k] counts real tokens; states at padding are meaningless. Padding is on the right because the
        recurrent state of a hybrid target must see every real token first. The caller drops the tensors when packed.
        """
        mask = self._real(input_ids, lengths) if self.facts.hybrid else None
        with self.capturing() as captured:
            self.stack(input_ids=input_ids, attention_mask=mask, use_cache=False)
        return captured

    def _real(self, input_ids: torch.Tensor, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Return i64[k, Lmax], 1 on real tokens. Recurrent layers need it; causal ones never look right, where padding is,
        and without a mask their attention takes the causal kernel: 8% of the demo's target forward."""
        steps = torch.arange(input_ids.shape[1], device=input_ids.device)
        return (steps < torch.as_tensor(lengths, device=input_ids.device)[:, None]).long()

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
