"""The verb restart: judge the new run, end the old one, launch, in one call, so that no lost client leaves half of it."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path

from remote.agent.gpus import require_free, wait_free
from remote.agent.lifecycle import choose_run, lives, readable, status_of
from remote.agent.processes import recorded
from remote.agent.readiness import require_ready
from remote.agent.roots import create_root
from remote.agent.start import follow, launch, launched, living_on, unless_launched
from remote.agent.startplan import StartPlan, read_plan
from remote.agent.stop import StopOrder, end_run
from remote.agent.wire import Answer, Request
from remote.protocol.errors import DflashError, ExitCode
from remote.protocol.layout import RootLayout, RunLayout
from remote.protocol.records import RunSpec, RunStatus

# `start-end rw-s offset device inode /dev/shm/name (deleted)`: the ring has no name any more, its pages still count.
_MAPPED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ ([0-9]+) +/dev/shm/.* \(deleted\)")


def restart(request: Request, answer: Answer) -> None:
    """Put a new run in the place of the one that lives, and follow it to its first step.

    `run` is the run whose configuration the spec began with. What can be judged is judged while the old run still trains;
    from the request to stop on, nothing but an error ends this short of the launch. The run id tells a retry: then this
    is a query. Raises DflashError: 2, 4 and 7 with the old run untouched, 9 when it does not end.
    """
    root = RootLayout(request.root)
    create_root(root)
    plan = read_plan(request, root)
    if not launched(plan.run):
        with unless_launched(plan.run):
            _replace(root, plan, request, answer)
        # There is a run: from here on this is a start like any other, which nobody has to see to its first step.
        answer.outlive_client(False)
    follow(plan, answer)


def _replace(root: RootLayout, plan: StartPlan, request: Request, answer: Answer) -> None:
    order = StopOrder.of(request)
    old = _to_end(root, plan, request.text("run", ""))
    _require_launchable(root, plan, old, order, answer)
    if old is not None:
        answer.survive()
        plan = _after(plan, _end(old, order, answer), answer)
    launch(root, plan.from_checkpoint(root), answer)


def _to_end(root: RootLayout, plan: StartPlan, base: str) -> RunLayout | None:
    """Return the living run that makes room: the one restarted, or one on the devices needed; None when none lives.

    Raises DflashError (4) when it would take more than one.
    """
    asked = choose_run(root, base) if base else None
    found = [run for run in living_on(root, plan.spec.devices) if asked is None or run.run_id != asked.run_id]
    if asked is not None and lives(asked):
        found.insert(0, asked)
    # Never the new run: a call that was given up as lost may have launched it a moment ago.
    found = [run for run in found if run.run_id != plan.run.run_id]
    if len(found) > 1:
        raise DflashError(
            "more than one run would have to end",
            cause=f"these live, restarted or on devices of the new run: {', '.join(run.run_id for run in found)}",
            hint="`dflashctl stop --run ID` ends the one that is in the way",
            code=ExitCode.ALREADY_RUNNING,
        )
    return found[0] if found else None


def _require_launchable(
    root: RootLayout, plan: StartPlan, old: RunLayout | None, order: StopOrder, answer: Answer
) -> None:
    """Raise DflashError (2, 3 or 7) for what would keep the new run from starting once the old one is gone."""
    if old is None:
        require_ready(root, plan.from_checkpoint(root), answer)
        return
    plan, flags = _rehearsed(root, plan, old, order)
    # What the old run holds comes back with its end; what others hold does not.
    if ring := ring_bytes(old):
        flags += ["--freed-shm", str(ring)]
    require_ready(root, plan, answer, flags, check_release=True)
    spec, _ = readable(RunSpec, old, "spec.json")
    others = [device for device in plan.spec.devices if spec is None or device not in spec.devices]
    if plan.wait_gpus:
        wait_free(others, answer.say, answer.check)
    else:
        require_free(others)


def _rehearsed(root: RootLayout, plan: StartPlan, old: RunLayout, order: StopOrder) -> tuple[StartPlan, list[str]]:
    """Return the plan as far as it can be judged before the stop, and the flags that make the trainer's preflight judge it.

    The checkpoint to go on from is written by the stop; one that is there already shows whether the new run could.
    """
    try:
        return plan.from_checkpoint(root), []
    except DflashError as error:
        # A run that has not saved yet writes its first checkpoint when it is stopped.
        if order.now or plan.resume != old.run_id or error.code is not ExitCode.PREFLIGHT:
            raise
        decided = old.path / "plan.json"
        return dataclasses.replace(plan, resume=""), ["--continues", str(decided)] if decided.exists() else []


def _end(old: RunLayout, order: StopOrder, answer: Answer) -> RunStatus:
    """Stop the old run and return its status. Raises DflashError (9) when it lives on, or its GPU memory does."""
    answer.phase("stopping", old.run_id)
    began = time.monotonic()
    try:
        status, sentence = end_run(old, order, answer)
        answer.say(sentence)
    except DflashError as error:
        # It failed while it was stopped: nothing of it lives, so nothing is won by ending here, with no run at all.
        if error.code is not ExitCode.FAILED:
            raise
        status = status_of(old)
        answer.say(f"{error.error}: {error.cause}; {error.hint}", "warning")
    answer.phase("stopped", old.run_id, time.monotonic() - began)
    return status


def _after(plan: StartPlan, ended: RunStatus, answer: Answer) -> StartPlan:
    """Return the plan for what the stop left: of a run that trained no step there is nothing to go on from."""
    if plan.resume == ended.run_id and not ended.last_checkpoint and not ended.step:
        answer.say(f"run {ended.run_id} had trained no step: the new one starts fresh")
        return dataclasses.replace(plan, resume="")
    return plan


def ring_bytes(run: RunLayout) -> int:
    """Return the bytes of /dev/shm that a living run gives back at its end: what its ranks map and no name holds."""
    sizes: dict[str, int] = {}
    for process in recorded(run).values():
        try:
            text = Path("/proc", str(process.pid), "maps").read_text(encoding="utf-8", errors="replace")
        except OSError:  # ended meanwhile
            continue
        for start, end, inode in _MAPPED.findall(text):
            sizes[inode] = max(sizes.get(inode, 0), int(end, 16) - int(start, 16))
    return sum(sizes.values())
