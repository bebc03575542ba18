"""What the first drafter rank tells the world: steps, who waits, alarms. It alone writes events."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from remote.protocol import events as ev
from trainer.data.schedule import MicroBatch
from trainer.pipeline.figures import StepFigures
from trainer.pipeline.gpu_facts import GpuFacts
from trainer.pipeline.held_out import HeldOutFigures
from trainer.pipeline.layout import Layout, Role
from trainer.telemetry import StageClock, Telemetry

TARGET_WAITS = ("wait_buffer", "wait_slot", "wait_end")
# Not all_reduce: no faster target would shorten it.
DRAFTER_WAITS = ("wait_states",)

# Either side's wait below this share is noise, not a limit.
_BALANCED = 0.02


@dataclass(frozen=True)
class StepTraffic:
    """What the schedule knows of a step without asking any device."""

    epoch: int
    tokens: int
    lr: float
    micro_batches: tuple[MicroBatch, ...] = ()


class Reporter:
    """Step events with throughput and time left; the alarms that a step's figures call for."""

    def __init__(self, telemetry: Telemetry, layout: Layout, *, rank: int, total_steps: int, first_step: int) -> None:
        self._telemetry = telemetry
        self._layout = layout
        self._rank = rank
        self._total_steps = total_steps
        self._first_step = first_step
        self._started = time.monotonic()
        self._last = self._started
        self._seconds: dict[int, float] = {}

    def begin(self) -> None:
        """Start the clock of the first step."""
        self._started = self._last = time.monotonic()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Keep the time of the block out of the next step's speed: saving is no training."""
        began = time.monotonic()
        yield
        self._last += time.monotonic() - began

    def trained(self, step: int) -> None:
        """Take the time of a step when its work is handed to the device, which every step does alike.

        Its figures come one step later, but those of the last one, or before a checkpoint, right behind its predecessor's.
        """
        now = time.monotonic()
        self._seconds[step] = now - self._last
        self._last = now

    def step(self, figures: StepFigures, traffic: StepTraffic, saved: Path | None = None) -> None:
        """Report a step that was `trained`; `saved`: where its batches lie, if they were refused and saved."""
        done = figures.step - self._first_step + 1
        left = self._total_steps - figures.step
        self._telemetry.emit(
            ev.Step(
                time=time.time(),
                rank=self._rank,
                step=figures.step,
                total_steps=self._total_steps,
                epoch=traffic.epoch,
                loss=figures.loss,
                accuracy=figures.accuracy,
                accuracy_by_row=figures.accuracy_by_row,
                accept_len=figures.accept_len,
                lr=traffic.lr,
                grad_norm=figures.grad_norm,
                tokens=traffic.tokens,
                tokens_per_second=traffic.tokens / max(self._seconds.pop(figures.step), 1e-9),
                eta_seconds=(time.monotonic() - self._started) / done * left,
                applied=not figures.skipped,
            )
        )
        for kind, message in step_alarms(figures, blame(figures, traffic.micro_batches, self._layout), saved):
            self.alarm(kind, message, figures.step)

    def measured(self, step: int, figures: HeldOutFigures, seconds: float) -> None:
        """Report a measurement on held-out documents, and keep its time out of the next step's speed."""
        self._last += seconds
        self._telemetry.emit(
            ev.HeldOutMeasured(
                time=time.time(),
                rank=self._rank,
                step=step,
                loss=figures.loss,
                accuracy=figures.accuracy,
                accept_len=figures.accept_len,
                seconds=seconds,
            )
        )
        # The step's own guard looks at training documents alone; such a checkpoint is saved, and is never the best.
        if not math.isfinite(figures.loss):
            what = f"the loss on held-out documents behind step {step} is {figures.loss}"
            self.alarm("held_out_non_finite", f"{what}: this checkpoint cannot be compared with others", step)

    def alarm(self, kind: str, message: str, step: int) -> None:
        self._telemetry.emit(ev.AlarmRaised(time=time.time(), rank=self._rank, alarm=kind, message=message, step=step))


_BLAME = {
    "states": "the states of batch {b} were not finite when packed on {target}",
    "copy": "the states of batch {b} were finite when packed on {target}, and are not on {drafter}",
    "loss": "the loss of batch {b} is not finite on {drafter}, its states are",
}


def blame(figures: StepFigures, micro_batches: Sequence[MicroBatch], layout: Layout) -> str:
    """Return which micro-batches of a refused step are not finite, and what of them; empty for a step that was not."""
    if not figures.non_finite:
        return ""
    found = [(micro_batches[each.place], each.what) for each in figures.suspects]
    if found:
        return "; ".join(_accusation(micro_batch, what, layout) for micro_batch, what in found)
    batches = ", ".join(str(each.b) for each in micro_batches)
    return f"every loss is finite, but the gradient norm of batches {batches} is {figures.grad_norm}"


def _accusation(micro_batch: MicroBatch, what: str, layout: Layout) -> str:
    target = layout.place(Role.TARGET, micro_batch.target, micro_batch.machine)
    drafter = layout.place(Role.DRAFTER, micro_batch.drafter, micro_batch.machine)
    return _BLAME[what].format(b=micro_batch.b, target=target, drafter=drafter)


def step_alarms(figures: StepFigures, blamed: str = "", saved: Path | None = None) -> list[tuple[str, str]]:
    """Return (kind, message) of what is wrong with a step's figures: the signatures of corrupted copies and of divergence.

    `blamed` says which micro-batches are not finite, `saved` where they lie.
    """
    found: list[tuple[str, str]] = []
    if figures.torn:
        found.append(
            ("torn_metric", "the step's figures carry another step's number: they were read before their copy was done")
        )
    if figures.non_finite:
        where = f"; saved in {saved}" if saved is not None else ""
        found.append(("non_finite", f"{blamed}: the step was not applied{where}"))
    elif figures.skipped:
        found.append(("no_supervision", "no supervised position in the whole step: it was not applied"))
    elif figures.loss <= 0:
        found.append(("loss_not_positive", f"a cross-entropy of {figures.loss:g} is impossible"))
    if figures.accuracy == 1.0:
        found.append(("accuracy_one", "every supervised position is right, which real data never gives"))
    return found


class PipelineProfiler:
    """Joins the stage profiles of all ranks into one line that says who waits."""

    def __init__(self, telemetry: Telemetry, *, rank: int, ring_capacity: int) -> None:
        self._telemetry = telemetry
        self._rank = rank
        self._ring_capacity = ring_capacity
        self._lock = threading.Lock()
        self._latest: dict[int, ev.StageProfile] = {}

    def observe(self, event: ev.Event) -> None:
        """Take a rank's stage profile (called for every event, from any thread)."""
        if isinstance(event, ev.StageProfile):
            with self._lock:
                self._latest[event.rank] = event

    def emit(self, *, padding: float) -> None:
        """Emit the pipeline's profile from the newest profile of each rank."""
        with self._lock:
            profiles = list(self._latest.values())
        if profile := summarise(profiles, rank=self._rank, ring_capacity=self._ring_capacity, padding=padding):
            self._telemetry.emit(profile)


def _waiting(profile: ev.StageProfile, names: tuple[str, ...]) -> float:
    return sum(profile.stages.get(name, 0.0) for name in names)


def _side(profiles: list[ev.StageProfile], waits: tuple[str, ...]) -> tuple[float, float]:
    """Return (tokens per second if nobody had waited, share of time waited) of one side."""
    unhindered = sum(p.tokens / max(p.interval - _waiting(p, waits), 1e-9) for p in profiles)
    total = sum(p.interval for p in profiles)
    return unhindered, sum(_waiting(p, waits) for p in profiles) / total if total else 0.0


def summarise(
    profiles: list[ev.StageProfile], *, rank: int, ring_capacity: int, padding: float
) -> ev.PipelineProfile | None:
    """Return the pipeline's profile that follows from the ranks' own; None before a drafter has one."""
    targets = [profile for profile in profiles if profile.role == "target"]
    drafters = [profile for profile in profiles if profile.role != "target"]
    if not drafters:
        return None
    target_rate, target_wait = _side(targets, TARGET_WAITS)
    drafter_rate, drafter_wait = _side(drafters, DRAFTER_WAITS)
    limits = "neither"
    if targets and max(target_wait, drafter_wait) > _BALANCED:
        limits = "targets" if drafter_wait > target_wait else "drafters"
    return ev.PipelineProfile(
        time=time.time(),
        rank=rank,
        interval=max(profile.interval for profile in drafters),
        tokens_per_second=sum(p.tokens / max(p.interval, 1e-9) for p in drafters),
        target_tokens_per_second=target_rate,
        drafter_tokens_per_second=drafter_rate,
        target_wait=target_wait,
        drafter_wait=drafter_wait,
        ring_bytes=sum(profile.ring_bytes for profile in profiles),
        ring_capacity=ring_capacity,
        padding=padding,
        limits=limits,
    )


@dataclass(frozen=True)
class Desk:
    """What the first drafter rank has more than the others: it reports, watches for a stop and saves."""

    telemetry: Telemetry
    reporter: Reporter
    profiler: PipelineProfiler


class ProfileTimer:
    """Emits this rank's stage profile once per interval; asked at every micro-batch."""

    def __init__(
        self,
        clock: StageClock,
        telemetry: Telemetry,
        *,
        interval: float,
        role: str,
        device: str,
        rank: int,
        gpu: GpuFacts | None = None,
    ) -> None:
        self._clock = clock
        self._telemetry = telemetry
        self._interval = interval if interval > 0 else math.inf
        self._role = role
        self._device = device
        self._rank = rank
        self._gpu = gpu
        self._next = time.monotonic() + self._interval

    def begin(self) -> None:
        """Begin the first interval: loading and warm-up are none of it."""
        self._clock.begin()
        self._next = time.monotonic() + self._interval

    def tick(self) -> bool:
        """Emit the profile when it is due; True if it was."""
        now = time.monotonic()
        if now < self._next:
            return False
        # From now on, not from when it was due: after a long step the missed intervals would come in one burst.
        self._next = now + self._interval
        profile = self._clock.read(role=self._role, device=self._device, rank=self._rank)
        self._telemetry.emit(profile if self._gpu is None else self._gpu.add_to(profile))
        return True
