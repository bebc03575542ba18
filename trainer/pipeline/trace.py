"""A trace of a few steps: what each thread of a rank and its device did, moment by moment, for Perfetto or chrome://tracing."""

from __future__ import annotations

import contextlib
import gzip
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from remote.protocol import events as ev
from trainer.data.schedule import MicroBatch
from trainer.telemetry import StageClock, Telemetry

# The first steps make what later ones use again: buffers, compiled kernels, DistributedDataParallel's order of buckets.
_SKIPPED = 2


class StepTrace:
    """Traces a run's steps from the third on, `count` of them, into one file of this rank.

    The count bounds the file: a step of a 27B target is some ten thousand operations. Between two traced steps nothing
    waits for the device; at the end of the last one everything does, once.
    """

    def __init__(
        self,
        path: Path,
        clock: StageClock,
        telemetry: Telemetry,
        *,
        rank: int,
        first_step: int,
        count: int,
        device: torch.device,
    ) -> None:
        """`first_step`: of this run. `count` 0 traces nothing."""
        self._path = path
        self._clock = clock
        self._telemetry = telemetry
        self._rank = rank
        self._first = first_step + _SKIPPED
        self._end = self._first + count
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._running: profile | None = None
        self._last = 0

    def at(self, step: int) -> None:
        """Say that the work of a step begins, which may be one piece of several."""
        if self._running is not None and step >= self._end:
            self.close()
        elif self._running is None and self._first <= step < self._end:
            self._running = profile(activities=self._activities)
            self._running.start()
            # The stages stand in the trace by name, above the operations they are made of.
            self._clock.annotate = record_function
        self._last = step

    def following(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield a target's micro-batches; whatever is done with them is traced by their step."""
        for micro_batch in batches:
            self.at(micro_batch.step)
            yield micro_batch
        # Before the goodbye to the drafters, who take the message and then end.
        self.close()

    def close(self) -> None:
        """Write the trace, if one is being taken, and say where it is. That it cannot be written ends nothing."""
        if self._running is None:
            return
        running, self._running = self._running, None
        self._clock.annotate = contextlib.nullcontext
        # None is begun again, whatever comes.
        last, self._end = min(self._last, self._end - 1), self._first
        try:
            # A stage of its own: 190,000 operations take 4 s, in which the peers wait.
            with self._clock.stage("trace"):
                running.stop()
                self._write(running)
        except (OSError, RuntimeError) as error:
            self._say("warning", f"the trace of rank {self._rank} cannot be written to {self._path}: {error}")
        else:
            self._say("info", f"trace of steps {self._first} to {last} on rank {self._rank}: {self._path}")

    def _write(self, traced: profile) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        plain, partial = (self._path.with_name(f".rank-{self._rank}.json{ending}") for ending in ("", ".gz"))
        try:
            traced.export_chrome_trace(str(plain))
            # Lightly: torch's own compression takes ten times as long, and saves a quarter.
            with plain.open("rb") as source, gzip.open(partial, "wb", compresslevel=1) as into:
                shutil.copyfileobj(source, into)
            # Renamed, so that a file with the final name is whole.
            partial.rename(self._path)
        finally:
            for leftover in (plain, partial):
                leftover.unlink(missing_ok=True)

    def _say(self, level: str, text: str) -> None:
        self._telemetry.emit(ev.Message(time=time.time(), rank=self._rank, level=level, text=text))
