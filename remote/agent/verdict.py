"""How a run ended, from what it left behind."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from remote.protocol.errors import DflashError
from remote.protocol.events import CheckpointSaved, Event, HeldOutMeasured, Phase, RunFinished, Step
from remote.protocol.layout import RunLayout
from remote.protocol.records import ExitRecord, HeldOut, Lifecycle, RankError, StopRequest, read_record

_RESULTS = (Lifecycle.FINISHED, Lifecycle.STOPPED, Lifecycle.FAILED)
_ERROR_FILE = re.compile(r"rank-(-1|[0-9]{1,6})\.json")
AGENT = "agent"
"""`by` of a stop verb that stood in for a dead supervisor."""
_MOST_STACKS = 1 << 16
_SENTENCES = (DflashError.__name__, "Stalled", "OutOfMemory")
LEADER = -1
"""Rank number of the leader's own error record."""


@dataclass
class Story:
    """What the events told so far."""

    last_step: int = 0
    last_checkpoint: str = ""
    finished: RunFinished | None = None
    held_out: HeldOut | None = None
    best: HeldOut | None = None
    not_applied: int = 0
    roles: dict[int, str] = field(default_factory=dict[int, str])
    phases: dict[int, str] = field(default_factory=dict[int, str])

    def hear(self, events: Iterable[Event]) -> None:
        """Take note of events, in order."""
        for event in events:
            if isinstance(event, Step):
                self.last_step = event.step
                self.not_applied += not event.applied
            elif isinstance(event, HeldOutMeasured):
                self.held_out = measurement(event)
            elif isinstance(event, CheckpointSaved):
                self._saved(event)
            elif isinstance(event, Phase) and event.rank >= 0:
                self.roles[event.rank], self.phases[event.rank] = event.role, event.phase
            elif isinstance(event, RunFinished):
                self.finished = event

    def _saved(self, event: CheckpointSaved) -> None:
        self.last_checkpoint = event.path
        if self.held_out is not None and self.held_out.step == event.step:
            self.held_out = dataclasses.replace(self.held_out, checkpoint=event.path)
            self.best = self.held_out if event.best else self.best


def measurement(event: HeldOutMeasured) -> HeldOut:
    """Return the event as records keep it."""
    return HeldOut(event.step, event.loss, event.accuracy, event.accept_len)


@dataclass(frozen=True)
class Ending:
    """What the one who writes exit.json saw. `returncode` is the leader's, negative for a signal, None if unseen.

    `first_dead` is the rank whose process vanished first, at `first_dead_at` (unix seconds); `escalated` whether signals
    had to be sent; `deleted` whether the run's directory was deleted while it ran.
    """

    by: str
    returncode: int | None = None
    first_dead: int | None = None
    first_dead_at: float = 0.0
    escalated: bool = False
    oom_kill: bool = False
    deleted: bool = False


def rank_errors(run: RunLayout) -> dict[int, RankError]:
    """Return the error records of the ranks. One that is cut short (disk full) still names its rank."""
    found: dict[int, RankError] = {}
    try:
        names = sorted(path.name for path in run.error(0).parent.iterdir())
    except OSError:
        return found
    for match in filter(None, map(_ERROR_FILE.fullmatch, names)):
        rank = int(match[1])
        try:
            record = read_record(RankError, run.error(rank))
        except ValueError as error:
            record = RankError(
                rank, "", "", "", "unreadable", f"its error record is unreadable: {error}", "", time.time()
            )
        if record is not None:
            found[rank] = record
    return found


def told_of(run: RunLayout, failed_rank: int | None) -> RankError | None:
    """Return the record that tells of a failed rank: its own, else that of a rank that blames it.

    A frozen rank files nothing; who found it so does. None: the leader's, or that of ranks that all wait for each other.
    """
    errors = rank_errors(run)
    failed = LEADER if failed_rank is None else failed_rank
    return errors.get(failed) or next((each for each in errors.values() if each.blames == failed), None)


def read_stop(run: RunLayout) -> StopRequest | None:
    """Return the stop request, None when there is none. An unreadable one still is a request: somebody asked."""
    try:
        return read_record(StopRequest, run.stop)
    except ValueError:
        return StopRequest(deadline=0.0, by="an unreadable stop.json")


def judge(run: RunLayout, story: Story, ending: Ending) -> ExitRecord:
    """Say how the run ended: the trainer's own word first, then a stop that needed signals, else a failure."""
    stop = read_stop(run)
    # Written after the last checkpoint and before the ranks end: later trouble, in torch's exit for instance, undoes nothing.
    if story.finished is not None and story.finished.result in _RESULTS:
        result = story.finished.result
    # TERM gives the ranks no chance to say run_finished.
    elif stop is not None and (ending.escalated or (ending.returncode == 0 and not rank_errors(run))):
        result = str(Lifecycle.STOPPED)
    else:
        result = str(Lifecycle.FAILED)
    failed_rank, message, traceback = _blame(run, story, ending) if result == Lifecycle.FAILED else (None, "", "")
    code = ending.returncode
    asked = stop is not None and result == Lifecycle.STOPPED and ending.by != AGENT
    return ExitRecord(
        run_id=run.run_id,
        result=result,
        ended=time.time(),
        by=stop.by if stop is not None and asked else ending.by,
        code=code if code is not None and code >= 0 else None,
        signal=-code if code is not None and code < 0 else None,
        oom_kill=ending.oom_kill,
        last_step=max(story.last_step, story.finished.step if story.finished else 0),
        last_checkpoint=(story.finished.checkpoint if story.finished else "") or story.last_checkpoint,
        failed_rank=failed_rank,
        message=message,
        traceback=traceback,
        held_out=story.held_out,
        best=story.best,
        not_applied=max(story.not_applied, story.finished.not_applied if story.finished else 0),
    )


def _blame(run: RunLayout, story: Story, ending: Ending) -> tuple[int | None, str, str]:
    """Return failed rank, message and traceback.

    A rank that vanished without an error record before any other failed was killed from outside; the launcher ends those
    that vanish so later. Otherwise the earliest record is the cause, of those that do not tell of another rank's loss.
    """
    if ending.deleted:
        # The records went with it; what a rank wrote since tells of its loss.
        return None, "the run's directory was deleted while it ran, so the run was ended", ""
    errors = rank_errors(run)
    # By the clock of one machine, so the order is that of the failures.
    first = min(errors.values(), key=lambda error: (error.consequence, error.time), default=None)
    killed = _killed(errors, first, ending)
    if killed is not None:
        return killed, *_last_words(run, story, ending, killed)
    if first is not None:
        # A DflashError is a sentence for people already.
        said = first.message if first.kind in _SENTENCES else f"{first.kind}: {first.message}"
        message = f"{said} ({first.cause})" if first.cause else said
        rank = first.rank if first.blames is None else first.blames
        return rank if rank >= 0 else None, message, first.traceback
    return None, _leader_message(ending), ""


def _last_words(run: RunLayout, story: Story, ending: Ending, rank: int) -> tuple[str, str]:
    """Return message and traceback for a rank that filed nothing."""
    who, where = story.roles.get(rank, ""), story.phases.get(rank, "")
    name, place = f"rank {rank}{f' ({who})' if who else ''}", f" while {where}" if where else ""
    try:
        with run.stacks(rank).open(encoding="utf-8", errors="replace") as file:
            stacks = file.read(_MOST_STACKS)
    except OSError:
        stacks = ""
    if stacks:
        # A fault of the machine's: its first line names it, `Fatal Python error: Bus error`.
        return f"{name} crashed{place}: {stacks.partition(chr(10))[0]}", stacks
    reason = "the kernel killed for memory" if ending.oom_kill else "killed from outside"
    return f"{name} died without a word: {reason}{place}", ""


def _killed(errors: dict[int, RankError], first: RankError | None, ending: Ending) -> int | None:
    """Return the rank whose process vanished without a record and so ended the run, None where that was not the cause."""
    # A leader killed by a signal takes its ranks along (PR_SET_PDEATHSIG): then none of them is the cause.
    if ending.returncode is not None and ending.returncode < 0:
        return None
    dead = ending.first_dead
    before = first is None or first.consequence or ending.first_dead_at <= first.time
    if dead is not None and dead not in errors and before:
        return dead
    # Its peers may be seen to end before it is.
    lost = first.blames if first is not None and first.consequence else None
    return lost if lost not in errors else None


def _leader_message(ending: Ending) -> str:
    if ending.returncode is None:
        return "the trainer is gone and left no word"
    if ending.returncode < 0:
        reason = " (the kernel killed for memory)" if ending.oom_kill else ""
        return f"the leader was killed by signal {-ending.returncode}{reason}"
    if ending.returncode == 0:
        return "the trainer ended without saying how"
    return f"the trainer ended with code {ending.returncode}; its log has the reason"
