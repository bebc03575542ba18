"""The order of the training loop, seen by a session that only notes what is asked of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from remote.protocol.errors import DflashError
from trainer.train import TrainResult, train

TOTAL = 6


class Sums:
    def add(self, sums: Any, row: Any) -> None:
        return


@dataclass
class Noting:
    """Figures come `lag` steps late, as on a GPU; `stop_in` and `bad_in` are steps whose figures say so."""

    lag: int = 1
    stop_in: int = 0
    bad_in: int = 0
    every: int = 0
    step: int = 0
    notes: list[str] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    last_checkpoint: Path | None = None

    def steps(self) -> Any:
        yield from range(1, TOTAL + 1)

    @property
    def is_last(self) -> bool:
        return self.step == TOTAL

    def begin_step(self, step: int) -> Sums:
        self.step = step
        return Sums()

    def micro_batches(self, step: int) -> list[int]:
        return [] if step == 2 else [0, 1]

    def receive(self, micro_batch: int) -> int:
        return micro_batch

    def backward(self, row: int, *, last: bool) -> None:
        self.notes.append(f"backward {row}{' last' if last else ''}")

    def release(self, row: int) -> None:
        self.notes.append(f"release {row}")

    def stand_in(self, step: int) -> None:
        self.notes.append("stand in")

    def apply(self, step: int, sums: Sums) -> None:
        self.notes.append(f"apply {step}")

    def report(self, step: int, sums: Sums, outcome: None) -> bool:
        self.waiting.append(step)
        return self._report(self.lag)

    def report_rest(self) -> bool:
        return self._report(0)

    def _report(self, keep: int) -> bool:
        stops = []
        while len(self.waiting) > keep:
            step = self.waiting.pop(0)
            self.notes.append(f"report {step}")
            if step == self.bad_in:
                raise DflashError(f"step {step} is not finite")
            stops.append(step == self.stop_in)
        return any(stops)

    def profile_if_due(self) -> None:
        return

    def checkpoint_due(self, step: int) -> bool:
        return step == TOTAL or (self.every > 0 and step % self.every == 0)

    def measure(self, step: int) -> str:
        self.notes.append(f"measure {step}")
        return f"figures {step}"

    def save(self, step: int, held_out: str | None) -> None:
        assert held_out in (None, f"figures {step}")
        self.notes.append(f"save {step}")
        self.last_checkpoint = Path(f"step-{step}")

    def told(self, *words: str) -> list[str]:
        return [note for note in self.notes if note.startswith(words)]


def run(**values: Any) -> tuple[Noting, TrainResult]:
    session = Noting(**values)
    return session, train(session)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("lag", [0, 1])
def test_every_step_is_reported_before_the_checkpoint_that_holds_it(lag: int) -> None:
    session, result = run(lag=lag, every=3)
    assert session.told("report", "save") == [
        *("report 1", "report 2", "report 3", "save 3", "report 4", "report 5", "report 6", "save 6"),
    ]
    assert result == TrainResult("finished", TOTAL, Path("step-6"))


def test_a_stop_is_obeyed_one_step_late_and_saves_what_was_trained_and_reported() -> None:
    session, result = run(stop_in=3)
    assert session.told("apply", "report", "save")[-3:] == ["report 3", "report 4", "save 4"]
    assert result == TrainResult("stopped", 4, Path("step-4"))


def test_a_stop_that_a_checkpoint_brings_to_light_is_obeyed_at_once() -> None:
    session, result = run(stop_in=3, every=3)
    assert session.told("apply", "save")[-2:] == ["apply 3", "save 3"]
    assert result == TrainResult("stopped", 3, Path("step-3"))


def test_only_who_stops_early_waits_for_no_measurement() -> None:
    assert run(every=3)[0].told("measure", "save") == ["measure 3", "save 3", "measure 6", "save 6"]
    assert run(stop_in=3, every=3)[0].told("measure", "save") == ["save 3"]
    assert run(stop_in=TOTAL)[0].told("measure", "save") == ["measure 6", "save 6"]


def test_a_stop_in_the_last_step_changes_nothing() -> None:
    assert run(stop_in=TOTAL)[1] == TrainResult("finished", TOTAL, Path("step-6"))


@pytest.mark.parametrize("bad", [3, TOTAL])
def test_no_checkpoint_is_written_after_a_step_that_diverged(bad: int) -> None:
    session = Noting(bad_in=bad, every=3)
    with pytest.raises(DflashError):
        train(session)  # pyright: ignore[reportArgumentType]
    assert f"save {bad}" not in session.notes


def test_only_the_last_backward_of_a_step_meets_the_others_and_rows_are_released() -> None:
    session, _ = run()
    assert session.notes[:5] == ["backward 0", "release 0", "backward 1 last", "release 1", "apply 1"]
    assert session.notes[5:7] == ["stand in", "apply 2"]
