"""A drafter rank at work: the pieces of a training step, each one call of trainer.train."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from remote.protocol.errors import DflashError
from trainer.config import TrainConfig
from trainer.data.schedule import MicroBatch, Schedule
from trainer.drafter.attention_choice import Backend, flex_failures
from trainer.drafter.blocks import Blocks, build_blocks
from trainer.drafter.config import gamma_for
from trainer.drafter.model import Drafter, States
from trainer.drafter.noise import Noise
from trainer.drafter.objective import Objective, ObjectiveSums
from trainer.drafter.step import drafter_forward
from trainer.drafter.teacher import part_states
from trainer.optimizer import StepOptimizer, StepOutcome
from trainer.pipeline.bad_batch import Evidence
from trainer.pipeline.figures import DeferredFigures, StepFigures, StepSums
from trainer.pipeline.flops import DrafterFlops
from trainer.pipeline.handover import Receiver
from trainer.pipeline.held_out import HeldOut, HeldOutFigures, HeldOutSums
from trainer.pipeline.out_of_memory import at_shape
from trainer.pipeline.packed import PackBuffer, PackedRow, RowTokens
from trainer.pipeline.plan import RunPlan
from trainer.pipeline.reporting import Desk, ProfileTimer, StepTraffic, blame
from trainer.pipeline.saving import Saving
from trainer.pipeline.stage_clock import when_gradients_are_made
from trainer.pipeline.startup import startup_message
from trainer.pipeline.target_side import SharedReceiver
from trainer.pipeline.trace import StepTrace
from trainer.pipeline.world import World
from trainer.telemetry import PhaseLog, StageClock


@dataclass(frozen=True)
class Ends:
    """The target's embedding f[V, H] and head f[V', H], frozen; `subset` i64[V'] when the softmax runs over some tokens only.

    `norm` stands between the target's last layer and its head, and is there when the drafter learns from the target's logits.
    """

    embed: torch.Tensor
    head: torch.Tensor
    subset: torch.Tensor | None
    norm: torch.nn.Module | None = None


@dataclass
class DrafterSession:
    """The state of one drafter rank. `desk` is None on all drafters but the machine's first."""

    plan: RunPlan
    config: TrainConfig
    world: World
    device: torch.device
    schedule: Schedule
    held_out: HeldOut
    index: int
    drafter: Drafter
    optimizer: StepOptimizer
    ends: Ends
    backend: Backend
    receiver: Receiver
    buffers: Sequence[PackBuffer]
    figures: DeferredFigures
    clock: StageClock
    phases: PhaseLog
    timer: ProfileTimer
    trace: StepTrace
    desk: Desk | None
    padding: float

    def __post_init__(self) -> None:
        self.step = self.plan.first_step - 1
        self._saving = Saving(self.plan, self.config, self.world, self.drafter, self.optimizer, self.clock, self.desk)
        self.first_loss = self.last_loss = 0.0
        self.trained_tokens = 0
        self.not_applied = 0
        self._evidence = Evidence(
            self.plan.run.bad,
            self.plan.config,
            Path(self.plan.documents),
            self.drafter,
            writes_drafter=self.desk is not None,
        )
        self._gamma = self.config.gamma or gamma_for(self.config.block_size)
        self._objective = Objective.of(self.config)
        self._flops = DrafterFlops.of(self.drafter, self.ends.head)
        self.drafter.attention = self.backend.attention
        self._traffic: dict[int, StepTraffic] = {}
        self._began = time.monotonic()
        self._model: torch.nn.Module = self.drafter
        if self.world.drafter_count > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            # Views into the buckets save a second copy of all gradients.
            self._model = DistributedDataParallel(
                self.drafter, device_ids=ids, process_group=self.world.drafters, gradient_as_bucket_view=True
            )

    def steps(self) -> Iterator[int]:
        """Yield the steps of this run."""
        self._began = time.monotonic()
        self.timer.begin()
        if self.desk is not None:
            self.desk.reporter.begin()
        yield from range(self.plan.first_step, self.plan.total_steps + 1)

    @property
    def seconds(self) -> float:
        """Seconds since the first step began."""
        return time.monotonic() - self._began

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, that which was resumed from included."""
        return self._saving.last

    @property
    def is_last(self) -> bool:
        return self.step == self.plan.total_steps

    def begin_step(self, step: int) -> StepSums:
        """Return empty sums; the first drafter's carry whether a stop is wanted. Raises DflashError without a run directory."""
        self.step = step
        self.trace.at(step)
        stop_wanted = self.desk is not None and self._stop_wanted()
        return StepSums(
            self.config.block_size, self.config.micro_batches_per_step, self.device, stop_wanted=stop_wanted
        )

    def _stop_wanted(self) -> bool:
        # A run whose directory is deleted is not seen by `start` any more, and a checkpoint would make the directory anew:
        # a second run could then be let in beside this one.
        if not self.plan.run.run_lock.exists():
            raise DflashError(
                "the run's directory is gone",
                cause=f"{self.plan.run_dir} was deleted while the run trained",
                hint="start again; with --output-dir checkpoints lie elsewhere",
            )
        return self.plan.run.stop.exists()

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Return what this drafter trains in a step, in ascending order."""
        everybody = self.schedule.step(step)
        self._traffic[step] = StepTraffic(
            epoch=everybody[0].epoch,
            tokens=sum(each.row.tokens for each in everybody),
            lr=self.optimizer.learning_rate(step),
            micro_batches=tuple(everybody),
        )
        mine = (self.world.machine, self.index)
        return [each for each in everybody if (each.machine, each.drafter) == mine]

    def receive(self, micro_batch: MicroBatch) -> PackedRow:
        """Take the states of a micro-batch: wait for them, or with shared roles make them."""
        packed = self._take(micro_batch)
        self._evidence.keep(packed.row, micro_batch.target)
        return packed

    def _take(self, micro_batch: MicroBatch) -> PackedRow:
        waits = not isinstance(self.receiver, SharedReceiver)
        with self.clock.stage("wait_states") if waits else contextlib.nullcontext():
            return self.receiver.receive(micro_batch.b)

    def release(self, row: PackedRow) -> None:
        self.clock.add_tokens(row.row.tokens)
        self.receiver.release(row)

    def stand_in(self, step: int) -> None:
        """Take part in a step that has no micro-batch for this drafter: the others' all-reduce needs its backward.

        The last step of a run takes what is left, which may be fewer micro-batches than there are drafters.
        """
        shape = (self.plan.packed_layers, 1, self.plan.hidden_size)
        dtype = torch.float64 if self.config.dtype == "float64" else torch.float32
        states = torch.zeros(shape, dtype=dtype, device=self.device)
        tokens = RowTokens(
            batch=-1,
            step=step,
            epoch=0,
            input_ids=torch.zeros(1, dtype=torch.int32),
            loss_mask=torch.zeros(1, dtype=torch.uint8),
            document_ids=torch.zeros(1, dtype=torch.int64),
            position_ids=torch.zeros(1, dtype=torch.int32),
            tokens=0,
        )
        row = PackedRow(tokens, tuple(states) if self.config.splits_fc else states.reshape(1, -1))
        self.backward(row, last=True)

    def backward(self, packed: PackedRow, *, last: bool) -> ObjectiveSums:
        """Run the drafter forward and backward on a row; gradients of the SUM accumulate. `last`: of this drafter's step."""
        with self.clock.stage("blocks"):
            blocks = self._blocks(packed.row).to(self.device)
        together = isinstance(self._model, DistributedDataParallel) and not last
        no_sync = self._model.no_sync() if together else contextlib.nullcontext()  # pyright: ignore
        with at_shape(_shape(packed, blocks)), flex_failures(), no_sync:
            with self.clock.stage("forward"), self._autocast():
                states, teacher = self._parted(packed.states)
                sums = drafter_forward(
                    self._model,
                    self.ends.embed,
                    self.ends.head,
                    states,
                    blocks,
                    num_target_layer_ids=self.plan.captured_layers,
                    chunk_rows=self.config.objective_rows,
                    vocab_subset=self.ends.subset,
                    noise=Noise(self.config.noise_std, self.config.seed, packed.row.epoch),
                    objective=self._objective,
                    teacher=teacher,
                )
            if isinstance(self._model, DistributedDataParallel) and last:
                when_gradients_are_made(sums.loss_sum, lambda: self.clock.turn_to("all_reduce"))
            with self.clock.stage("backward"):
                sums.loss_sum.backward()
        self.clock.add_flops(self._flops.row(packed.row.tokens, blocks))
        return sums

    def rehearse(self, packed: PackedRow, *, held_out: bool = False, last: bool = False) -> None:
        """Run what a row of this shape runs, for its kernels and its memory. Gradients are left behind.

        `last`: as the last row of a step, whose backward meets the other drafters'.
        """
        if held_out:
            with torch.no_grad():
                self._held_out_sums(packed)
        else:
            self.backward(packed, last=last)

    def _parted(self, states: States) -> tuple[States, torch.Tensor | None]:
        """Return the drafter's states, and what the target's head reads, f[T, H], where the drafter learns from it."""
        if self.ends.norm is None:
            return states, None
        states, last = part_states(states, self.plan.captured_layers)
        return states, self.ends.norm(last)

    def _autocast(self) -> torch.autocast:
        # Masters stay float32; matrix products run in bfloat16. float32 and float64 runs compute as they store.
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    def _blocks(self, row: RowTokens) -> Blocks:
        return build_blocks(
            row.input_ids.numpy(),
            row.loss_mask.numpy(),
            row.document_ids.numpy(),
            row.position_ids.numpy(),
            seed=self.config.seed,
            epoch=row.epoch,
            num_anchors=self.config.num_anchors,
            row_budget=self.config.row_anchors * self.config.block_size,
            block_size=self.config.block_size,
            mask_token_id=self.config.mask_token_id,
            gamma=self._gamma,
            bucket=self.backend.bucket(self.config.row_anchors),
        )

    def apply(self, step: int, sums: StepSums) -> StepOutcome:
        """Sum the figures over the drafters and apply the optimizer step."""
        with self.clock.stage("all_reduce"):
            self.world.sum_over_drafters(sums.values)
        with self.clock.stage("optimizer"):
            return self.optimizer.apply(
                step,
                loss_sum=sums.loss_sum,
                weight_sum=sums.weight_sum,
                drafters=self.world.drafter_count,
                refuse=sums.bad_states,
            )

    def report(self, step: int, sums: StepSums, outcome: StepOutcome) -> bool:
        """Report the figures that are due; True when the drafters have agreed to stop. Raises DflashError on NaN."""
        if self.desk is not None:
            self.desk.reporter.trained(step)
        # On a GPU the sums of the step before are waited for here, and with them whoever is behind.
        with self.world.pulse.inside("figures"), self.world.meeting():
            due = self.figures.push(step, sums, outcome)
        stops = [self._report_one(figures) for figures in due]
        return any(stops)

    def report_rest(self) -> bool:
        """Report the figures that are on their way, waiting for them; returns and raises as `report` does."""
        with self.world.pulse.inside("figures"), self.world.meeting():
            due = self.figures.flush()
        stops = [self._report_one(figures) for figures in due]
        return any(stops)

    def _report_one(self, figures: StepFigures) -> bool:
        traffic = self._traffic.pop(figures.step)
        self.trained_tokens += traffic.tokens
        self.last_loss = figures.loss
        if figures.step == self.plan.first_step:
            self.first_loss = figures.loss
            # In front of the step: with that, whoever waits for a start has what he waits for.
            if self.desk is not None and (message := startup_message(self.plan.run.events, self.world.rank)):
                self.desk.telemetry.emit(message)
        self.not_applied += figures.skipped
        saved = self._settle(figures)
        if self.desk is not None:
            self.desk.reporter.step(figures, traffic, saved)
        if figures.non_finite and self.config.on_nan == "stop":
            raise DflashError(
                f"step {figures.step} is not finite",
                cause=f"{blame(figures, traffic.micro_batches, self.plan.layout())}; the step was not applied to the weights",
                hint="look with `python -m trainer train --only-batch FILE` at what lies in the run's bad/; resume from the "
                "last checkpoint with a lower --lr, or go on regardless with --on-nan continue",
            )
        return figures.stop

    def _settle(self, figures: StepFigures) -> Path | None:
        """Save the batches of a refused step. What cannot be saved is an alarm; the run ends, or goes on, as it would have."""
        saved = None
        try:
            with self.phases.within("saving"):  # with the drafter's weights
                saved = self._evidence.settle(figures)
        except DflashError as failure:
            if self.desk is not None:
                self.desk.reporter.alarm("bad_batch_lost", f"{failure.error}: {failure.cause}", figures.step)
        if figures.non_finite:
            # The launcher ends every rank as soon as one has failed: not before the slowest has written.
            self.world.drafters_barrier()
        return saved

    def profile_if_due(self) -> None:
        """Emit this rank's stage profile and, at the desk, the pipeline's."""
        if self.timer.tick() and self.desk is not None:
            self.desk.profiler.emit(padding=self.padding)

    def checkpoint_due(self, step: int) -> bool:
        return self._saving.due(step)

    def save(self, step: int, held_out: HeldOutFigures | None) -> None:
        """Save a checkpoint, or know of it, unless a stop asked for none. Raises DflashError when it had to be written."""
        with self.phases.within("saving"):
            self._saving.save(step, self.last_loss, held_out)

    def measure(self, step: int) -> HeldOutFigures | None:
        """Measure the drafter on the held-out documents, all drafters together; None where the schedule has none here."""
        micro_batches = self.held_out.micro_batches(step)
        if not micro_batches:
            return None
        began = time.monotonic()
        sums = HeldOutSums(self.config.block_size, self.device)
        mine = (self.world.machine, self.index)
        with self.clock.stage("held_out"), torch.no_grad():
            for micro_batch in micro_batches:
                if (micro_batch.machine, micro_batch.drafter) == mine:
                    packed = self._take(micro_batch)
                    sums.add(self._held_out_sums(packed))
                    self.receiver.release(packed)
            self.world.sum_over_drafters(sums.values)
            figures = sums.figures()
        if self.desk is not None:
            seconds = time.monotonic() - began
            self.desk.reporter.measured(step, figures, seconds)
        return figures

    def _held_out_sums(self, packed: PackedRow) -> ObjectiveSums:
        # Neither noise nor the run's objective nor its teacher: figures of different steps, and of other runs, must compare.
        blocks = self._blocks(packed.row).to(self.device)
        states, _ = self._parted(packed.states)
        with at_shape(_shape(packed, blocks)), flex_failures(), self._autocast():
            return drafter_forward(
                self.drafter,
                self.ends.embed,
                self.ends.head,
                states,
                blocks,
                num_target_layer_ids=self.plan.captured_layers,
                chunk_rows=self.config.objective_rows,
                vocab_subset=self.ends.subset,
            )

    def close(self) -> None:
        """Say goodbye to the targets and wait for the other drafters. A trace that is being taken is written."""
        self.trace.close()
        self.receiver.close()
        self.world.drafters_barrier()


def _shape(packed: PackedRow, blocks: Blocks) -> str:
    return f"{len(packed.row.input_ids)} tokens and {blocks.input_ids.numel()} block rows"
