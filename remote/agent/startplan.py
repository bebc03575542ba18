"""What a start request asks for, made complete: release, interpreter, argv, environment, checkpoint to go on from."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote.agent.environment import run_environment, trainer_environment
from remote.agent.interpreters import Interpreter, packages_of
from remote.agent.lifecycle import checkpoint_step, choose_run, no_such_run, run_ids, status_of
from remote.agent.roots import interpreter, require_release
from remote.agent.wire import Request
from remote.protocol.codec import from_plain
from remote.protocol.errors import preflight_error, usage_error
from remote.protocol.layout import RootLayout, RunLayout, is_run_id
from remote.protocol.records import RunSpec, read_record

LAST = "last"
"""`resume` value for the newest run that has a checkpoint."""


@dataclass(frozen=True)
class StartPlan:
    """Everything `start` needs, decided before anything is written.

    `resume` is what the request asks for, still to be looked up; `interpreter` is None for a stand-in's own argv;
    `instead_of` is the release that the client took for the current one, "" where it was right.
    """

    spec: RunSpec
    run: RunLayout
    release: Path
    python: str
    interpreter: Interpreter | None
    resume: str
    preflight: bool
    wait_gpus: bool
    limit: float
    instead_of: str = ""

    def preflight_environment(self, root: Path) -> dict[str, str]:
        return trainer_environment(self.python, root, self.release) | dict(self.spec.environment)

    def from_checkpoint(self, root: RootLayout) -> StartPlan:
        """Return the plan with the checkpoint that `resume` means now; itself for a fresh start.

        Raises what `find_checkpoint` does.
        """
        if not self.resume:
            return self
        path = str(find_checkpoint(root, self.resume).path)
        spec = dataclasses.replace(self.spec, config=self.spec.config | {"resume": path}, resumed_from=path)
        return dataclasses.replace(self, spec=spec, resume="")


def read_plan(request: Request, root: RootLayout) -> StartPlan:
    """Complete the request's spec. Raises usage or preflight errors for what does not hold."""
    spec = _spec(request.object("spec"))
    # Checked to be a run id, so it cannot leave ROOT.
    run = root.run(spec.run_id)
    # What is current here, not what this client deployed last: a rollback typed at another one is meant for everybody.
    release = require_release(root, "" if request.flag("current", False) else spec.release)
    instead_of = spec.release if spec.release not in ("", release.name) else ""
    python = interpreter(request.text("python", ""))
    argv = tuple(request.words("argv"))
    if any("\0" in word for word in argv):
        raise usage_error("argv cannot be executed", cause="a word holds NUL")
    # A stand-in has no packages to record, and asking costs 0.1 s.
    asked = None if argv else packages_of(python)
    spec = dataclasses.replace(
        spec,
        argv=argv or (python, "-u", "-m", "trainer", "train", "--config-json", str(run.config)),
        environment=run_environment(python, root.path, release, run.path, spec.environment),
        release=release.name,
        # The client knows the tree of its own release only.
        source={} if instead_of else spec.source,
        created=time.time(),
        packages=spec.packages if asked is None else asked.versions,
        resumed_from=str(spec.config.get("resume", "")),
    )
    return StartPlan(
        spec=spec,
        run=run,
        release=release,
        python=python,
        interpreter=asked,
        resume=request.text("resume", ""),
        preflight=request.flag("preflight", True),
        wait_gpus=request.flag("wait_gpus", False),
        limit=request.number("limit", 300.0),
        instead_of=instead_of,
    )


def _spec(data: dict[str, Any]) -> RunSpec:
    try:
        spec = from_plain(RunSpec, {"argv": [], "environment": {}, "devices": [], **data})
    except ValueError as error:
        raise usage_error("the run's spec is not usable", cause=str(error)) from error
    if not is_run_id(spec.run_id):
        raise usage_error(f"not a run id: {spec.run_id!r}", hint="the client draws it: date, time, six hex digits")
    if any(not key or "=" in key or "\0" in key + text for key, text in spec.environment.items()):
        raise usage_error("an environment variable of the spec cannot be set", cause="a bad name, or NUL in a value")
    return spec


@dataclass(frozen=True)
class Found:
    """A complete checkpoint: the run that wrote it, the last step it contains, its directory."""

    run: RunLayout
    step: int
    path: Path


def find_checkpoint(root: RootLayout, resume: str) -> Found:
    """Return the checkpoint that RUN, RUN@STEP or `last` means.

    Raises DflashError: 3 when there is no such run, 7 when it has no such checkpoint.
    """
    name, _, step = resume.partition("@")
    if name == LAST:
        # Not simply the newest run: that may be one that crashed while loading.
        name = next((each for each in run_ids(root) if _checkpoints(root.run(each))), "")
        if not name:
            raise no_such_run(f"no run in {root.runs} has a checkpoint")
    run = choose_run(root, name)
    found = {} if run is None else _checkpoints(run)
    if run is None or not found:
        raise preflight_error(
            f"run {name} has no checkpoint", cause="none was complete when it ended", hint="start without --resume"
        )
    if step and (not step.isdigit() or int(step) not in found):
        have = ", ".join(str(each) for each in sorted(found))
        raise preflight_error(f"run {name} has no checkpoint of step {step}", cause=f"it has {have}")
    chosen = int(step) if step else max(found)
    return Found(run, chosen, found[chosen])


def _checkpoints(run: RunLayout) -> dict[int, Path]:
    """Return the complete checkpoints of a run by step: directories that end in the step, as they are renamed into place."""
    try:
        spec = read_record(RunSpec, run.spec)
        last = status_of(run).last_checkpoint
        output_dir = spec.config.get("output_dir") if spec is not None else ""
        # The trainer makes a directory of the run's own under output_dir.
        place = Path(output_dir) / run.run_id if output_dir else run.checkpoints
        place = Path(last).parent if last else place
        folders = [path for path in place.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except (OSError, ValueError):
        return {}
    return {step: path for path in folders if (step := checkpoint_step(path)) is not None}
