"""Run ids: they sort by age, differ, and are safe as file names."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from remote.protocol.layout import is_run_id, new_run_id


def test_ids_of_one_person_sort_by_age_within_a_second():
    # Random digits alone had the newest of two runs of one second be the older one, half of the time.
    drawn: list[str] = []
    for _ in range(50):
        drawn.append(new_run_id())
        time.sleep(1 / 2048)
    assert drawn == sorted(drawn)
    assert all(is_run_id(run_id) for run_id in drawn)


def test_ids_drawn_at_the_same_time_differ():
    # 4,096 for each 1/4096 s: of three at once two are the same once in 1,400 times, so a few of many tell enough.
    assert len({new_run_id() for _ in range(64)}) > 48


@given(st.text(alphabet="0123456789abcdef-/.\n", max_size=24))
def test_nothing_that_leaves_the_directory_of_runs_is_an_id(text: str):
    assert not is_run_id(text) or ("/" not in text and "." not in text and "\n" not in text)


def test_a_newline_behind_an_id_makes_it_none():
    assert not is_run_id(new_run_id() + "\n")
