"""The records in a run's directory and in answers. Each has one writer; every reader skips unknown fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from remote.protocol.codec import from_plain
from remote.protocol.files import read_json

SCHEMA = 1

R = TypeVar("R")


class Lifecycle(StrEnum):
    """State of a run as `status` reports it."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    ORPHANED = "orphaned"
    LOST = "lost"
    NONE = "none"

    @property
    def alive(self) -> bool:
        """Whether processes of the run live."""
        return self in (Lifecycle.STARTING, Lifecycle.RUNNING, Lifecycle.STOPPING, Lifecycle.ORPHANED)


@dataclass(frozen=True)
class RunSpec:
    """Everything that makes a run what it is; nothing is inherited from the shell that started it.

    `argv` is what the supervisor executes, `devices` the CUDA indices it uses as text, or "cpu".
    """

    run_id: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    devices: tuple[str, ...]
    schema: int = SCHEMA
    release: str = ""
    name: str = ""
    note: str = ""
    created: float = 0.0
    by: str = ""
    host: str = "local"
    ct: str = ""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    source: dict[str, str] = field(default_factory=dict[str, str])
    packages: dict[str, str] = field(default_factory=dict[str, str])
    resumed_from: str = ""
    restarted_from: str = ""
    """The run whose place this one took, and whose configuration it began with; "" for a plain start."""
    stop_grace: float = 120.0
    """Seconds without checkpoint progress after which a stop escalates from the message to TERM."""
    stall_timeout: float = 300.0
    """Seconds without a step, after the first, that count as a stall."""
    kill_grace: float = 15.0
    """Seconds between TERM to the leader and KILL to every recorded rank."""
    gpu_memory: dict[str, int] = field(default_factory=dict[str, int])
    """MiB in use on each CUDA device before the launch: the baseline that a stop waits for."""


@dataclass(frozen=True)
class Alarm:
    """Something a person should look at; it never ends a run by itself.

    One for each kind, however often it came: `time` and `step` are those of the first, `message` is the newest.
    """

    kind: str
    message: str
    time: float
    step: int = 0
    count: int = 1


@dataclass(frozen=True)
class HeldOut:
    """What the drafter of `step` scored on the held-out documents (see the event), and its checkpoint once it is saved."""

    step: int
    loss: float
    accuracy: float
    accept_len: float
    checkpoint: str = ""


@dataclass(frozen=True)
class RunState:
    """state.json: what the supervisor knows while it lives."""

    run_id: str
    state: str
    since: float
    schema: int = SCHEMA
    boot_id: str = ""
    supervisor_pid: int = 0
    trainer_pid: int = 0
    stop_by: str = ""
    alarms: tuple[Alarm, ...] = ()
    last_checkpoint: str = ""
    held_out: HeldOut | None = None
    """The newest measurement, and in `best` that of the checkpoint which the trainer keeps as its best."""
    best: HeldOut | None = None
    not_applied: int = 0
    """Steps of this run that were trained and not applied to the weights."""


@dataclass(frozen=True)
class StopRequest:
    """stop.json: please end at the next step boundary, by `deadline` (unix seconds) at the latest without progress.

    `grace` is the same bound in seconds from the last progress: the supervisor counts it on the monotonic clock.
    """

    deadline: float
    by: str
    checkpoint: bool = True
    grace: float = 120.0
    schema: int = SCHEMA


@dataclass(frozen=True)
class RankError:
    """errors/rank-N.json: what ended one rank, written by that rank.

    `consequence`: the loss of another rank ended it, so it is not the cause while any other is known. `blames`: the rank
    that it holds responsible, None for itself or where it cannot tell, -1 for none in particular.
    """

    rank: int
    role: str
    device: str
    phase: str
    kind: str
    message: str
    traceback: str
    time: float
    cause: str = ""
    hint: str = ""
    code: int = 1
    consequence: bool = False
    blames: int | None = None
    schema: int = SCHEMA


@dataclass(frozen=True)
class ExitRecord:
    """exit.json: how a run ended. `by` names who ended it: trainer, supervisor, who asked for the stop, or agent (a stop
    that stood in for a dead supervisor)."""

    run_id: str
    result: str
    ended: float
    by: str
    schema: int = SCHEMA
    code: int | None = None
    signal: int | None = None
    oom_kill: bool = False
    last_step: int = 0
    last_checkpoint: str = ""
    failed_rank: int | None = None
    message: str = ""
    traceback: str = ""
    held_out: HeldOut | None = None
    best: HeldOut | None = None
    not_applied: int = 0


@dataclass(frozen=True)
class RunStatus:
    """What `status --json` prints."""

    run_id: str
    state: str
    host: str = "local"
    ct: str = ""
    schema: int = SCHEMA
    name: str = ""
    note: str = ""
    release: str = ""
    created: float = 0.0
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    phase: str = ""
    last_event: float = 0.0
    resumed_from: str = ""
    restarted_from: str = ""
    topology: str = ""
    by: str = ""
    last_checkpoint: str = ""
    message: str = ""
    failed_rank: int | None = None
    traceback: str = ""
    hint: str = ""
    """The way out of what failed it, where that is known."""
    run_dir: str = ""
    alarms: tuple[Alarm, ...] = ()
    held_out: HeldOut | None = None
    best: HeldOut | None = None
    not_applied: int = 0


def read_record(cls: type[R], path: Path) -> R | None:
    """Return the record of type `cls` in `path`, or None when there is no such file.

    Raises ValueError when the file is no such record (truncated, garbage).
    """
    data = read_json(path)
    return None if data is None else from_plain(cls, data)
