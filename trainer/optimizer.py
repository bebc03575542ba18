"""AdamW on float32 masters with cosine and warm-up, and the one scaling of summed gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from trainer.config import TrainConfig


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """Return the rate of `step` (counted from 1): linear warm-up over warmup_ratio of the steps, then a cosine to 0.

    The last step's rate is just above 0: a rate of exactly 0 would make it a wasted step.
    """
    warmup = round(config.warmup_ratio * total_steps)
    if step <= warmup:
        return config.lr * (step / warmup)
    progress = (step - 1 - warmup) / max(1, total_steps - warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class StepOutcome:
    """Device scalars of one optimizer step: gradient norm before clipping, and 1.0 where the step was not applied."""

    grad_norm: torch.Tensor
    skipped: torch.Tensor


class StepOptimizer:
    """Applies one optimizer step to gradients that are SUMS over the step's positions. No host synchronisation."""

    def __init__(self, drafter: nn.Module, config: TrainConfig, total_steps: int) -> None:
        self._config = config
        self._total_steps = total_steps
        self._halted: torch.Tensor | None = None
        self._parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in self._parameters if parameter.dim() > 1]
        vectors = [parameter for parameter in self._parameters if parameter.dim() <= 1]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            # The fused kernel takes found_inf: a non-finite step is skipped on the device, without asking the host.
            fused=True,
        )

    def allocate(self) -> None:
        """Make the moments now, as the first step would, where there are none: 8 bytes a parameter, before memory is counted."""
        for parameter in self._parameters:
            state = self._adamw.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def learning_rate(self, step: int) -> float:
        return learning_rate(step, self._total_steps, self._config)

    def apply(
        self,
        step: int,
        *,
        loss_sum: torch.Tensor,
        weight_sum: torch.Tensor,
        drafters: int,
        refuse: torch.Tensor | None = None,
    ) -> StepOutcome:
        """Scale, clip and apply the gradients, then clear them.

        `loss_sum` and `weight_sum` are global sums. The gradients are averages over `drafters` (what DistributedDataParallel
        leaves), so that gradient of the mean loss = gradient * drafters / weight_sum. A step whose weight is zero, or whose loss
        or gradient is not finite, or with `refuse` (a device scalar) not 0, is not applied: weights, moments and step counts stay.
        With on_nan = stop nothing is applied any more after a step that was refused for its numbers.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        scale = drafters / weight_sum
        norm = nn.utils.get_total_norm(gradients) * scale
        empty = ~(weight_sum > 0)
        bad = ~(torch.isfinite(norm) & torch.isfinite(loss_sum)) & ~empty
        if refuse is not None:
            bad = bad | (refuse != 0)
        if self._config.on_nan == "stop":
            # The host reads the flag one step later: until then the weights must stay those that the bad step met.
            self._halted = bad if self._halted is None else bad | self._halted
            bad = self._halted
        skipped = (bad | empty).to(torch.float32)
        clip = torch.clamp(self._config.max_grad_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(gradients, (scale * clip).to(gradients[0].dtype))  # pyright: ignore[reportPrivateImportUsage]
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate(step)
        self._adamw.found_inf = skipped  # pyright: ignore[reportAttributeAccessIssue]
        self._adamw.grad_scale = None  # pyright: ignore[reportAttributeAccessIssue]
        self._adamw.step()
        self.clear_gradients()
        return StepOutcome(grad_norm=norm, skipped=skipped)

    def clear_gradients(self, *, forget: bool = False) -> None:
        """Set the gradients to 0; their memory stays, or with `forget` goes as well."""
        self._adamw.zero_grad(set_to_none=forget)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return moments and step counts as flat tensors, `<index>.<name>` in order of the parameters."""
        tensors: dict[str, torch.Tensor] = {}
        for index, parameter in enumerate(self._parameters):
            for name, value in self._adamw.state.get(parameter, {}).items():
                tensors[f"{index}.{name}"] = value
        return tensors

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take back what `state_dict` returned. Raises KeyError or ValueError when it belongs to another drafter."""
        for key, value in tensors.items():
            index, _, name = key.partition(".")
            parameter = self._parameters[int(index)]
            if value.dim() and value.shape != parameter.shape:
                raise ValueError(
                    f"moment {key} of shape {list(value.shape)} for a parameter of {list(parameter.shape)}"
                )
            device = parameter.device
            self._adamw.state[parameter][name] = value.to(device)
