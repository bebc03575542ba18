"""What a rank says of itself: where it is, for whom it waits, and when it last got on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from remote.protocol.events import Event
from trainer.pipeline.pulse import Pulse
from trainer.telemetry import PhaseLog, StageClock


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
def elsewhere(pulse: Pulse, whom: str, name: str) -> Iterator[None]:
    """Let another thread of the rank wait for somebody."""
    inside, leave = threading.Event(), threading.Event()

    def stand() -> None:
        with pulse.waiting(whom):
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
    clock.time = 1.0
    pulse.turn_to("forward")
    seen.append(pulse.moved)
    clock.time = 5.0
    with pulse.waiting("drafter 0"):
        seen.append(pulse.moved)
        clock.time = 6.0
    seen.append(pulse.moved)
    clock.time = 9.0
    pulse.beat()
    assert [*seen, pulse.moved] == [0.0, 1.0, 5.0, 6.0, 9.0]


def test_only_a_wait_for_another_rank_excuses() -> None:
    pulse = Pulse()
    assert (pulse.awaited(), pulse.doing()) == ("", "")
    with pulse.inside("figures"):
        assert pulse.doing() == "figures"
    pulse.turn_to("backward")
    assert pulse.awaited() == ""
    with pulse.waiting("the other ranks"):
        with pulse.waiting("drafter 0 (rank 1)"):
            assert pulse.awaited() == "drafter 0 (rank 1)"
        assert pulse.awaited() == "the other ranks"
        assert pulse.doing() == "backward"
    pulse.turn_to("all_reduce")
    assert pulse.awaited() == "the other drafters"
    pulse.turn_to("optimizer")
    assert pulse.awaited() == ""
    with pytest.raises(ValueError), pulse.waiting("drafter 0"):
        raise ValueError
    assert pulse.awaited() == ""


def test_a_wait_for_a_thread_of_ours_is_excused_by_what_that_thread_does() -> None:
    pulse = Pulse()
    pulse.turn_to("wait_buffer")
    assert pulse.awaited() == ""  # the publisher copies: a copy that hangs is our own
    with elsewhere(pulse, "drafter 0 (rank 1)", "publisher"):
        assert pulse.awaited() == "drafter 0 (rank 1)"
        assert pulse.doing() == "wait_buffer; publisher waits for drafter 0 (rank 1)"
    assert pulse.awaited() == ""


def test_work_of_the_main_thread_is_not_excused_by_a_thread_that_waits() -> None:
    pulse = Pulse()
    pulse.turn_to("forward")
    with elsewhere(pulse, "target 0 (rank 0)", "prefetch"):
        assert pulse.awaited() == ""


def test_stages_of_the_clock_are_told(clock: Clock) -> None:
    stages = StageClock()
    stages.pulse = pulse = Pulse(clock)
    clock.time = 3.0
    with stages.stage("held_out"):
        with stages.stage("pack"):
            assert (pulse.stage, pulse.moved) == ("pack", 3.0)
        assert pulse.stage == "held_out"
    assert pulse.stage == ""


def test_what_fails_in_a_phase_within_another_is_filed_under_it() -> None:
    class Sink:
        def emit(self, event: Event) -> None: ...

        def close(self) -> None: ...

    phases = PhaseLog(Sink(), role="drafter", rank=1)
    with phases.phase("training", "12 steps"):
        assert (phases.current, phases.detail) == ("training", "12 steps")
        with phases.within("saving"):
            assert phases.current == "saving"
        assert phases.current == "training"
        with pytest.raises(OSError), phases.within("saving"):
            raise OSError
        assert phases.current == "saving"
