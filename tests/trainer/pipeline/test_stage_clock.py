"""Where a rank's time goes: stages add up to the interval, and on a device that is behind its host they are the device's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as distributed
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from remote.protocol import events as ev
from trainer.pipeline.copier import CudaCopier, HostCopier
from trainer.pipeline.stage_clock import CudaTimeline, timeline_of, when_gradients_are_made
from trainer.telemetry import WORK_STAGES, HostTimeline, StageClock


@dataclass
class Device:
    """A device that works through what it was given while its host goes on, and its timeline."""

    host: float = 0.0
    done_at: float = 0.0
    alive: int = 0
    most: int = 0
    asked: list[float] = field(default_factory=list)

    def launch(self, seconds: float) -> None:
        self.done_at = max(self.done_at, self.host) + seconds

    def now(self) -> float:
        self.alive += 1
        self.most = max(self.most, self.alive)
        self.launch(0.0)
        return self.done_at

    def seconds(self, start: float, end: float) -> float | None:
        return end - start if end <= self.host else None

    def forget(self, moment: float) -> None:
        self.alive -= 1


def read(clock: StageClock) -> ev.StageProfile:
    return clock.read(role="target", device="cuda:0", rank=3)


def test_a_launch_counts_as_what_the_device_does_and_a_wait_as_what_it_stands_idle_for() -> None:
    device = Device()
    clock = StageClock(device)
    with clock.stage("forward"):
        device.launch(5)
        device.host += 0.1
    with clock.stage("wait_buffer"):
        device.host += 4  # The device is busy all the while.
    with clock.stage("forward"):
        device.launch(5)
    with clock.stage("wait_states"):
        device.host += 8  # Until 12.1; the device was done at 10.
    profile = read(clock)
    assert profile.stages == pytest.approx({"forward": 10, "wait_buffer": 0, "wait_states": 2.1})
    assert profile.interval == pytest.approx(12.1)
    assert profile.busy == pytest.approx(10 / 12.1)


def test_the_hosts_clock_around_the_same_launches_would_have_said_the_opposite() -> None:
    device, told = Device(), {}
    for name, launched, spent in (("forward", 5, 0.1), ("wait_buffer", 0, 4)):
        began = device.host
        device.launch(launched)
        device.host += spent
        told[name] = device.host - began
    assert told == pytest.approx({"forward": 0.1, "wait_buffer": 4})


def test_what_the_device_has_not_reached_is_the_next_intervals_with_its_tokens() -> None:
    device = Device()
    clock = StageClock(device)
    for _ in range(2):
        with clock.stage("forward"):
            device.launch(5)
        clock.add_tokens(100)
        clock.add_flops(1e3)
    device.host = 6
    first = read(clock)
    assert (first.stages, first.interval, first.tokens) == ({"forward": 5.0}, 5.0, 100)
    device.host = 20
    second = read(clock)
    assert second.stages == {"forward": 5.0}
    assert (second.tokens, second.interval, second.flops_per_second) == (100, 15.0, 1e3 / 15)
    assert read(clock).interval == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(["forward", "wait_states", "blocks", ""]), st.floats(0, 3), st.floats(0, 3)), max_size=30
)


@given(STEPS, st.lists(st.integers(0, 30), max_size=4))
def test_whatever_happens_stages_and_the_rest_are_the_time_once_and_whole(
    steps: list[tuple[str, float, float]], reads: list[int]
) -> None:
    device = Device()
    clock = StageClock(device)
    profiles: list[ev.StageProfile] = []
    for number, (name, launched, spent) in enumerate(steps):
        if name:
            with clock.stage(name):
                device.launch(launched)
                device.host += spent
        else:
            device.host += spent
        clock.add_tokens(1)
        if number in reads:
            profiles.append(read(clock))
    device.host = max(device.host, device.done_at)
    end = device.host
    profiles.append(read(clock))
    assert sum(each.interval for each in profiles) == pytest.approx(end)
    assert sum(each.tokens for each in profiles) == len(steps)
    for each in profiles:
        assert all(seconds >= 0 for seconds in each.stages.values())
        assert sum(each.stages.values()) <= each.interval + 1e-6
    assert device.alive == 1  # The moment at which the next segment begins.


def test_as_many_moments_exist_as_are_on_their_way() -> None:
    device = Device()
    clock = StageClock(device)
    for _ in range(1000):
        with clock.stage("forward"):
            device.launch(1)
        device.host = device.done_at
    assert device.most <= 4


def test_a_stage_inside_another_is_not_counted_twice() -> None:
    device = Device()
    clock = StageClock(device)
    with clock.stage("held_out"):
        device.host += 1
        with clock.stage("wait_states"):
            device.host += 2
        device.host += 4
    device.host += 8
    profile = read(clock)
    assert profile.stages == {"held_out": 5.0, "wait_states": 2.0}
    assert profile.interval == 15


def test_a_stage_may_turn_into_another_before_its_end() -> None:
    device = Device()
    clock = StageClock(device)
    with clock.stage("backward"):
        device.launch(3)
        clock.turn_to("all_reduce")
        device.launch(4)
        assert clock.current == "all_reduce"
    assert clock.current == ""
    device.host = 7
    assert read(clock).stages == {"backward": 3.0, "all_reduce": 4.0}


def test_a_stage_that_fails_is_counted_and_stays_the_one_that_the_rank_is_in() -> None:
    class Broken(Device):
        def now(self) -> float:
            if self.host > 0:
                raise AssertionError("a device in error takes no moments")
            return super().now()

    device = Broken()
    clock = StageClock(device)

    def fail() -> None:
        device.host += 1
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"), clock.stage("backward"):
        fail()
    assert clock.current == "backward"


def test_a_failure_that_is_survived_costs_no_later_time() -> None:
    device = Device()
    clock = StageClock(device)

    def fail() -> None:
        device.host += 1
        raise OSError("the disk is full")

    with clock.stage("held_out"):
        with pytest.raises(OSError), clock.stage("checkpoint"):
            fail()
        with clock.stage("forward"):
            device.host += 2
        device.host += 4
    device.host += 8
    profile = read(clock)
    assert profile.stages == {"checkpoint": 1.0, "forward": 2.0, "held_out": 4.0}
    assert profile.interval == 15


def test_a_failure_is_counted_too() -> None:
    clock = StageClock()
    with pytest.raises(RuntimeError), clock.stage("forward"):
        raise RuntimeError
    assert "forward" in read(clock).stages


def test_what_went_before_the_beginning_is_no_time_of_the_run() -> None:
    device = Device()
    clock = StageClock(device)
    with clock.stage("target_forward"):
        device.launch(60)
    clock.add_tokens(5)
    clock.add_flops(5)
    device.host = 61
    clock.begin()
    device.host = 63
    profile = read(clock)
    assert (profile.stages, profile.interval, profile.tokens, profile.flops_per_second) == ({}, 2.0, 0, 0.0)


def test_stages_are_annotated_while_somebody_wants_it() -> None:
    import contextlib

    clock, names = StageClock(), []

    @contextlib.contextmanager
    def note(name):
        names.append(name)
        yield

    clock.annotate = note
    with clock.stage("forward"), clock.stage("pack"):
        pass
    assert names == ["forward", "pack"]


def test_copies_and_counts_come_from_any_thread_and_overlap_the_stages() -> None:
    clock = StageClock()
    clock.ring_bytes = 77

    def copy() -> None:
        for _ in range(2000):
            clock.copied("copy_out", 1.0)
            clock.copied("copy_in", 0.5)
            clock.add_tokens(1)

    threads = [threading.Thread(target=copy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    profile = read(clock)
    assert (profile.copy_out, profile.copy_in, profile.tokens) == (8000.0, 4000.0, 8000)
    assert (profile.rank, profile.role, profile.stages, profile.ring_bytes) == (3, "target", {}, 77)
    assert read(clock).copy_out == 0


def test_the_hosts_timeline_is_a_clock() -> None:
    timeline = timeline_of(torch.device("cpu"))
    assert isinstance(timeline, HostTimeline)
    began = timeline.now()
    assert timeline.seconds(began, began + 2) == 2
    assert began <= time.monotonic()


def test_a_copy_on_the_host_says_how_long_it_took() -> None:
    copier = HostCopier()
    mark = copier.copy(torch.zeros(1 << 20), torch.ones(1 << 20), after=copier.mark())
    assert mark.seconds() > 0
    assert copier.mark().seconds() == 0


def test_a_gpus_events_are_used_again_and_only_ever_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeEvent] = []

    class FakeEvent:
        """What CudaTimeline may use of an event: there is no `synchronize`, and a new record forgets the old."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            made.append(self)

        def record(self, stream: str) -> None:
            assert stream == "current of cuda:1"
            device.launch(0.0)
            self.at = device.done_at

        def query(self) -> bool:
            return self.at <= device.host

        def elapsed_time(self, end: FakeEvent) -> float:
            assert self.query()
            assert end.query()
            return (end.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: f"current of {of}")
    device = Device()
    timeline = timeline_of(torch.device("cuda:1"))
    assert isinstance(timeline, CudaTimeline)
    clock = StageClock(timeline)
    for _ in range(100):
        with clock.stage("forward"):
            device.launch(2)
        device.host += 1
        with clock.stage("wait_states"):
            device.host += 3  # The device needs one second of them.
    profile = read(clock)
    assert profile.stages == pytest.approx({"forward": 200, "wait_states": 200})
    assert profile.interval == pytest.approx(400)
    assert len(made) <= 6


# ---- where backward ends and the waiting for the others begins


def test_gradients_are_made_but_not_yet_the_others_when_we_are_called() -> None:
    from torch.autograd import Variable

    weight = torch.ones(3, requires_grad=True)
    seen: list[tuple[str, bool]] = []

    def others(_: torch.Tensor) -> None:
        # What DistributedDataParallel does when a parameter's gradient is there.
        Variable._execution_engine.queue_callback(lambda: seen.append(("others", weight.grad is not None)))

    weight.register_hook(others)
    for _ in range(2):
        weight.grad = None
        loss = (weight * 2).sum()
        when_gradients_are_made(loss, lambda: seen.append(("ours", weight.grad is not None)))
        loss.backward()
    assert seen == [("ours", True), ("others", True)] * 2


@pytest.fixture
def group() -> Iterator[distributed.ProcessGroup]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD  # pyright: ignore
    distributed.destroy_process_group()


@pytest.mark.timeout(60)
def test_distributed_data_parallel_waits_for_the_others_behind_our_call(group: distributed.ProcessGroup) -> None:
    # Its all-reduce ends when we are called: had it been waited for before, this would stand still for ever.
    on_their_way: list[tuple[torch.futures.Future, torch.Tensor]] = []

    def all_reduce(_, bucket):
        on_their_way.append((torch.futures.Future(), bucket.buffer()))
        return on_their_way[-1][0]

    model = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group, gradient_as_bucket_view=True)
    model.register_comm_hook(None, all_reduce)
    device = Device()
    clock = StageClock(device)

    def others_arrive() -> None:
        clock.turn_to("all_reduce")
        device.host += 5
        for future, gradients in on_their_way:
            future.set_result(gradients)
        on_their_way.clear()

    for step in range(2):
        loss = model(torch.ones(4, 3)).sum()
        with clock.stage("backward"):
            when_gradients_are_made(loss, others_arrive)
            loss.backward()
        assert read(clock).stages == {"backward": 0.0, "all_reduce": 5.0}, step
    assert clock.current == ""


# ---- on a GPU

LATE = 200_000_000
"""Cycles: about 0.1 s at 2 GHz."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu_the_devices_time_is_counted_not_the_launches() -> None:
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    timeline = CudaTimeline(device)
    clock = StageClock(timeline)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize(device)
    clock.begin()
    for _ in range(3):
        with clock.stage("forward"):
            torch.cuda._sleep(LATE)
        with clock.stage("wait_buffer"):
            pass
    began = time.monotonic()
    early = read(clock)
    assert time.monotonic() - began < 0.05  # It did not wait for 0.3 s of work.
    assert early.stages.get("forward", 0.0) < 0.02
    torch.cuda.synchronize(device)
    with clock.stage("wait_states"):
        time.sleep(0.2)
    torch.cuda.synchronize(device)
    late = read(clock)
    torch.cuda.synchronize(device)
    rest = read(clock)
    stages = {name: late.stages.get(name, 0.0) + rest.stages.get(name, 0.0) for name in {*late.stages, *rest.stages}}
    one = stages["forward"] / 3
    assert 0.02 < one < 1.0
    assert stages["wait_buffer"] < 0.01
    assert 0.15 < stages["wait_states"] < 0.5
    assert sum(stages.values()) <= late.interval + rest.interval + 1e-3
    assert len(timeline._free) <= 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu_a_copys_time_begins_behind_its_producer() -> None:
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    copier = CudaCopier(device)
    source, host = torch.zeros(1 << 20, device=device), torch.zeros(1 << 20).pin_memory()
    torch.cuda._sleep(LATE)
    mark = copier.copy(host, source, after=copier.mark())
    mark.wait_host()
    assert 0 < mark.seconds() < 0.02
    assert copier.mark().seconds() == 0


def test_what_counts_as_work_is_no_wait() -> None:
    assert not [name for name in WORK_STAGES if name.startswith("wait")]
