"""One rank of a run, started by torch's launcher as `python -m trainer.pipeline.rank`: first the lock, then heavy imports."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from remote.protocol.errors import DflashError
from trainer.pipeline.membership import file_error, join_run
from trainer.pipeline.plan import PLAN_VARIABLE, RunPlan
from trainer.telemetry import EventSender, EventWriter, PhaseLog, Telemetry


def main() -> int:
    """Run this rank; returns its exit code. What ends it is filed under errors/rank-N.json and printed."""
    plan = RunPlan.load(Path(os.environ[PLAN_VARIABLE]))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    lock = join_run(plan.run, rank=rank, leader_pid=plan.leader_pid)
    layout = plan.layout()
    role, device = layout.role(local_rank), layout.device_of(local_rank)
    telemetry = _telemetry(plan, writes=local_rank == layout.first_drafter)
    phases = PhaseLog(telemetry, role=role, rank=rank)
    try:
        with phases.phase("loading", "torch"):
            from trainer.pipeline import roles
        roles.run(plan, role, telemetry, phases)
        # A rank that ended well must not look like the first one that died.
        plan.run.rank_pid(rank).unlink(missing_ok=True)
        return 0
    except BaseException as error:
        file_error(plan.run, error, rank=rank, role=role, device=device, phase=phases.current, time=time.time())
        # A rank's failure ends the run; before the end of warm-up the names are still there, and nobody else may come.
        plan.forget_names()
        if isinstance(error, DflashError):
            print(error.render(), file=sys.stderr, flush=True)
            return int(error.code)
        raise
    finally:
        telemetry.close()
        os.close(lock)


def _telemetry(plan: RunPlan, *, writes: bool) -> Telemetry:
    if writes:
        return EventWriter(plan.run.events, plan.event_address)
    return EventSender(plan.event_address)


if __name__ == "__main__":
    sys.exit(main())
