"""The verb start: at most one run per device, launched detached, followed to its first trained step."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Generator, Iterator, Sequence

from remote.agent.firststep import follow_to_first_step
from remote.agent.gpus import require_free, wait_free
from remote.agent.launch import launch_supervisor
from remote.agent.lifecycle import lives, readable, run_ids
from remote.agent.readiness import require_ready
from remote.agent.roots import create_root
from remote.agent.startplan import StartPlan, read_plan
from remote.agent.wire import Answer, Request
from remote.protocol.errors import DflashError, ExitCode, preflight_error
from remote.protocol.files import write_json
from remote.protocol.identity import read_pidfile
from remote.protocol.layout import RootLayout, RunLayout
from remote.protocol.locks import LockBusy, LockKind, acquire, acquire_within, holder_name, name_holder
from remote.protocol.records import RunSpec

LOCK_SECONDS = 10.0
"""How long a start waits for another one; the lock covers a check and a launch, well under a second."""


def start(request: Request, answer: Answer) -> None:
    """Launch a run, or find the one this request already launched, and follow it to its first step.

    The client draws the run id and repeats it when the connection drops, so a retry is a query, never a second run.
    """
    root = RootLayout(request.root)
    create_root(root)
    plan = read_plan(request, root)
    # The first answer may have been lost after the launch: then only the following is left to do.
    if not launched(plan.run):
        with unless_launched(plan.run):
            _begin(root, plan, answer)
    follow(plan, answer)


def _begin(root: RootLayout, plan: StartPlan, answer: Answer) -> None:
    plan = plan.from_checkpoint(root)
    # Cheap answer first; the same check decides again under the lock.
    refuse_if_busy(root, plan.spec.devices)
    # Before a night of waiting for GPUs, and outside the lock: importing torch takes longer than others should wait.
    require_ready(root, plan, answer)
    launch(root, plan, answer)


@contextlib.contextmanager
def unless_launched(run: RunLayout) -> Generator[None]:
    """Let no error out once the run was launched: by a call with the same run id, given up as lost by its client.

    What stood in the way of this call, GPUs that are held or shared memory that is full, is then that very run.
    """
    try:
        yield
    except DflashError:
        if not launched(run):
            raise


def follow(plan: StartPlan, answer: Answer) -> None:
    """Say that there is a run, and answer at its first step."""
    # From here on there is a run: the client tells its id, and remembers what it was started with.
    answer.phase("launched", plan.run.run_id)
    follow_to_first_step(plan.run, answer, plan.limit)


def launch(root: RootLayout, plan: StartPlan, answer: Answer) -> None:
    """Launch the run unless somebody did; with `wait_gpus` when its GPUs are free. Raises DflashError: 4 or 7."""
    if plan.wait_gpus:
        wait_free(plan.spec.devices, answer.say, answer.check)
    with _start_lock(root, plan.spec):
        # A retry may have overtaken us while we waited for the lock.
        if not launched(plan.run):
            _launch(root, plan)


def launched(run: RunLayout) -> bool:
    """Whether a supervisor ever lived for this run. A directory without one is what a killed start left."""
    return read_pidfile(run.supervisor_pid) is not None


def refuse_if_busy(root: RootLayout, devices: Sequence[str]) -> None:
    """Raise DflashError (4) when anything of a run lives that uses one of the devices."""
    for run in living_on(root, devices):
        raise _busy(run)


def living_on(root: RootLayout, devices: Sequence[str]) -> Iterator[RunLayout]:
    """Yield the living runs that use one of the devices, newest first."""
    for name in run_ids(root):
        run = root.run(name)
        if not lives(run):
            continue
        spec, _ = readable(RunSpec, run, "spec.json")
        # A living run whose spec cannot be read might use any device.
        if spec is None or set(spec.devices) & set(devices):
            yield run


def _busy(run: RunLayout) -> DflashError:
    """Return the error (4) for a run that lives where another one is wanted."""
    spec, _ = readable(RunSpec, run, "spec.json")
    cause = f"run {run.run_id} has no readable spec and its processes live"
    if spec is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(spec.created))
        what = "cpu" if spec.devices == ("cpu",) else f"GPU {', '.join(spec.devices)}"
        cause = f"run {run.run_id} uses {what} since {since}, started by {spec.by or 'unknown'}"
    return DflashError(
        "a run is already there",
        cause=cause,
        hint=f"`dflashctl restart` takes its place, `dflashctl stop` ends it, `dflashctl logs --run {run.run_id}` shows it",
        code=ExitCode.ALREADY_RUNNING,
    )


@contextlib.contextmanager
def _start_lock(root: RootLayout, spec: RunSpec) -> Generator[None]:
    try:
        descriptor = acquire_within(root.start_lock, LockKind.EXCLUSIVE, LOCK_SECONDS)
    except LockBusy:
        raise DflashError(
            "another start is under way",
            cause=f"{root.start_lock} is held for more than {LOCK_SECONDS:.0f} s by {holder_name(root.start_lock)}",
            hint="try again when it has ended",
            code=ExitCode.ALREADY_RUNNING,
        ) from None
    try:
        since = time.strftime("%H:%M:%S UTC", time.gmtime())
        # The name is for a message: a disk too full for it must not be what a start fails of.
        with contextlib.suppress(OSError):
            name_holder(descriptor, f"start of run {spec.run_id} by {spec.by or 'unknown'}, pid {os.getpid()}, {since}")
        yield
    finally:
        os.close(descriptor)


def _launch(root: RootLayout, plan: StartPlan) -> None:
    """Write the run's directory and launch its supervisor; the caller holds start.lock."""
    _discard_unlaunched(root)
    # Again, now that nobody else can be launching.
    refuse_if_busy(root, plan.spec.devices)
    spec = dataclasses.replace(plan.spec, gpu_memory=require_free(plan.spec.devices))
    run = plan.run
    try:
        run.create()
        # The lock before the records: whoever finds the directory finds a run that is starting.
        sup_lock = acquire(run.sup_lock, LockKind.EXCLUSIVE)
        with contextlib.ExitStack() as unless_launched:
            unless_launched.callback(os.close, sup_lock)
            write_json(run.config, spec.config)
            write_json(run.spec, spec)
            unless_launched.pop_all()
        launch_supervisor(run, plan.release, sup_lock)
    except OSError as error:
        # Nothing was launched, so nothing of it may stay: a retry starts from nothing.
        shutil.rmtree(run.path, ignore_errors=True)
        raise preflight_error(
            f"cannot write {run.path}", cause=f"{error.strerror}", hint="free some space, or choose another --root"
        ) from error
    except DflashError:
        shutil.rmtree(run.path, ignore_errors=True)
        raise


def _discard_unlaunched(root: RootLayout) -> None:
    """Remove what starts that were killed before their launch left; start.lock says that nobody is launching now."""
    for name in run_ids(root):
        run = root.run(name)
        if not launched(run) and not lives(run) and not run.events.exists() and not run.exit.exists():
            shutil.rmtree(run.path, ignore_errors=True)
