"""What a rank says of itself: where it is, for whom it waits, and when it last got on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from trainer.pipeline.pulse import Pulse
from trainer.telemetry import StageClock


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@contextmanager
def elsewhere(enter: Callable[[ExitStack], None], name: str) -> Iterator[None]:
    """Let another thread of the rank stand inside what `enter` enters."""
    inside, leave = threading.Event(), threading.Event()

    def stand() -> None:
        with ExitStack() as stack:
            enter(stack)
            inside.set()
            leave.wait()

    thread = threading.Thread(target=stand, name=name)
    thread.start()
    inside.wait()
    yield
    leave.set()
    thread.join()


def test_whatever_begins_or_ends_is_progress(clock: Clock) -> None:
    pulse = Pulse(clock)
    seen = [pulse.moved]
    for time, context in ((1.0, pulse.stage("forward")), (5.0, pulse.waiting("drafter 0"))):
        clock.time = time
        with context:
            seen.append(pulse.moved)
            clock.time += 1
        seen.append(pulse.moved)
    clock.time = 9.0
    pulse.beat()
    assert [*seen, pulse.moved] == [0.0, 1.0, 2.0, 5.0, 6.0, 9.0]


def test_the_innermost_stage_is_what_it_does() -> None:
    pulse = Pulse()
    assert pulse.doing() == "between two stages"
    with pulse.stage("held_out"):
        with pulse.stage("pack"):
            assert pulse.doing() == "pack"
        assert pulse.doing() == "held_out"
        with pytest.raises(ValueError), pulse.stage("read"):
            raise ValueError
        assert pulse.doing() == "held_out"
    assert pulse.doing() == "between two stages"


def test_only_a_wait_for_another_rank_excuses() -> None:
    pulse = Pulse()
    assert pulse.awaited() == ""
    with pulse.stage("target_forward"):
        assert pulse.awaited() == ""
        with pulse.waiting("drafter 0 (rank 1)"):
            assert pulse.awaited() == "drafter 0 (rank 1)"
        assert pulse.awaited() == ""


def test_a_wait_for_a_thread_of_ours_is_excused_by_what_that_thread_does() -> None:
    pulse = Pulse()
    with pulse.stage("wait_buffer"):
        assert pulse.awaited() == ""  # the publisher copies: a copy that hangs is our own
        with elsewhere(lambda stack: stack.enter_context(pulse.stage("copy_out")), "publisher"):
            assert (pulse.awaited(), pulse.doing()) == ("", "wait_buffer; publisher: copy_out")
        with elsewhere(lambda stack: stack.enter_context(pulse.waiting("drafter 0 (rank 1)")), "publisher"):
            assert pulse.awaited() == "drafter 0 (rank 1)"
            assert pulse.doing() == "wait_buffer; publisher: waits for drafter 0 (rank 1)"


def test_work_of_the_main_thread_is_not_excused_by_a_thread_that_waits() -> None:
    pulse = Pulse()
    with (
        pulse.stage("forward"),
        elsewhere(lambda stack: stack.enter_context(pulse.waiting("target 0 (rank 0)")), "prefetch"),
    ):
        assert pulse.awaited() == ""


def test_stages_of_the_clock_are_told(clock: Clock) -> None:
    pulse = Pulse(clock)
    stages = StageClock(pulse)
    clock.time = 3.0
    with stages.stage("pack"):
        assert (pulse.doing(), pulse.moved) == ("pack", 3.0)
    assert stages.read(role="target", device="cpu", rank=0).stages.keys() == {"pack"}
