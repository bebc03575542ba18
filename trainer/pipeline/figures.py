"""The figures of a step: summed on the device, copied beside the computation, read one step later (rules 6 and 13)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch

from trainer.drafter.objective import ObjectiveSums
from trainer.optimizer import StepOutcome
from trainer.pipeline.copier import Copier, Mark

# A copy that was torn, or read too early, does not carry it.
_CANARY = 1234.5678
_HEAD = 3  # loss_sum, weight_sum, stop
_TAIL = 4  # grad_norm, skipped, step, canary


class StepSums:
    """Running sums of one step on one drafter: f64[3 + 4 + 2B] = loss_sum, weight_sum, stop, then the objective's metrics."""

    def __init__(self, block_size: int, device: torch.device, *, stop_wanted: bool) -> None:
        self.values = torch.zeros(_HEAD + 4 + 2 * block_size, dtype=torch.float64, device=device)
        self.values[2] = float(stop_wanted)

    def add(self, sums: ObjectiveSums) -> None:
        """Add a micro-batch."""
        self.values[0] += sums.loss_sum.detach()
        self.values[1] += sums.weight_sum
        self.values[_HEAD:] += sums.metrics

    @property
    def loss_sum(self) -> torch.Tensor:
        return self.values[0]

    @property
    def weight_sum(self) -> torch.Tensor:
        return self.values[1]


@dataclass(frozen=True)
class StepFigures:
    """A step's figures on the host, over all drafters."""

    step: int
    loss: float
    accuracy: float
    accept_len: float
    grad_norm: float
    weight_sum: float
    skipped: bool
    stop: bool
    torn: bool

    @property
    def non_finite(self) -> bool:
        """Whether the step was refused for its numbers, rather than for having no supervised position."""
        return self.skipped and self.weight_sum != 0

    @classmethod
    def of(cls, step: int, values: list[float]) -> StepFigures:
        loss_sum, weight_sum, stop, correct, supervised, accepted, blocks, *_ = values
        grad_norm, skipped, tagged_step, canary = values[-_TAIL:]
        return cls(
            step=step,
            loss=_ratio(loss_sum, weight_sum),
            accuracy=_ratio(correct, supervised),
            accept_len=_ratio(accepted, blocks),
            grad_norm=grad_norm,
            weight_sum=weight_sum,
            skipped=skipped != 0,
            stop=stop > 0,
            torn=tagged_step != step or canary != _CANARY,
        )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


class DeferredFigures:
    """Copies each step's figures to the host without waiting, and gives them back `lag` steps later.

    The lag is fixed, never "when it is there": drafters decide on stop and alarms from these figures and must decide alike.
    """

    def __init__(self, copier: Copier, device: torch.device) -> None:
        self._copier = copier
        self._lag = 1 if device.type == "cuda" else 0
        self._pinned = device.type == "cuda"
        self._pending: deque[tuple[int, torch.Tensor, torch.Tensor, Mark]] = deque()

    def push(self, step: int, sums: StepSums, outcome: StepOutcome) -> list[StepFigures]:
        """Take the reduced sums of a step; returns the figures that are due."""
        tail = torch.stack([outcome.grad_norm.double(), outcome.skipped.double()])
        tag = torch.tensor([step, _CANARY], dtype=torch.float64).to(tail.device, non_blocking=True)
        values = torch.cat([sums.values, tail, tag])
        host = torch.empty(values.shape, dtype=torch.float64, pin_memory=self._pinned)
        done = self._copier.copy(host, values, after=self._copier.mark())
        # `values` is kept: the source of a copy stays alive until its mark has fired (rule 4).
        self._pending.append((step, host, values, done))
        return self._take(self._lag)

    def flush(self) -> list[StepFigures]:
        """Return what has not been given back yet."""
        return self._take(0)

    def _take(self, keep: int) -> list[StepFigures]:
        due: list[StepFigures] = []
        while len(self._pending) > keep:
            step, host, _, done = self._pending.popleft()
            done.wait_host()  # One step later: long since there.
            due.append(StepFigures.of(step, host.tolist()))
        return due
