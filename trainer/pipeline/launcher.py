"""torch's launcher below a process that waits for it in front of a person: it reports a rank's end without its own traceback.

What ended a rank stands in the rank's record, which the process in front shows once. A rank that died without one is filed here.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

from remote.protocol.errors import DflashError
from trainer.pipeline.leader import LEADER
from trainer.pipeline.membership import file_error
from trainer.pipeline.plan import PLAN_VARIABLE, RunPlan


def main() -> int:
    """Run torch's launcher with the arguments of this process; returns 1 when a rank failed."""
    # "failed (exitcode: 1) local_rank: 0", "Sending process 4711 closing signal SIGTERM": told better by who waits for us.
    logging.disable(logging.ERROR)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main()
    except ChildFailedError as error:
        file_silent(
            RunPlan.load(Path(os.environ[PLAN_VARIABLE])), {r: each.exitcode for r, each in error.failures.items()}
        )
        return 1
    return 0


def file_silent(plan: RunPlan, codes: dict[int, int]) -> None:
    """File a record for the first rank of `codes` (exit code by rank, negative for a signal) that left none itself."""
    silent = [rank for rank in sorted(codes) if not plan.run.error(rank).exists()]
    if not silent:
        return
    rank, code = silent[0], codes[silent[0]]
    error = DflashError(f"{plan.layout().name(rank, rank)} died without a word", cause=f"it ended with code {code}")
    if code < 0:
        error.cause = f"signal {signal.Signals(-code).name}: killed from outside, or by the kernel for memory"
    file_error(plan.run, error, rank=LEADER, role="leader", device="", phase="", time=time.time())


if __name__ == "__main__":
    sys.exit(main())
