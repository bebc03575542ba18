"""The process groups of a run: all ranks (gloo, for the barrier that ends warm-up), and the drafters among themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import distributed

from trainer.pipeline.layout import Layout, Role
from trainer.pipeline.pulse import OTHER_DRAFTERS, Pulse

# 54 GB of weights from a cold disk at 20 MB/s take 45 minutes.
_LONGEST_LOAD = timedelta(hours=2)


@dataclass(frozen=True)
class World:
    """This rank among the others. `drafters` is the drafters' group over all machines, None on a pure target."""

    rank: int
    local_rank: int
    machine: int
    machines: int
    drafters: distributed.ProcessGroup | None
    drafter_count: int
    pulse: Pulse = field(default_factory=Pulse)
    loaders: distributed.ProcessGroup | None = None
    """The drafters' group with patience for loads, over gloo; `drafters` is for those that have met here."""

    def barrier(self, stop_wanted: bool) -> bool:
        """Wait for all ranks; True everywhere if any of them wants to stop."""
        flag = torch.tensor(int(stop_wanted))
        with self.pulse.waiting("the other ranks"):
            distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
        return bool(flag.item())

    def meeting(self) -> AbstractContextManager[None]:
        """Return a context for what meets the other drafters: whoever stands in it may be waiting for them."""
        return self.pulse.waiting(OTHER_DRAFTERS) if self.drafter_count > 1 else nullcontext()

    def drafters_barrier(self) -> None:
        """Wait until every drafter has come here."""
        if self.drafter_count > 1:
            with self.meeting():
                distributed.barrier(group=self.drafters)

    def any_loader(self, stop_wanted: bool) -> bool:
        """Wait until every drafter has loaded, or wants to stop; True on each of them if any wants to."""
        flag = torch.tensor(int(stop_wanted))
        if self.drafter_count > 1:
            with self.meeting():
                distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=self.loaders)
        return bool(flag.item())

    def all_drafters(self, yes: bool, device: torch.device) -> bool:
        """Whether every drafter says yes, heard by all of them. CPU-GPU sync point, once before the first step."""
        flag = torch.tensor(int(yes), device=device)
        if self.drafter_count > 1:
            with self.meeting():
                distributed.all_reduce(flag, op=distributed.ReduceOp.MIN, group=self.drafters)
                return bool(flag.item())  # NCCL waits here.
        return yes

    def sum_over_drafters(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all drafters, in place."""
        if self.drafter_count > 1:
            with self.meeting():
                distributed.all_reduce(values, group=self.drafters)
        return values


@contextmanager
def join_world(layout: Layout, *, timeout: float, pulse: Pulse) -> Iterator[World]:
    """Join the process groups that torch's launcher describes in the environment, and leave them at the end.

    `timeout` (seconds) bounds every collective of a step: the last resort, for the watchdogs know more of a peer.
    """
    limit = timedelta(seconds=timeout)
    # Ranks' own collectives go over gloo: the world group only carries a stop flag. NCCL is for the drafters' gradients.
    # Its one barrier waits for the slowest load, which may take longer than any step; the launcher notices a dead rank.
    with pulse.waiting("the other ranks"):
        distributed.init_process_group("gloo", timeout=max(limit, _LONGEST_LOAD))
    local_rank = int(os.environ["LOCAL_RANK"])
    machines = int(os.environ["GROUP_WORLD_SIZE"])
    drafter_ranks = [
        machine * layout.ranks + local
        for machine in range(machines)
        for local in range(layout.ranks)
        if layout.role(local) is not Role.TARGET
    ]
    with pulse.waiting("the other ranks"):
        backend = "nccl" if layout.device == "cuda" else "gloo"
        group = distributed.new_group(drafter_ranks, timeout=limit, backend=backend)
        loaders = distributed.new_group(drafter_ranks, timeout=max(limit, _LONGEST_LOAD), backend="gloo")
    is_drafter = layout.role(local_rank) is not Role.TARGET
    yield World(
        rank=distributed.get_rank(),
        local_rank=local_rank,
        machine=int(os.environ["GROUP_RANK"]),
        machines=machines,
        drafters=group if is_drafter and isinstance(group, distributed.ProcessGroup) else None,
        drafter_count=len(drafter_ranks),
        pulse=pulse,
        loaders=loaders if is_drafter and isinstance(loaders, distributed.ProcessGroup) else None,
    )
    # After a clean end only. A rank that fails keeps its connections until it has filed its error and exits: closed
    # earlier, the peers' complaints about a lost connection would be filed first and taken for the cause.
    with pulse.waiting("the other ranks"):
        distributed.destroy_process_group()
