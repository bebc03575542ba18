"""The verb doctor: what this far end lacks for the run that a start would launch now, one finding at a time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote.agent.datafinding import Verdict, data_finding, other_findings, space_finding
from remote.agent.environment import trainer_environment
from remote.agent.finding import FAILED, WARNING, Finding, failure
from remote.agent.gpufinding import gpu_finding
from remote.agent.gpus import list_gpus
from remote.agent.interpreters import packages_of
from remote.agent.memory import memory, memory_finding
from remote.agent.modelfinding import model_finding
from remote.agent.preflight import SKIP_DEVICES, preflight
from remote.agent.pythonfinding import python_finding
from remote.agent.roots import interpreter, require_release
from remote.agent.wire import Answer, Request
from remote.protocol.codec import from_plain, plain
from remote.protocol.errors import DflashError, usage_error
from remote.protocol.layout import RootLayout

_PATIENCE = 3.0
"""Seconds after which a wait is explained; the demo's data set takes one."""


@dataclass(frozen=True)
class Wanted:
    """What of a training configuration doctor looks at; all empty where there is no configuration."""

    target_model: str = ""
    data_dir: str = ""
    output_dir: str = ""
    device: str = ""
    target_gpus: tuple[int, ...] = ()
    drafter_gpus: tuple[int, ...] = ()
    ring_mib: int = 0
    keep_checkpoints: int = 0

    @property
    def devices(self) -> list[str]:
        """The CUDA indices that the run would use."""
        return [str(each) for each in sorted({*self.target_gpus, *self.drafter_gpus})] if self.device == "cuda" else []

    @property
    def ring_bytes(self) -> int:
        """The bound on the ring; none where both roles share their devices."""
        return 0 if self.target_gpus == self.drafter_gpus else self.ring_mib << 20


def doctor(request: Request, answer: Answer) -> None:
    """Send one event {"finding": Finding} a line and answer {"findings": how many}.

    Request: python, release ("" for the current one), config (the trainer's, {} where there is none).
    """
    config = request.object("config")
    python, release = request.text("python", ""), request.text("release", "")
    examination = Examination(RootLayout(request.root), config, _wanted(config), python, release, answer)
    count = 0
    for finding in examination:
        # Each at once: reading a large data set takes minutes, and must not hold back what is known.
        answer.note({"finding": plain(finding)})
        count += 1
    answer.result({"findings": count})


def _wanted(config: dict[str, Any]) -> Wanted:
    try:
        wanted = from_plain(Wanted, config)
        for path in (wanted.target_model, wanted.data_dir, wanted.output_dir):
            if b"\0" in os.fsencode(path):
                raise ValueError(f"{path!r} holds NUL")
    except ValueError as error:
        raise usage_error("the configuration is not usable", cause=str(error)) from error
    return wanted


@dataclass(frozen=True)
class Examination:
    """One round of doctor; iterating yields the findings in the order in which a person would ask."""

    root: RootLayout
    config: dict[str, Any]
    wanted: Wanted
    python: str
    release: str
    answer: Answer

    def __iter__(self) -> Iterator[Finding]:
        python = _looked("python", self._look_at_python)
        yield python
        gpus = _looked("GPUs", lambda: gpu_finding(self.wanted.device, self.wanted.devices))
        yield gpus
        if self.config:
            yield from self._look_at_files(python, gpus)
            return
        text, hint = "not looked at: there is no configuration", "name one with --config FILE"
        yield Finding("model", WARNING, text, hint)
        yield memory_finding(0)
        yield Finding("data", WARNING, text, hint)
        yield _looked("space", lambda: space_finding(self.root.path, "", 0, 0, Verdict()))

    def _look_at_python(self) -> Finding:
        return python_finding(packages_of(interpreter(self.python)), self.wanted.device)

    def _look_at_files(self, python: Finding, gpus: Finding) -> Iterator[Finding]:
        wanted = self.wanted
        model = _looked("model", lambda: model_finding(wanted.target_model, *self._room()))
        yield model
        yield memory_finding(wanted.ring_bytes)
        # The slow part: it reads all data. Space comes behind it, for it knows what a checkpoint takes.
        verdict = self._ask_trainer(python, gpus)
        # What the model's line has said need not be said again; what that look cannot see has to be.
        yield from other_findings(verdict, [wanted.data_dir, *([wanted.target_model] if model.state == FAILED else [])])
        yield _looked("data", lambda: data_finding(wanted.data_dir, verdict))
        space = (wanted.output_dir, wanted.ring_bytes, wanted.keep_checkpoints, verdict)
        yield _looked("space", lambda: space_finding(self.root.path, *space))

    def _room(self) -> tuple[int, str]:
        """Return the bytes that the target's weights have to fit in, and whose they are; 0 where nobody knows."""
        if self.wanted.device != "cuda":
            return memory().free, "this machine's memory"
        try:
            gpus = {gpu.index: gpu for gpu in list_gpus()}
        except DflashError:  # the line about GPUs has said it
            return 0, ""
        chosen = [gpus[str(index)] for index in self.wanted.target_gpus if str(index) in gpus]
        smallest = min(chosen, key=lambda gpu: gpu.total, default=None)
        return (0, "") if smallest is None else (smallest.total << 20, f"GPU {smallest.index}")

    def _ask_trainer(self, python: Finding, gpus: Finding) -> Verdict:
        try:
            release = require_release(self.root, self.release)
        except DflashError as error:
            return Verdict(not_read=error.error, hint=error.hint)
        if not (self.wanted.target_model and self.wanted.data_dir):
            return Verdict(not_read="target_model and data_dir have to be set first", hint="name a --config FILE")
        if python.state == FAILED:
            return Verdict(not_read="the trainer needs its packages first", hint="mend the line python first")
        # Unless nvidia-smi has said it: then the trainer, which asks CUDA's driver, would say it in other words.
        flags = [SKIP_DEVICES] if gpus.state == FAILED else []
        try:
            path = interpreter(self.python)
            environment = trainer_environment(path, self.root.path, release)
            found = preflight(path, environment, self.config, self.answer, flags, self._word_of_patience())
            return Verdict(found=found)
        except DflashError as error:
            return Verdict.of(error)

    def _word_of_patience(self) -> Callable[[], None]:
        """Return a function that says once, when it took long, what the client waits for."""
        due = time.monotonic() + _PATIENCE

        def look() -> None:
            nonlocal due
            if time.monotonic() > due:
                due = math.inf
                self.answer.say("the trainer reads the whole data set; Ctrl-C ends the wait")

        return look


def _looked(name: str, look: Callable[[], Finding]) -> Finding:
    """Return what `look` finds; what keeps it from looking is a finding as well."""
    try:
        return look()
    except DflashError as error:
        return failure(name, error)
    except OSError as error:
        where = Path(str(error.filename)).name if error.filename else "it"
        return Finding(name, FAILED, f"{where} cannot be looked at: {error.strerror}", "check its permissions and path")
