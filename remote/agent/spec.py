"""The verb spec: what a run was started with, and the checkpoint that going on from it would take."""

from __future__ import annotations

from remote.agent.lifecycle import choose_run, lifecycle_of, readable, run_ids
from remote.agent.startplan import LAST, find_checkpoint
from remote.agent.wire import Answer, Request
from remote.protocol.codec import plain
from remote.protocol.errors import DflashError, ExitCode, preflight_error
from remote.protocol.layout import RootLayout, RunLayout
from remote.protocol.records import RunSpec


def spec(request: Request, answer: Answer) -> None:
    """Answer {"spec", "checkpoint", "step"} of `resume` (RUN, RUN@STEP or `last`), else {"spec", "state"} of `run` ("": live
    or last).

    Raises DflashError: 3 when there is no such run, 7 when it has no such checkpoint or its spec cannot be read.
    """
    root = RootLayout(request.root)
    if resume := request.text("resume", ""):
        found = find_checkpoint(root, resume)
        # `last` goes back to the newest run that has a checkpoint, which the operator may take for the newest one.
        newest = next(iter(run_ids(root)), "") if resume.partition("@")[0] == LAST else ""
        passed_over = newest if newest != found.run.run_id else ""
        answer.result(
            {
                "spec": plain(_spec_of(found.run)),
                "checkpoint": str(found.path),
                "step": found.step,
                "passed_over": passed_over,
            }
        )
        return
    run = choose_run(root, request.text("run", ""))
    if run is None:
        raise DflashError(
            "no run yet",
            cause=f"there is none in {request.root}",
            hint="`dflashctl start` begins one",
            code=ExitCode.NO_RUN,
        )
    answer.result({"spec": plain(_spec_of(run)), "state": str(lifecycle_of(run))})


def _spec_of(run: RunLayout) -> RunSpec:
    spec, problem = readable(RunSpec, run, "spec.json")
    if spec is None:
        raise preflight_error(
            f"run {run.run_id} does not tell its configuration",
            cause=problem or f"{run.spec} is not there",
            hint="`dflashctl stop` ends it; `dflashctl start --config FILE` starts with a configuration that you name",
        )
    return spec
