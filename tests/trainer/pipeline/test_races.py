"""The order of copies on a device that is late: the trainer's own is right, and each wrong order of the story is caught.

By two: by who reads the states, and by `--verify-copies all`. The same races run on a GPU in test_cuda.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from races.rig import LATE, RACES, Outcome, late_rig, put_back

MODES = ["async", "sync"]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("late", [*LATE[:-1], "everything"])
def test_the_order_is_right_whoever_is_late(tmp_path: Path, mode: str, split: bool, late: str) -> None:
    who = LATE if late == "everything" else (late,)
    with late_rig(tmp_path / "ring", mode=mode, split=split, late=who, seconds=0.004) as rig:
        assert rig.run() == Outcome()
        # And nobody waits for the device but the two background threads, for the marks of their copies.
        assert (rig.near.waits, rig.far.waits) == ([], [])


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", RACES)
def test_every_race_of_the_story_is_caught(tmp_path: Path, name: str, split: bool) -> None:
    race, outcome = RACES[name], Outcome()
    # A machine that stands still for as long as the late side sleeps hides a race: then it sleeps longer.
    for seconds in (0.03, 0.1, 0.4):
        with (
            put_back(race),
            late_rig(tmp_path / "ring", mode="async", split=split, late=(race.late,), seconds=seconds) as rig,
        ):
            outcome = rig.run()
        if outcome.wrong and outcome.alarms:
            break
    assert outcome.wrong, "who reads the states met none that was wrong"
    assert outcome.alarms, "verification saw nothing"
    batch = outcome.alarms[0].partition(":")[0]
    assert batch in {f"batch {each}" for each in outcome.wrong}
    assert all("packed on GPU 2 (rank 2)" in each for each in outcome.alarms)
