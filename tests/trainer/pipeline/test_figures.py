"""The figures of a step on their way to the host, and the alarms that they call for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from races.in_process import Heard

from remote.protocol import events as ev
from trainer.data.rows import Row
from trainer.data.schedule import MicroBatch
from trainer.drafter.objective import ObjectiveSums
from trainer.optimizer import StepOutcome
from trainer.pipeline.copier import HostCopier, Mark
from trainer.pipeline.figures import DeferredFigures, StepFigures, StepSums
from trainer.pipeline.gpu_facts import GpuFacts
from trainer.pipeline.layout import Layout
from trainer.pipeline.packed import COPY, STATES, PackedRow, RowTokens
from trainer.pipeline.reporting import (
    PipelineProfiler,
    ProfileTimer,
    Reporter,
    StepTraffic,
    blame,
    step_alarms,
    summarise,
)
from trainer.telemetry import StageClock

CPU = torch.device("cpu")
LAYOUT = Layout("cuda", (0, 1, 2), (5, 6, 7))
BLOCK, GROUP = 4, 3
GOOD = StepFigures(
    step=7,
    loss=3.0,
    accuracy=0.25,
    accept_len=1.5,
    grad_norm=0.5,
    weight_sum=10.0,
    skipped=False,
    stop=False,
    torn=False,
)


PER_ROW = [0.0, 4.0, 1.0, 0.0] + [0.0, 5.0, 4.0, 0.0]  # correct of rows 0 to 3, then supervised


def packed(batch: int = 0, *, finite: bool = True, when_packed: bool | None = True, split: bool = False) -> PackedRow:
    """A row of two positions, L·H = 6; not finite in one number."""
    none = torch.zeros(0)
    row = RowTokens(batch, 3, 0, none, none, none, none, tokens=2)
    states = torch.ones(2, 6)
    states[1, 4] = 1.0 if finite else math.inf
    return PackedRow(row, tuple(states.split(3, dim=-1)) if split else states, when_packed)


def sums(loss: float = 6.0, weight: float = 4.0, *, stop: bool = False, row: PackedRow | None = None) -> StepSums:
    result = StepSums(BLOCK, GROUP, CPU, stop_wanted=stop)
    metrics = torch.tensor([1.0, 8.0, 3.0, 2.0, *PER_ROW], dtype=torch.float64)
    result.add(ObjectiveSums(torch.tensor(loss, requires_grad=True), torch.tensor(weight), metrics), row or packed())
    return result


def outcome(norm: float = 0.5, skipped: float = 0.0) -> StepOutcome:
    return StepOutcome(torch.tensor(norm), torch.tensor(skipped))


# ---- sums and figures


def test_micro_batches_add_up() -> None:
    both = sums(6.0, 4.0)
    metrics = torch.tensor([3.0, 8.0, 5.0, 2.0, *PER_ROW], dtype=torch.float64)
    both.add(ObjectiveSums(torch.tensor(2.0), torch.tensor(4.0), metrics), packed(1))
    (figures,) = DeferredFigures(HostCopier(), CPU).push(3, both, outcome())
    assert (figures.step, figures.loss, figures.weight_sum) == (3, 1.0, 8.0)
    assert (figures.accuracy, figures.accept_len, figures.grad_norm) == (0.25, 2.0, 0.5)
    assert (figures.torn, figures.skipped, figures.stop) == (False, False, False)
    assert figures.accuracy_by_row[:2] == (0.8, 0.25)
    assert math.isnan(figures.accuracy_by_row[2])  # No supervised position there.
    assert figures.suspects == ()


# ---- what is not finite, and where


def judged(*parts: StepSums, skipped: float = 1.0) -> StepFigures:
    """The figures of a step whose sums were reduced over drafters."""
    for other in parts[1:]:
        parts[0].values.add_(other.values)  # What the all-reduce does.
    (figures,) = DeferredFigures(HostCopier(), CPU).push(3, parts[0], outcome(math.nan, skipped))
    return figures


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("when_packed", "finite", "seen"),
    [
        (True, True, []),
        (None, True, []),
        (True, False, ["copy"]),
        (False, False, ["states"]),
        (None, False, ["states"]),
        # A copy that made them finite is no better.
        (False, True, ["states"]),
    ],
)
def test_states_are_judged_where_they_are_used(
    when_packed: bool | None, finite: bool, seen: list[str], split: bool
) -> None:
    row = packed(7, finite=finite, when_packed=when_packed, split=split)
    one = sums(row=row)
    assert float(one.bad_states) == {"states": STATES, "copy": COPY}.get("".join(seen), 0.0)
    assert [(each.place, each.what) for each in judged(one).suspects] == [(7 % GROUP, what) for what in seen]


def test_every_drafter_knows_the_suspects_of_all() -> None:
    one, other = sums(math.inf, row=packed(3)), sums(row=packed(5, finite=False, when_packed=None))
    figures = judged(one, other, sums(row=packed(4)))
    assert [(each.place, each.what) for each in figures.suspects] == [(0, "loss"), (2, "states")]
    micro_batches = [MicroBatch(b, 2, 0, Row((), 0), 0, target=b - 3, drafter=5 - b) for b in (3, 4, 5)]
    assert blame(figures, micro_batches, LAYOUT) == (
        "the loss of batch 3 is not finite on GPU 7 (rank 5), its states are; "
        "the states of batch 5 were not finite when packed on GPU 2 (rank 2)"
    )
    copied = judged(sums(row=packed(4, finite=False)))
    seen = "batch 4 were finite when packed on GPU 1 (rank 1), and are not on GPU 6 (rank 4)"
    assert seen in blame(copied, micro_batches, LAYOUT)


def test_a_loss_made_from_bad_states_says_nothing_of_its_own() -> None:
    assert [each.what for each in judged(sums(math.nan, row=packed(finite=False))).suspects] == ["copy"]


def test_without_a_suspect_the_gradients_of_the_whole_step_are_to_blame() -> None:
    figures = judged(sums())
    micro_batches = [MicroBatch(b, 2, 0, Row((), 0), 0, 0, 0) for b in (3, 4, 5)]
    seen = "every loss is finite, but the gradient norm of batches 3, 4, 5 is nan"
    assert blame(figures, micro_batches, LAYOUT) == seen
    assert blame(judged(sums(), skipped=0.0), micro_batches, LAYOUT) == ""


def test_bad_states_without_a_supervised_position_are_no_lack_of_supervision() -> None:
    figures = judged(sums(0.0, 0.0, row=packed(finite=False)))
    assert figures.non_finite
    assert [kind for kind, _ in step_alarms(figures, "blamed", Path("bad"))] == ["non_finite"]
    assert step_alarms(figures, "blamed", Path("bad"))[0][1] == "blamed: the step was not applied; saved in bad"


def test_the_stop_flag_survives_the_sum_over_drafters() -> None:
    values = sums(stop=True)
    values.values += sums(stop=False).values  # What the all-reduce does.
    (figures,) = DeferredFigures(HostCopier(), CPU).push(3, values, outcome())
    assert figures.stop


def test_a_step_without_supervision_has_no_loss_but_is_no_divergence() -> None:
    empty = StepSums(BLOCK, GROUP, CPU, stop_wanted=False)
    (figures,) = DeferredFigures(HostCopier(), CPU).push(3, empty, outcome(math.nan, 1.0))
    assert math.isnan(figures.loss)
    assert figures.skipped
    assert not figures.non_finite
    assert [kind for kind, _ in step_alarms(figures)] == ["no_supervision"]


def test_on_a_cpu_figures_come_at_once() -> None:
    deferred = DeferredFigures(HostCopier(), CPU)
    assert [figures.step for figures in deferred.push(1, sums(), outcome())] == [1]
    assert deferred.flush() == []


def test_with_a_lag_every_step_comes_once_and_one_later() -> None:
    deferred = DeferredFigures(HostCopier(), CPU)
    deferred._lag = 1
    seen = [[figures.step for figures in deferred.push(step, sums(), outcome())] for step in range(1, 5)]
    assert seen == [[], [1], [2], [3]]
    assert [figures.step for figures in deferred.flush()] == [4]


class TornCopier(HostCopier):
    """A copier that reports a copy done before all of it is there."""

    def __init__(self, keep: slice) -> None:
        self._keep = keep

    def copy_here(self, destination: torch.Tensor, source: torch.Tensor) -> Mark:
        half = torch.zeros_like(source)
        half[self._keep] = source[self._keep]
        return super().copy_here(destination, half)


@pytest.mark.parametrize("keep", [slice(0, 5), slice(0, -1), slice(0, -2), slice(0, 0)])
def test_a_torn_copy_is_known(keep: slice) -> None:
    (figures,) = DeferredFigures(TornCopier(keep), CPU).push(3, sums(), outcome())
    assert figures.torn
    assert "torn_metric" in [kind for kind, _ in step_alarms(figures)]


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_the_figures_of_another_step_are_known(step: int, other: int) -> None:
    (figures,) = DeferredFigures(HostCopier(), CPU).push(other, sums(), outcome())
    assert not figures.torn
    values = [0.0] * (3 + 4 + 2 * BLOCK + 2 * GROUP) + [0.5, 0.0, float(other), 1234.5678]
    assert StepFigures.of(step, values, BLOCK).torn == (step != other)


def test_host_memory_is_made_once_for_the_steps_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(HostCopier):
        """A copy is done when its mark is waited for."""

        def copy_here(self, destination: torch.Tensor, source: torch.Tensor) -> Mark:
            class Later:
                def wait_host(self) -> None:
                    destination.copy_(source)

                def seconds(self) -> float:
                    return 0.0

            return Later()

    made: list[int] = []
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **keys: made.append(1) or real(*sizes, **keys))
    figures = DeferredFigures(Slow(), CPU)
    figures._lag = 1  # As on a GPU.
    due: list[StepFigures] = []
    for step in range(1, 8):
        due += figures.push(step, sums(float(step)), outcome())
    due += figures.flush()
    assert [(each.step, each.loss, each.torn) for each in due] == [(n, n / 4, False) for n in range(1, 8)]
    assert len(made) == 2


# ---- alarms


@pytest.mark.parametrize(
    ("changes", "alarms"),
    [
        ({}, []),
        ({"loss": 0.0}, ["loss_not_positive"]),
        ({"loss": -0.5}, ["loss_not_positive"]),
        ({"accuracy": 1.0}, ["accuracy_one"]),
        ({"accuracy": 0.999}, []),
        ({"torn": True}, ["torn_metric"]),
        ({"loss": math.nan, "skipped": True}, ["non_finite"]),
        ({"grad_norm": math.inf, "skipped": True}, ["non_finite"]),
        ({"weight_sum": 0.0, "loss": math.nan, "skipped": True}, ["no_supervision"]),
        # The story's signature of a corrupted copy: 1.0000/-0.0000.
        ({"accuracy": 1.0, "loss": -0.0}, ["loss_not_positive", "accuracy_one"]),
    ],
)
def test_alarms(changes: dict[str, Any], alarms: list[str]) -> None:
    assert [kind for kind, _ in step_alarms(replace(GOOD, **changes))] == alarms


def test_a_step_is_reported_with_its_alarms() -> None:
    sink = Heard()
    reporter = Reporter(sink, LAYOUT, rank=5, total_steps=10, first_step=5)
    reporter.begin()
    reporter.trained(GOOD.step)
    reporter.step(replace(GOOD, accuracy=1.0), StepTraffic(epoch=1, tokens=300, lr=1e-3))
    step, alarm = sink.events
    assert isinstance(step, ev.Step)
    assert isinstance(alarm, ev.AlarmRaised)
    assert (step.rank, step.step, step.total_steps, step.epoch, step.tokens, step.applied) == (5, 7, 10, 1, 300, True)
    assert step.tokens_per_second > 0
    assert step.eta_seconds >= 0
    assert (alarm.rank, alarm.step, alarm.alarm) == (5, 7, "accuracy_one")


# ---- who waits


def profile(rank: int, role: str, interval: float = 10.0, tokens: int = 1000, **stages: float) -> ev.StageProfile:
    return ev.StageProfile(
        time=0.0, rank=rank, role=role, device="cpu", interval=interval, tokens=tokens, stages=stages, ring_bytes=100
    )


def joined(*profiles: ev.StageProfile) -> ev.PipelineProfile:
    result = summarise(list(profiles), rank=1, ring_capacity=1000, padding=0.1)
    assert result is not None
    return result


def test_drafters_that_wait_for_states_are_limited_by_targets() -> None:
    result = joined(profile(0, "target", wait_buffer=0.0), profile(1, "drafter", wait_states=6.0, all_reduce=1.0))
    assert result.limits == "targets"
    # What they wait for one another is theirs: no faster target would shorten it.
    assert (result.target_wait, result.drafter_wait) == (0.0, 0.6)
    assert result.drafter_tokens_per_second == pytest.approx(1000 / 4)
    assert result.target_tokens_per_second == result.tokens_per_second == 100.0
    assert (result.ring_bytes, result.ring_capacity, result.padding) == (200, 1000, 0.1)


def test_targets_that_wait_for_buffers_are_limited_by_drafters() -> None:
    result = joined(
        profile(0, "target", wait_buffer=8.0),
        profile(1, "target", wait_buffer=4.0),
        profile(2, "drafter", wait_states=0.5),
    )
    assert result.limits == "drafters"
    assert result.target_wait == pytest.approx(0.6)


@pytest.mark.parametrize("wait", [0.0, 0.1])
def test_a_balanced_pipeline_is_limited_by_neither(wait: float) -> None:
    assert joined(profile(0, "target", wait_buffer=wait), profile(1, "drafter", wait_states=wait)).limits == "neither"


def test_shared_roles_wait_for_nobody() -> None:
    result = joined(profile(0, "shared", forward=5.0), profile(1, "shared", forward=5.0))
    assert result.limits == "neither"
    assert result.tokens_per_second == 200.0


def test_without_a_drafters_profile_there_is_none() -> None:
    assert summarise([profile(0, "target")], rank=1, ring_capacity=0, padding=0.0) is None
    assert summarise([], rank=1, ring_capacity=0, padding=0.0) is None


def test_the_profiler_joins_the_newest_of_each_rank() -> None:
    sink = Heard()
    profiler = PipelineProfiler(sink, rank=1, ring_capacity=0)
    profiler.emit(padding=0.0)
    assert sink.events == []
    profiler.observe(profile(1, "drafter", tokens=10))
    profiler.observe(profile(1, "drafter", tokens=500))
    profiler.observe(ev.Message(time=0.0, level="info", text="not a profile"))
    profiler.emit(padding=0.0)
    (event,) = sink.events
    assert isinstance(event, ev.PipelineProfile)
    assert event.tokens_per_second == 50.0


@pytest.mark.parametrize(("interval", "ticks"), [(0.0, 0), (1e-9, 3)])
def test_an_interval_of_zero_turns_profiles_off(interval: float, ticks: int) -> None:
    sink = Heard()
    timer = ProfileTimer(StageClock(), sink, interval=interval, role="target", device="cpu", rank=0)
    assert sum(timer.tick() for _ in range(3)) == ticks
    assert len(sink.events) == ticks


def test_a_long_step_gives_one_profile_not_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    timer = ProfileTimer(StageClock(), Heard(), interval=10.0, role="target", device="cpu", rank=0)
    seen = []
    for moment in (105.0, 110.0, 111.0, 175.0, 176.0, 177.0, 185.0):
        now[0] = moment
        seen.append(timer.tick())
    assert seen == [False, True, False, True, False, False, True]


def test_the_first_interval_begins_with_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    sink, clock = Heard(), StageClock()
    timer = ProfileTimer(clock, sink, interval=10.0, role="target", device="cpu", rank=0)
    with clock.stage("target_forward"):
        now[0] += 500  # Warm-up.
    timer.begin()
    now[0] += 4
    assert not timer.tick()
    now[0] += 7
    assert timer.tick()
    (event,) = sink.events
    assert isinstance(event, ev.StageProfile)
    assert (event.interval, event.stages) == (11.0, {})


def test_what_is_known_of_the_gpu_is_in_its_ranks_profile() -> None:
    class Gpu:
        def add_to(self, profile: ev.StageProfile) -> ev.StageProfile:
            return replace(profile, mfu=0.5)

    sink = Heard()
    timer = ProfileTimer(
        StageClock(), sink, interval=1e-9, role="target", device="cuda:1", rank=3, gpu=cast(GpuFacts, Gpu())
    )
    assert timer.tick()
    (event,) = sink.events
    assert isinstance(event, ev.StageProfile)
    assert (event.mfu, event.rank, event.device) == (0.5, 3, "cuda:1")


def test_time_spent_apart_does_not_slow_a_step_down(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    sink = Heard()
    reporter = Reporter(sink, LAYOUT, rank=0, total_steps=10, first_step=7)
    reporter.begin()
    now[0] += 2
    with reporter.apart():
        now[0] += 30
    now[0] += 3
    reporter.trained(7)
    reporter.step(GOOD, StepTraffic(epoch=0, tokens=1000, lr=1e-4))
    (step,) = sink.events
    assert isinstance(step, ev.Step)
    assert step.tokens_per_second == pytest.approx(200)


def test_figures_that_come_late_or_together_do_not_change_a_steps_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    # On H200 the last of twenty steps was reported 0.26 s behind the one before: 24,942 tok/s for 6,000.
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    sink = Heard()
    reporter = Reporter(sink, LAYOUT, rank=0, total_steps=3, first_step=1)
    reporter.begin()
    for step in (1, 2, 3):
        now[0] += step
        reporter.trained(step)
        if step > 1:
            reporter.step(replace(GOOD, step=step - 1), StepTraffic(epoch=0, tokens=600, lr=1e-4))
    now[0] += 0.01
    reporter.step(replace(GOOD, step=3), StepTraffic(epoch=0, tokens=600, lr=1e-4))
    speeds = [event.tokens_per_second for event in sink.events if isinstance(event, ev.Step)]
    assert speeds == pytest.approx([600, 300, 200])
