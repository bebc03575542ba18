"""What the agent's verbs answer, typed: a far end of another version, or a broken one, is found here and nowhere later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from dflashctl.errors import NoAnswer
from dflashctl.transport import Finding
from remote.protocol.codec import from_plain
from remote.protocol.errors import ExitCode
from remote.protocol.records import ExitRecord, Lifecycle, RunSpec, RunStatus

R = TypeVar("R")


@dataclass(frozen=True)
class Deployed:
    """`deploy`: `changed` tells whether `current` was switched, `sent` whether anything had to travel."""

    release: str
    root: str
    changed: bool
    sent: bool
    previous: str = ""
    selfcheck: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Started:
    """`start`: the run at its first step, or at its end."""

    status: RunStatus


@dataclass(frozen=True)
class Begun:
    """`spec` of a run: what it was started with, and its state."""

    spec: RunSpec
    state: str = ""

    @property
    def alive(self) -> bool:
        """Whether it lives; a state of a newer far end counts as one that does."""
        return self.state not in list(Lifecycle) or Lifecycle(self.state).alive


@dataclass(frozen=True)
class Resumed:
    """`spec` of a checkpoint: the spec of the run that wrote it, its directory, the last step it contains.

    `passed_over` is the newest run where that is another one, which has no checkpoint.
    """

    spec: RunSpec
    checkpoint: str = ""
    step: int = 0
    passed_over: str = ""

    @property
    def name(self) -> str:
        """RUN@STEP: this very checkpoint, whatever is saved meanwhile."""
        return f"{self.spec.run_id}@{self.step}"


@dataclass(frozen=True)
class Stopped:
    """`stop`: how the run ended, and the sentence that says so."""

    status: RunStatus
    message: str
    gpus_free: int = 0


@dataclass(frozen=True)
class Runs:
    """`runs`: newest first."""

    runs: tuple[RunStatus, ...]


@dataclass(frozen=True)
class ReleaseEntry:
    """One release; `deployed` in unix seconds."""

    release: str
    deployed: float = 0.0
    current: bool = False


@dataclass(frozen=True)
class Releases:
    """`releases`: newest first; `current` is "" before the first deploy."""

    current: str
    releases: tuple[ReleaseEntry, ...]


@dataclass(frozen=True)
class RolledBack:
    """`rollback`: what is current now, and what was."""

    release: str
    previous: str = ""


@dataclass(frozen=True)
class Position:
    """Where a log is read: bytes from `offset` of the file (device, inode) follow. `notice` says why it changed."""

    device: int
    inode: int
    offset: int
    run: str = ""
    notice: str = ""

    def after(self, count: int) -> Position:
        """Return the position `count` bytes on."""
        return Position(self.device, self.inode, self.offset + count, self.run)


@dataclass(frozen=True)
class LogEnd:
    """`logs`: the run's state when the log was read to its end, and its exit record once it has one."""

    state: str
    run: str = ""
    exit: ExitRecord | None = None


@dataclass(frozen=True)
class AgentFinding:
    """One line of `doctor` as the agent sends it."""

    name: str
    state: str
    text: str
    hint: str = ""
    code: int = int(ExitCode.PREFLIGHT)

    @property
    def finding(self) -> Finding:
        """The same as the hops' findings are; a state or code of a newer agent is one that people look at."""
        state = "ok" if self.state == "ok" else "failed" if self.state == "failed" else "warning"
        known = self.code in {int(code) for code in ExitCode}
        return Finding(self.name, state, self.text, self.hint, ExitCode(self.code) if known else ExitCode.FAILED)


def parse(cls: type[R], data: Any) -> R:
    """Return `data` as a `cls`. Raises NoAnswer when it is none."""
    try:
        return from_plain(cls, data)
    except (ValueError, TypeError, AttributeError) as error:
        raise NoAnswer(
            "the agent's answer makes no sense",
            cause=str(error),
            hint="run `dflashctl deploy` to ship the agent that fits",
        ) from error
