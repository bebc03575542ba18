"""What travels: the bytes of every slot are the same in both modes (rule 9), and are what the target's layers put out.

And what a run says of a slot whose bytes were changed on the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from races.in_process import Slots, run_both, slots_of_a_run

from remote.protocol import events as ev
from remote.protocol.errors import DflashError
from trainer.pipeline.layout import Layout, Role
from trainer.pipeline.ring import Ring, SlotHeader

FORMS: dict[str, dict[str, Any]] = {
    "packed, bfloat16": {"dtype": "bfloat16"},
    "split, float64": {"split_fc": "on"},
    "split with the teacher's layer, float32": {"split_fc": "on", "dtype": "float32", "kl_weight": 0.5},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_slot_holds_the_same_bytes_in_both_modes(
    tiny_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    values = tiny_values | FORMS[form]

    def slots(mode: str) -> Slots:
        return slots_of_a_run(values | {"transfer": mode}, tmp_path, monkeypatch)

    asynchronous = slots("async")
    assert slots("sync") == asynchronous
    assert sorted(asynchronous) == list(range(16))
    # All different, or the comparison says nothing.
    assert len({states for states, *_ in asynchronous.values()}) == 16


def spoil(patch: pytest.MonkeyPatch, batch: int, value: float) -> None:
    """Change one number of a batch's states in the ring, once the target is done with it."""
    write = Ring.write_header

    def write_header(ring: Ring, pair: int, slot: int, header: SlotHeader) -> None:
        if header.batch == batch:
            ring.view(pair, slot, header).states[5, 3] = value
        write(ring, pair, slot, header)

    patch.setattr(Ring, "write_header", write_header)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_wrong_copy_is_an_alarm_and_the_run_goes_on(
    tiny_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    spoil(monkeypatch, 7, 0.25)
    events = run_both(tiny_values | {"transfer": mode}, tmp_path)
    (alarm,) = (each for each in events if isinstance(each, ev.AlarmRaised))
    seen = "batch 7: finite when packed on the CPU (rank 0), wrong on the CPU (rank 1)"
    assert (alarm.alarm, alarm.message, alarm.step, alarm.rank) == ("wrong_copy", seen, 3, 1)


def test_a_copy_that_is_not_finite_stops_the_run_and_names_both_sides(
    tiny_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 7, float("nan"))
    with pytest.raises(DflashError) as stopped:
        run_both(tiny_values | {"verify_copies": "off"}, tmp_path)
    assert stopped.value.error == "step 3 is not finite"
    places = "packed on the CPU (rank 0), and are not on the CPU (rank 1)"
    assert str(stopped.value.cause).startswith(f"the states of batch 7 were finite when {places}")


def test_a_place_is_named_by_its_gpu_and_its_rank() -> None:
    split, shared = Layout("cuda", (0, 2), (6, 7)), Layout("cuda", (3, 5), (3, 5))
    assert split.place(Role.TARGET, 1) == "GPU 2 (rank 1)"
    assert split.place(Role.DRAFTER, 0) == "GPU 6 (rank 2)"
    assert split.place(Role.DRAFTER, 1, machine=1) == "GPU 7 (rank 7)"
    assert shared.place(Role.TARGET, 1) == shared.place(Role.DRAFTER, 1) == "GPU 5 (rank 1)"
    assert Layout("cpu", (0,), (1,)).place(Role.DRAFTER, 0) == "the CPU (rank 1)"
