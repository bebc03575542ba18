"""Held-out documents, measured before each scheduled checkpoint: by the same targets and drafters, in the same stream.

Their micro-batches follow those of the step that the checkpoint contains. All have the same rows, anchors and weights each
time (no noise, the decayed cross-entropy whatever the run's objective), so that the figures of a run compare.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trainer.config import TrainConfig
from trainer.data.rows import Row, assign_step
from trainer.data.schedule import Layout, MicroBatch
from trainer.drafter.objective import ObjectiveSums

FIRST_BATCH = 1 << 40
"""Held-out micro-batches are numbered from here: no training comes so far."""


def checkpoint_due(config: TrainConfig, step: int, total_steps: int) -> bool:
    """Whether a step ends with a scheduled checkpoint; that of a stop is not scheduled, so no target could know of it."""
    every = config.checkpoint_every
    return step == total_steps or (every > 0 and step % every == 0)


@dataclass(frozen=True)
class HeldOut:
    """The rows of one measurement and who takes them."""

    rows: tuple[Row, ...]
    layout: Layout
    config: TrainConfig
    total_steps: int

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Return what all ranks measure behind a step, in ascending b."""
        if not self.rows or not checkpoint_due(self.config, step, self.total_steps):
            return []
        layout = self.layout
        tokens = [row.tokens for row in self.rows]
        ranks = assign_step(tokens, step, layout.machines, layout.targets, layout.drafters, layout.shared)
        return [
            MicroBatch(FIRST_BATCH + place, step, 0, row, *rank)
            for place, (row, rank) in enumerate(zip(self.rows, ranks, strict=True))
        ]

    def join(
        self, training: Iterator[MicroBatch], first_step: int, machine: int, *, target: int = -1, drafter: int = -1
    ) -> Iterator[MicroBatch]:
        """Yield a rank's micro-batches of training with those that it measures, in the order of the run."""
        measured = (
            each
            for step in range(first_step, self.total_steps + 1)
            for each in self.micro_batches(step)
            if each.machine == machine and (each.target == target or each.drafter == drafter)
        )
        return heapq.merge(training, measured, key=lambda each: (each.step, each.b))


class HeldOutSums:
    """Running sums of one measurement on one drafter: f64[2 + 4 + 2B], as in StepSums."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.values = torch.zeros(2 + 4 + 2 * block_size, dtype=torch.float64, device=device)

    def add(self, sums: ObjectiveSums) -> None:
        """Add a micro-batch."""
        self.values += torch.cat([torch.stack([sums.loss_sum, sums.weight_sum]).double(), sums.metrics])

    def figures(self) -> HeldOutFigures:
        """Return the figures of the reduced sums. CPU-GPU sync point, once a checkpoint."""
        loss_sum, weight_sum, correct, supervised, accepted, blocks, *_ = self.values.tolist()
        return HeldOutFigures(
            loss_sum / weight_sum if weight_sum else math.nan,
            correct / supervised if supervised else math.nan,
            accepted / blocks if blocks else math.nan,
        )


@dataclass(frozen=True)
class HeldOutFigures:
    """What a drafter is worth on documents that it does not learn from; figures as in a step."""

    loss: float
    accuracy: float
    accept_len: float
