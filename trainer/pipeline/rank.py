"""One rank of a run, started by torch's launcher as `python -m trainer.pipeline.rank`: first the lock, then heavy imports."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

from remote.protocol.errors import DflashError
from trainer.pipeline.layout import Layout
from trainer.pipeline.membership import Filing, join_run
from trainer.pipeline.out_of_memory import Scene, classified
from trainer.pipeline.plan import PLAN_VARIABLE, RunPlan
from trainer.pipeline.pulse import Pulse
from trainer.pipeline.startup import TORCH
from trainer.pipeline.vitals import Board
from trainer.pipeline.watchdog import Stalled, Ward, Watchdog
from trainer.telemetry import EventSender, EventWriter, PhaseLog, Telemetry

# How long a rank that has filed its error may take to end: less than the 30 s within which the others have to follow.
_LAST_SECONDS = 10.0


def main() -> int:
    """Run this rank; returns its exit code. What ends it is filed under errors/rank-N.json and printed."""
    plan = RunPlan.load(Path(os.environ[PLAN_VARIABLE]))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    lock = join_run(plan.run, rank=rank, leader_pid=plan.leader_pid)
    layout = plan.layout()
    role = layout.role(local_rank)
    telemetry = _telemetry(plan, writes=local_rank == layout.first_drafter)
    phases = PhaseLog(telemetry, role=role, rank=rank)
    filing = Filing(plan.run, rank, local_rank, role, layout.device_of(local_rank), phases)
    pulse = Pulse()
    try:
        with _watchdog(plan, layout, pulse, filing, telemetry).watching():
            with phases.phase("loading", TORCH):
                from trainer.pipeline import roles
            roles.run(plan, role, telemetry, phases, pulse)
        # A rank that ended well must not look like the first one that died.
        plan.run.rank_pid(rank).unlink(missing_ok=True)
        return 0
    except BaseException as error:
        failure = classified(error, _scene(layout, filing, pulse), plan.train_config())
        filing.file(failure)
        # Connections of NCCL and the driver's end can hang, and the launcher notices a rank only when it has ended.
        faulthandler.dump_traceback_later(_LAST_SECONDS, exit=True)
        # A rank's failure ends the run; before the end of warm-up the names are still there, and nobody else may come.
        plan.forget_names()
        if plan.attended and plan.run.error(rank).exists():
            # Who waits in front shows the first cause, once: the tracebacks of all ranks would bury it.
            return int(failure.code) if isinstance(failure, DflashError) else 1
        if isinstance(failure, DflashError):
            print(failure.render(), file=sys.stderr, flush=True)
            return int(failure.code)
        raise
    finally:
        telemetry.close()
        os.close(lock)


def _telemetry(plan: RunPlan, *, writes: bool) -> Telemetry:
    if writes:
        return EventWriter(plan.run.events, plan.event_address)
    return EventSender(plan.event_address)


def _scene(layout: Layout, filing: Filing, pulse: Pulse) -> Scene:
    name = f"{filing.role} {layout.index(filing.local_rank)}"
    return Scene(name, filing.role, filing.device, filing.phases.current, filing.phases.detail, pulse.stage)


def _watchdog(plan: RunPlan, layout: Layout, pulse: Pulse, filing: Filing, telemetry: Telemetry) -> Watchdog:
    def file(stalled: Stalled) -> None:
        filing.file(stalled)
        telemetry.emit(filing.alarm(stalled))
        plan.forget_names()

    ward = Ward(
        local_rank=filing.local_rank,
        ranks=layout.ranks,
        name=layout.name(filing.local_rank, filing.rank),
        phases=filing.phases,
        stall_timeout=plan.train_config().stall_timeout,
    )
    return Watchdog(ward, pulse, Board(plan.board, layout.ranks), plan.run.stacks(filing.rank), file)


if __name__ == "__main__":
    sys.exit(main())
