"""The figures of a step: summed on the device, copied beside the computation, read one step later (rules 6 and 13)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trainer.drafter.objective import ObjectiveSums
from trainer.optimizer import StepOutcome
from trainer.pipeline.copier import Copier, Mark
from trainer.pipeline.packed import COPY, STATES, PackedRow

# A copy that was torn, or read too early, does not carry it.
_CANARY = 1234.5678
_HEAD = 3  # loss_sum, weight_sum, stop
_METRICS = 4  # correct, supervised, accepted, blocks; then correct and supervised of each of the B rows
_TAIL = 4  # grad_norm, skipped, step, canary


class StepSums:
    """Running sums of one step of G micro-batches on one drafter, in one tensor, so that one collective sums them all.

    f64[3 + 4 + 2B + 2G] = loss_sum, weight_sum, stop, the objective's metrics, and for each micro-batch of the step, whoever
    trains it, what is wrong with its states (see PackedRow.verdict) and whether its loss is not finite.
    """

    def __init__(self, block_size: int, micro_batches: int, device: torch.device, *, stop_wanted: bool) -> None:
        self.block_size = block_size
        sizes = [_HEAD, _METRICS + 2 * block_size, micro_batches, micro_batches]
        self.values = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        _, self._metrics, self._states, self._losses = self.values.split(sizes)
        # Not `values[2] = ...`, which would copy the number from pageable memory, and wait.
        self.values[2].fill_(float(stop_wanted))

    def add(self, sums: ObjectiveSums, packed: PackedRow) -> None:
        """Add a micro-batch with the states that it was made from."""
        loss = sums.loss_sum.detach()
        self.values[0] += loss
        self.values[1] += sums.weight_sum
        self._metrics += sums.metrics
        place = packed.row.batch % len(self._states)
        self._states[place] = packed.verdict()
        self._losses[place] = ~torch.isfinite(loss)

    @property
    def loss_sum(self) -> torch.Tensor:
        return self.values[0]

    @property
    def weight_sum(self) -> torch.Tensor:
        return self.values[1]

    @property
    def bad_states(self) -> torch.Tensor:
        """A device scalar, 0 where the states of all micro-batches are finite."""
        return self._states.sum()


class Suspect(NamedTuple):
    """A micro-batch that is not finite: its place in the step, and what of it: 'states', 'copy' or 'loss'."""

    place: int
    what: str


@dataclass(frozen=True)
class StepFigures:
    """A step's figures on the host, over all drafters. `accuracy_by_row`: of block rows 1 to B-1."""

    step: int
    loss: float
    accuracy: float
    accept_len: float
    grad_norm: float
    weight_sum: float
    skipped: bool
    stop: bool
    torn: bool
    accuracy_by_row: tuple[float, ...] = ()
    micro_batches: int = 0
    suspects: tuple[Suspect, ...] = ()

    @property
    def non_finite(self) -> bool:
        """Whether the step was refused for its numbers, rather than for having no supervised position."""
        return self.skipped and (self.weight_sum != 0 or bool(self.suspects))

    @classmethod
    def of(cls, step: int, values: list[float], block_size: int) -> StepFigures:
        loss_sum, weight_sum, stop, correct, supervised, accepted, blocks, *more = values
        grad_norm, skipped, tagged_step, canary = more[-_TAIL:]
        right, rows = more[1:block_size], more[block_size + 1 : 2 * block_size]
        judged = more[2 * block_size : -_TAIL]
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
            accuracy_by_row=tuple(_ratio(*each) for each in zip(right, rows, strict=True)),
            micro_batches=len(judged) // 2,
            suspects=_suspects(judged[: len(judged) // 2], judged[len(judged) // 2 :]),
        )


def _suspects(states: list[float], losses: list[float]) -> tuple[Suspect, ...]:
    # A loss that is made from bad states says nothing of its own.
    what = [{STATES: "states", COPY: "copy"}.get(verdict, "loss") for verdict in states]
    return tuple(
        Suspect(place, what[place]) for place, pair in enumerate(zip(states, losses, strict=True)) if any(pair)
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
        self._landings: list[torch.Tensor] = []  # Host memory of steps that were given back (rule 7).
        self._pending: deque[tuple[int, int, torch.Tensor, torch.Tensor, Mark]] = deque()

    def push(self, step: int, sums: StepSums, outcome: StepOutcome) -> list[StepFigures]:
        """Take the reduced sums of a step; returns the figures that are due."""
        tail = torch.stack([outcome.grad_norm.double(), outcome.skipped.double()])
        # Filled there: numbers of the host would come by a copy from pageable memory, which waits.
        tag = (tail.new_full((1,), float(step)), tail.new_full((1,), _CANARY))
        values = torch.cat([sums.values, tail, *tag])
        host = (
            self._landings.pop()
            if self._landings
            else torch.empty(values.shape, dtype=torch.float64, pin_memory=self._pinned)
        )
        # Not on the copy stream: behind the step, it would hold up the states of the next one.
        done = self._copier.copy_here(host, values)
        # `values` is kept: the source of a copy stays alive until its mark has fired (rule 4).
        self._pending.append((step, sums.block_size, host, values, done))
        return self._take(self._lag)

    def flush(self) -> list[StepFigures]:
        """Return what has not been given back yet."""
        return self._take(0)

    def _take(self, keep: int) -> list[StepFigures]:
        due: list[StepFigures] = []
        while len(self._pending) > keep:
            step, block_size, host, _, done = self._pending.popleft()
            done.wait_host()  # One step later: long since there.
            due.append(StepFigures.of(step, host.tolist(), block_size))
            self._landings.append(host)
        return due
