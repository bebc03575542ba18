"""From rows to optimizer steps: the order of all micro-batches of a run and where each of them goes."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from trainer.data.rows import Row, assign_step, pack_rows


@dataclass(frozen=True)
class Layout:
    """Ranks by role; targets and drafters are counted per machine."""

    machines: int
    targets: int
    drafters: int
    shared: bool


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch b of the run (from 0), part of step s (from 1) and epoch (from 0), with its ranks."""

    b: int
    step: int
    epoch: int
    row: Row
    machine: int
    target: int
    drafter: int


@dataclass(frozen=True)
class Packing:
    """What rows are made from; see pack_rows."""

    lengths: NDArray[np.int32]
    candidates: NDArray[np.int32]
    seed: int
    token_budget: int
    bucket_tokens: int
    max_documents: int | None = None

    def rows(self, epoch: int) -> list[Row]:
        """Return the rows of one epoch in training order."""
        return pack_rows(
            self.lengths,
            self.candidates,
            seed=self.seed,
            epoch=epoch,
            token_budget=self.token_budget,
            bucket_tokens=self.bucket_tokens,
            max_documents=self.max_documents,
        )


class Schedule:
    """All micro-batches of a run: step s takes b from (s-1)·G to s·G-1, across epoch ends.

    The last step takes what is left, so it may be smaller; the loss is normalised by weights, so that is no bias.
    """

    def __init__(self, packing: Packing, layout: Layout, *, epochs: int, micro_batches_per_step: int) -> None:
        self._layout = layout
        self._group = micro_batches_per_step
        # Two epochs are enough for a step that spans an epoch's end; a million documents take a second to pack.
        self._rows = lru_cache(maxsize=2)(packing.rows)
        self.rows_per_epoch = [len(self._rows(epoch)) for epoch in range(epochs)]
        self._ends = list(itertools.accumulate(self.rows_per_epoch))

    @property
    def total_micro_batches(self) -> int:
        """Rows of all epochs together."""
        return self._ends[-1] if self._ends else 0

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return -(-self.total_micro_batches // self._group)

    def epoch_of(self, b: int) -> int:
        """Return the epoch that micro-batch b belongs to."""
        return bisect_right(self._ends, b)

    def row(self, b: int) -> Row:
        """Return the documents of micro-batch b."""
        epoch = self.epoch_of(b)
        return self._rows(epoch)[b - (self._ends[epoch] - self.rows_per_epoch[epoch])]

    def step(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step (counted from 1) in ascending b, with their ranks."""
        numbers = range((step - 1) * self._group, min(step * self._group, self.total_micro_batches))
        rows = [self.row(b) for b in numbers]
        layout = self._layout
        ranks = assign_step(
            [row.tokens for row in rows], step, layout.machines, layout.targets, layout.drafters, layout.shared
        )
        return [
            MicroBatch(b, step, self.epoch_of(b), row, *rank) for b, row, rank in zip(numbers, rows, ranks, strict=True)
        ]

    def rows_of(self, first_step: int, last_step: int) -> Iterator[Row]:
        """Yield the rows of some steps, whoever takes them."""
        for b in range((first_step - 1) * self._group, min(last_step * self._group, self.total_micro_batches)):
            yield self.row(b)

    def for_target(self, machine: int, target: int, *, first_step: int = 1) -> Iterator[MicroBatch]:
        """Yield what a target produces, in ascending b, from a step on."""
        for micro_batch in self._from(first_step):
            if (micro_batch.machine, micro_batch.target) == (machine, target):
                yield micro_batch

    def for_drafter(self, machine: int, drafter: int, *, first_step: int = 1) -> Iterator[MicroBatch]:
        """Yield what a drafter consumes, in ascending b, from a step on."""
        for micro_batch in self._from(first_step):
            if (micro_batch.machine, micro_batch.drafter) == (machine, drafter):
                yield micro_batch

    def _from(self, first_step: int) -> Iterator[MicroBatch]:
        for step in range(first_step, self.total_steps + 1):
            yield from self.step(step)
