"""What every rank has, whatever its role: its place among the others, its device, its joint with its peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.config import TrainConfig
from trainer.data.schedule import Packing, Schedule
from trainer.pipeline import channel
from trainer.pipeline.channel import PairChannel
from trainer.pipeline.copier import Copier, make_copier
from trainer.pipeline.gpu_facts import GpuFacts
from trainer.pipeline.held_out import HeldOut
from trainer.pipeline.layout import Layout, Role
from trainer.pipeline.memory import cap
from trainer.pipeline.packed import PackBuffer
from trainer.pipeline.plan import RunPlan
from trainer.pipeline.reader import packed_length
from trainer.pipeline.reporting import ProfileTimer
from trainer.pipeline.ring import Ring
from trainer.pipeline.stage_clock import timeline_of
from trainer.pipeline.trace import StepTrace
from trainer.pipeline.world import World
from trainer.preflight import make_schedule, packing_of
from trainer.telemetry import PhaseLog, StageClock, Telemetry

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

# A last resort: all ranks have met before, the launcher notices one that is dead, and the watchdogs one that stands still.
_CONNECT_SECONDS = 3600.0


@dataclass(frozen=True)
class Joint:
    """A rank's end of the ring: its mapping, and by peer index the pair's place in the ring and its socket."""

    ring: Ring
    pairs: dict[int, int]
    channels: dict[int, PairChannel]


@dataclass(frozen=True)
class Post:
    """One rank's place of work. `joint` is None with shared roles."""

    plan: RunPlan
    config: TrainConfig
    layout: Layout
    world: World
    device: torch.device
    telemetry: Telemetry
    phases: PhaseLog
    clock: StageClock
    timer: ProfileTimer
    trace: StepTrace
    copier: Copier
    packing: Packing
    schedule: Schedule
    held_out: HeldOut
    held_out_packing: Packing
    token_ids_seen: NDArray[np.int64]
    joint: Joint | None

    @property
    def index(self) -> int:
        """Index among the machine's ranks of the same role."""
        return self.layout.index(self.world.local_rank)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.dtype]

    def buffers(self, count: int) -> list[PackBuffer]:
        """Allocate device buffers for the longest packed row, once (rule 7)."""
        tokens = packed_length(self.config.token_budget, self.config.bucket_tokens)
        return [
            PackBuffer.allocate(
                tokens,
                self.plan.packed_layers,
                self.plan.hidden_size,
                split=self.config.splits_fc,
                dtype=self.dtype,
                device=self.device,
            )
            for _ in range(count)
        ]

    def end_of_warm_up(self) -> bool:
        """Wait until every rank is ready, or wants to stop; True when the run is to end before it began.

        From here on the ring lives in the mappings and the sockets in their connections: their names go.
        """
        stop = self.world.barrier(self.plan.run.stop.exists())
        if self.world.local_rank == self.layout.first_drafter:
            self.plan.forget_names()  # So that no crash can leave them behind.
        return stop


@contextmanager
def take_post(plan: RunPlan, world: World, telemetry: Telemetry, phases: PhaseLog) -> Iterator[Post]:
    """Set up what a rank of any role needs."""
    config, layout = plan.train_config(), plan.layout()
    device = torch.device(layout.device_of(world.local_rank))
    role = layout.role(world.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        cap(device, config.gpu_memory_gib)
    clock = StageClock(timeline_of(device))
    clock.pulse = world.pulse
    timer = ProfileTimer(
        clock,
        telemetry,
        interval=config.profile_interval,
        role=role,
        device=str(device),
        rank=world.rank,
        gpu=GpuFacts.measure(device, DTYPES[config.dtype]),
    )
    with np.load(plan.documents) as documents:
        packing = packing_of(config, documents["lengths"], documents["candidates"])
        aside = packing_of(config, documents["held_out_lengths"], documents["held_out_candidates"])
        token_ids_seen = documents["token_ids_seen"]
    yield Post(
        plan=plan,
        config=config,
        layout=layout,
        world=world,
        device=device,
        telemetry=telemetry,
        phases=phases,
        clock=clock,
        timer=timer,
        trace=_step_trace(plan, clock, telemetry, world.rank, device),
        copier=make_copier(device),
        packing=packing,
        schedule=make_schedule(config, packing, world.machines),
        # In the order of an epoch 0, which is the same each time.
        held_out=HeldOut(tuple(aside.rows(0)), Layout.of(config).counts(world.machines), config, plan.total_steps),
        held_out_packing=aside,
        token_ids_seen=token_ids_seen,
        joint=None if layout.shared else _join_peers(plan, layout, role, world, device),
    )


def _step_trace(plan: RunPlan, clock: StageClock, telemetry: Telemetry, rank: int, device: torch.device) -> StepTrace:
    count = plan.train_config().trace_steps
    path = plan.run.trace(rank)
    return StepTrace(path, clock, telemetry, rank=rank, first_step=plan.first_step, count=count, device=device)


def _join_peers(plan: RunPlan, layout: Layout, role: Role, world: World, device: torch.device) -> Joint:
    ring = Ring(Path(plan.ring_file), slot_size=plan.slot_bytes, slots_per_pair=plan.slots_per_pair)
    if device.type == "cuda":
        ring.register_with_cuda()
    places = {pair: place for place, pair in enumerate(layout.pairs)}
    index, first_rank = layout.index(world.local_rank), world.rank - world.local_rank
    drafters = {drafter: first_rank + layout.targets + drafter for drafter in range(layout.drafters)}
    targets = {target: first_rank + target for target in range(layout.targets)}
    if role is Role.TARGET:
        peers = {
            drafter: channel.connect(
                plan.pair_address(index, drafter),
                f"drafter {drafter} (rank {rank})",
                _CONNECT_SECONDS,
                rank=rank,
                pulse=world.pulse,
            )
            for drafter, rank in drafters.items()
        }
        return Joint(ring, {drafter: places[index, drafter] for drafter in peers}, peers)
    listeners = {target: channel.listen(plan.pair_address(target, index)) for target in targets}
    peers = {
        target: channel.accept(
            listeners[target], f"target {target} (rank {rank})", _CONNECT_SECONDS, rank=rank, pulse=world.pulse
        )
        for target, rank in targets.items()
    }
    return Joint(ring, {target: places[target, index] for target in peers}, peers)
