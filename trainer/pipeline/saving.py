"""When a run writes a checkpoint, who writes it, and what happens when it cannot be written."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from remote.protocol import events as ev
from remote.protocol.errors import DflashError
from remote.protocol.records import StopRequest, read_record
from trainer import checkpoint, checkpoint_files
from trainer.checkpoint_files import TrainerState
from trainer.config import TrainConfig
from trainer.drafter.model import Drafter
from trainer.optimizer import StepOptimizer
from trainer.pipeline.held_out import HeldOutFigures, checkpoint_due
from trainer.pipeline.plan import RunPlan
from trainer.pipeline.reporting import Desk
from trainer.pipeline.world import World
from trainer.telemetry import StageClock


@dataclass
class Saving:
    """The checkpoints of one drafter rank. Only the rank with a desk on machine 0 writes; the others count along."""

    plan: RunPlan
    config: TrainConfig
    world: World
    drafter: Drafter
    optimizer: StepOptimizer
    clock: StageClock
    desk: Desk | None

    def __post_init__(self) -> None:
        self.last: Path | None = Path(self.plan.resume) if self.plan.resume else None
        self.best_loss: float | None = None
        self.best: Path | None = None
        if self.last is not None and self.desk is not None and self.world.machine == 0:
            self._take_over_best(self.last)

    def _take_over_best(self, resumed: Path) -> None:
        """Let this run's `best` begin where that of the resumed one stands. Raises DflashError when it cannot be linked."""
        found = checkpoint_files.best_before(resumed)
        if found is None:
            return
        output_dir = Path(self.plan.output_dir)
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            checkpoint_files.mark_best(output_dir, found[0])
        except OSError as error:
            raise DflashError(
                "the best checkpoint cannot be linked",
                cause=str(error),
                hint=f"{output_dir / checkpoint_files.BEST} must be a link or absent",
            ) from error
        self.best, self.best_loss = found

    def due(self, step: int) -> bool:
        """Whether a step ends with a checkpoint."""
        return checkpoint_due(self.config, step, self.plan.total_steps)

    def save(self, step: int, loss: float, held_out: HeldOutFigures | None = None) -> None:
        """Save a checkpoint from the first drafter; the others wait for it in the next collective.

        That of the lowest held-out loss becomes the best.

        Not when a stop asked for none, unless the run is complete anyway. Raises DflashError when the last one, or a
        stop's, cannot be written.
        """
        request = stop_request(self.plan)
        if request is not None and not request.checkpoint and step < self.plan.total_steps:
            return
        if self.desk is None or self.world.machine != 0:
            self.last = checkpoint_files.step_directory(Path(self.plan.output_dir), step)
            return
        try:
            with self.clock.stage("checkpoint"), self.desk.reporter.apart():
                saved = self._write(step, loss, held_out, self.desk)
        except DflashError as failure:
            if request is not None or step == self.plan.total_steps:
                raise
            # A run that trains well goes on: the checkpoint before stands, and the next one may find room.
            self.desk.reporter.alarm("checkpoint_failed", f"{failure.error}: {failure.cause}", step)
            return
        self.last = saved.path
        self.desk.telemetry.emit(
            ev.CheckpointSaved(
                time=time.time(),
                rank=self.world.rank,
                step=step,
                path=str(saved.path),
                bytes=saved.bytes,
                seconds=saved.seconds,
                best=saved.path == self.best,
            )
        )

    def _write(self, step: int, loss: float, held_out: HeldOutFigures | None, desk: Desk) -> checkpoint.Saved:
        def progress(written: int, total: int) -> None:
            desk.telemetry.emit(
                ev.SaveProgress(time=time.time(), rank=self.world.rank, step=step, written=written, total=total)
            )

        measured = held_out.loss if held_out is not None and math.isfinite(held_out.loss) else None
        is_best = measured is not None and (self.best_loss is None or measured < self.best_loss)
        state = TrainerState(
            step=step,
            total_steps=self.plan.total_steps,
            data_fingerprint=self.plan.data_fingerprint,
            config=self.plan.config,
            run_id=self.plan.run_id,
            loss=loss,
            target_fingerprint=self.plan.target_fingerprint,
            held_out_fingerprint=self.plan.held_out_fingerprint,
            held_out_loss=measured,
            target_architecture=self.plan.target_architecture,
            best_held_out_loss=measured if is_best else self.best_loss,
        )
        output_dir = Path(self.plan.output_dir)
        saved = checkpoint.save(
            output_dir, state, self.drafter, self.optimizer, dtype=self.config.dtype, progress=progress
        )
        # The checkpoint is whole: what cannot be done beside it is told, and neither undoes it nor ends the run.
        if is_best:
            try:
                checkpoint_files.mark_best(output_dir, saved.path)
                self.best_loss, self.best = measured, saved.path
            except OSError as error:
                desk.reporter.alarm("best_not_linked", f"the best checkpoint cannot be linked: {error}", step)
        try:
            checkpoint_files.rotate(output_dir, self.config.keep_checkpoints)
        except OSError as error:
            desk.reporter.alarm("old_checkpoints_kept", f"old checkpoints cannot be removed: {error}", step)
        return saved


def stop_request(plan: RunPlan) -> StopRequest | None:
    """Return the run's stop request, None when nobody asked. A request that cannot be read asks for an ordinary stop."""
    try:
        return read_record(StopRequest, plan.run.stop)
    except ValueError:
        return StopRequest(deadline=0.0, by="unreadable stop.json")
