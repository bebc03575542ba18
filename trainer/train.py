"""The training loop of a drafter. What a step is made of stands here in order; how each part works is in trainer.pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.pipeline.session import DrafterSession


@dataclass(frozen=True)
class TrainResult:
    """How the loop ended."""

    result: str
    step: int
    checkpoint: Path | None


def train(session: DrafterSession) -> TrainResult:
    """Train from the session's first step to its last, or until a stop. Raises DflashError on a non-finite step."""
    stopping = False
    for step in session.steps():
        sums = session.begin_step(step)
        micro_batches = session.micro_batches(step)
        for position, micro_batch in enumerate(micro_batches):
            row = session.receive(micro_batch)
            # Gradients of SUMS add up; only the last backward of the step meets the other drafters'.
            sums.add(session.backward(row, last=position == len(micro_batches) - 1), row)
            session.release(row)
        if not micro_batches:
            session.stand_in(step)
        outcome = session.apply(step, sums)
        # Read one step later on a GPU, so that no step waits for the host; the stop flag travels with the figures.
        stopping = session.report(step, sums, outcome)

        # Once in a while.
        session.profile_if_due()
        if stopping or session.checkpoint_due(step):
            # What is still on its way first: a checkpoint names the loss of its own step, and not after a divergence.
            stopping = session.report_rest() or stopping
            # Whoever stops waits for no measurement, but for the last one of a run that is complete.
            held_out = session.measure(step) if session.is_last or not stopping else None
            session.save(step, held_out)
        if stopping:
            break
    return TrainResult(
        "stopped" if stopping and not session.is_last else "finished", session.step, session.last_checkpoint
    )
