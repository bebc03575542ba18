"""The watchdog of a rank: a thread that ends the process when nothing gets on any more, and says who stands still.

A rank that only waits for others does not strike: whoever stands still strikes first and names itself. One that can not,
because it is frozen, is named by the others, and if all wait for each other they end together, at twice the bound.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from remote.protocol.errors import DflashError
from trainer.pipeline.pulse import Pulse
from trainer.pipeline.vitals import Board, Vitals

STALLED = 75
"""Exit code of a rank that its watchdog ended."""

# Loading reads 54 GB, one shape of a warm-up compiles for minutes, fsync of 14 GB tells nothing until it is done.
_PATIENCE = {"training": 1.0}
_ELSEWHERE = 3.0

_WORK_BYTES = 1 << 20
_FILING_SECONDS = 10.0
_HEARING_SECONDS = 1.0


class Stalled(DflashError):
    """Nothing gets on any more. `local_rank`: who stands still, None if all wait for each other."""

    def __init__(self, local_rank: int | None, error: str, *, cause: str) -> None:
        super().__init__(
            error,
            cause=cause,
            hint="stacks/ in the run's directory holds where its threads were; resume from the last checkpoint, and raise "
            "--stall-timeout if it was slow and would have got on",
        )
        self.local_rank = local_rank


def judge(vitals: Mapping[int, Vitals], me: int, ranks: int, *, now: float, since: float) -> Stalled | None:
    """Return who stands still, None while somebody gets on or should speak for itself first.

    `vitals`: of the local ranks that have begun, this one (`me`) among them, of `ranks`. What lies before `since` does not
    count: the whole machine stood still then.
    """
    mine = vitals[me]
    silence = {rank: now - max(each.seen, since) for rank, each in vitals.items() if rank != me and not each.ended}
    silent = max(silence, key=lambda rank: silence[rank] / vitals[rank].limit, default=me)
    if silent != me and silence[silent] >= vitals[silent].limit:
        it = vitals[silent]
        waiting = f"; {mine.name} waits for {mine.awaits}" if mine.awaits else ""
        return Stalled(
            silent,
            f"{it.name} gives no sign of life since {silence[silent]:.0f} s",
            cause=f"it was last seen in {it.doing}: its process is frozen or stopped{waiting}",
        )
    still = now - max(mine.moved, since)
    if not mine.awaits:
        # If another is about to be found silent, it is the cause: on a GPU the wait for it shows in any place.
        near = silent != me and silence[silent] >= vitals[silent].limit / 2
        if still < mine.limit or near:
            return None
        cause = f"it has not got on for {still:.0f} s, and waits for no other rank"
        return Stalled(me, f"{mine.name} stands still in {mine.doing}", cause=cause)
    living = [each for each in vitals.values() if not each.ended]
    still = now - max(since, *(each.moved for each in living))
    if still < 2 * max(each.limit for each in living):
        return None
    absent = [f"local rank {rank} has not begun" for rank in range(ranks) if rank not in vitals]
    places = [f"{each.name}: {each.doing}" + (f", waits for {each.awaits}" if each.awaits else "") for each in living]
    return Stalled(
        None, f"no rank gets on since {still:.0f} s, and each waits for another", cause="; ".join(places + absent)
    )


def work_done() -> int:
    """Return the bytes that this process has read, written, or first touched, so far: what a load or a save gets on by.

    Mapped files show in page faults, and in reads from the disk; nothing of it grows in a process that stands still.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    moved = (usage.ru_minflt + usage.ru_majflt) * resource.getpagesize()
    with contextlib.suppress(OSError):  # a kernel without accounting
        for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(": ")
            if name in ("rchar", "wchar", "read_bytes", "write_bytes"):
                moved += int(count)
    return moved


class Phases(Protocol):
    """The phase that a rank is in, and what exactly it does there, perhaps empty."""

    current: str
    detail: str


@dataclass(frozen=True)
class Ward:
    """Whom a watchdog watches: local rank, its name for people, its phases, how long it may stand still in training."""

    local_rank: int
    ranks: int
    name: str
    phases: Phases
    stall_timeout: float


class Watchdog:
    """Watches from `with` to its end. `file` is called once, with what was found, before the process ends with STALLED."""

    def __init__(self, ward: Ward, pulse: Pulse, board: Board, stacks: Path, file: Callable[[Stalled], None]) -> None:
        """`stacks`: where the stacks of all threads are written."""
        self._ward = ward
        self._pulse = pulse
        self._board = board
        self._stacks = stacks
        self._file = file
        self._work = 0
        # Eight looks within the bound; a second is often enough for minutes.
        self._pause = min(1.0, ward.stall_timeout / 8)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs; behind it, what is left of the process's life is bounded as well."""
        self._look()
        self._thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._thread.join()
            # torch's and the driver's own ends can hang, and the launcher waits for every rank.
            faulthandler.dump_traceback_later(self._ward.stall_timeout * _ELSEWHERE, exit=True)

    def _vitals(self) -> Vitals:
        phase, detail = self._ward.phases.current, self._ward.phases.detail
        place = f"{phase} ({detail})" if detail else phase
        doing = self._pulse.doing()
        return Vitals(
            name=self._ward.name,
            seen=time.monotonic(),
            moved=self._pulse.moved,
            limit=self._ward.stall_timeout * _PATIENCE.get(phase, _ELSEWHERE),
            doing=f"{place}: {doing}" if doing else place,
            awaits=self._pulse.awaited(),
        )

    def _look(self) -> None:
        # In training it would hide a stall: threads that are not concerned go on writing events.
        if self._ward.phases.current != "training" and (work := work_done()) - self._work >= _WORK_BYTES:
            self._work = work
            self._pulse.beat()
        self._board.write(self._ward.local_rank, self._vitals())

    def _watch(self) -> None:
        try:
            self._keep_looking()
        finally:
            # Whom nobody watches must not be found silent: the rank has ended, or failed, which the launcher notices.
            now = time.monotonic()
            self._board.write(self._ward.local_rank, Vitals(self._ward.name, now, now, 1.0, "", ended=True))

    def _keep_looking(self) -> None:
        since = last = time.monotonic()
        while not self._end.wait(self._pause):
            now = time.monotonic()
            # A container that was frozen (a backup, a suspend) finds every clock behind: it stood still as a whole.
            if now - last > 4 * self._pause + 1:
                since = now
            last = now
            self._look()
            found = judge(self._board.read(), self._ward.local_rank, self._ward.ranks, now=now, since=since)
            if found is not None:
                self._strike(found)

    def _strike(self, found: Stalled) -> None:
        if found.local_rank == self._ward.local_rank:
            # What a person wants to see first: where the main thread stands.
            found.detail = "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0]))
        # In a thread of its own: the disk, or a lock that the standing thread holds, may be what stands still.
        filing = threading.Thread(target=self._tell, args=(found,), daemon=True)
        filing.start()
        filing.join(_FILING_SECONDS)
        # The launcher ends the rank that writes events as soon as this one has ended: not before it has heard the alarm.
        time.sleep(_HEARING_SECONDS)
        os._exit(STALLED)

    def _tell(self, found: Stalled) -> None:
        with contextlib.suppress(OSError), self._stacks.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        self._file(found)
        print(found.render(), file=sys.stderr, flush=True)
