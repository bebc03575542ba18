"""The table of a profile: aligned, within the terminal, complete; whatever older or newer trainers send."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.profileview import profile_lines
from remote.protocol import events as ev

GIB = 1 << 30


def fields(event: ev.Event) -> dict[str, Any]:
    """What a reader of the log has of an event."""
    parsed = ev.parse_line(ev.render_line(event))
    assert parsed is not None
    return parsed


def pipeline(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "time": 1000.0, "interval": 60.0, "tokens_per_second": 14512.0, "target_tokens_per_second": 14870.0,
        "drafter_tokens_per_second": 21030.0, "target_wait": 0.029, "drafter_wait": 0.31, "ring_bytes": GIB // 2,
        "ring_capacity": 4 * GIB, "padding": 0.019, "limits": "targets",
    }  # fmt: skip
    return fields(ev.PipelineProfile(**values | changes))


def rank(number: int, role: str, stages: dict[str, float], **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"time": 999.0, "device": f"cuda:{number}", "interval": 60.0, "tokens": 6000}
    return fields(ev.StageProfile(rank=number, role=role, stages=stages, **values | changes))


def target(number: int, **changes: Any) -> dict[str, Any]:
    stages = {"read": 0.6, "target_forward": 54.0, "pack": 1.2, "wait_buffer": 3.0}
    return rank(number, "target", stages, copy_out=2.0, busy=0.92, **changes)


def drafter(number: int, **changes: Any) -> dict[str, Any]:
    stages = {"wait_states": 18.0, "forward": 12.0, "backward": 24.0, "all_reduce": 3.0, "optimizer": 1.2}
    return rank(number, "drafter", stages, copy_in=2.0, **changes)


FIVE_AND_THREE = [*map(target, range(5)), *map(drafter, range(5, 8))]


def cells(lines: list[str], label: str) -> list[str]:
    """The figures of the row that begins with `label`."""
    (line,) = [line for line in lines if line.startswith(f"{label} ")]
    return line.removeprefix(label).split()


def test_seconds_and_shares_of_one_and_one() -> None:
    lines = profile_lines(pipeline(), [target(0), drafter(1)], 60)
    assert lines[0] == "60 s at 14,512 tok/s, targets limit: targets wait 3%, drafters 31%"
    assert lines[1] == "without waiting: targets 14,870, drafters 21,030 tok/s"
    assert lines[2] == "padding 1.9%; ring 512.0 MiB of 4.0 GiB"
    assert cells(lines, "target cuda:0") == ["s", "%"]
    assert cells(lines, "wait for input") == ["0.6", "1.0"]
    assert cells(lines, "wait to publish") == ["3.0", "5.0"]
    assert cells(lines, "wait for states") == ["18.0", "30.0"]
    assert cells(lines, "all-reduce") == ["3.0", "5.0"]
    assert cells(lines, "(copy out)") == ["2.0", "3.3"]
    assert [line.split()[1:] for line in lines if line.startswith("other")] == [["1.2", "2.0"], ["1.8", "3.0"]]
    assert [line.split()[1:] for line in lines if line.startswith("total")] == [["60.0", "100.0"]] * 2
    assert not [line for line in lines if line.startswith(("MFU", "GiB"))]  # Nobody measured them.


def test_the_storys_eight_gpus_fit_80_columns_and_side_by_side_120() -> None:
    narrow, wide = (profile_lines(pipeline(), FIVE_AND_THREE, columns) for columns in (80, 120))
    assert max(map(len, narrow)) <= 80
    assert max(map(len, wide)) <= 120
    assert len(wide) <= 14 < len(narrow) <= 26
    assert cells(narrow, "5 targets") == ["s", "%", "#0", "#1", "#2", "#3", "#4"]
    assert cells(narrow, "3 drafters") == ["s", "%", "#5", "#6", "#7"]
    heading = next(line for line in wide if "5 targets" in line)
    assert "3 drafters" in heading
    # Each half is as it stands alone.
    assert next(line for line in wide if "wait for states" in line).endswith(
        next(line for line in narrow if "wait for states" in line)
    )


def test_columns_are_aligned() -> None:
    lines = profile_lines(pipeline(), FIVE_AND_THREE, 80)
    ends = {len(line) for line in lines if line.startswith(("wait for input", "total", "busy", "tok/s", "5 targets"))}
    assert len(ends) <= 2  # One for each role.


def test_a_slow_rank_is_seen_in_its_column() -> None:
    slow = target(1) | {"stages": {"target_forward": 59.0}}
    assert cells(profile_lines(pipeline(), [target(0), slow], 80), "forward") == ["56.5", "94.2", "90.0", "98.3"]


def test_more_ranks_than_columns_are_their_least_and_most() -> None:
    many = [target(number, tokens=6000 * (number + 1)) for number in range(12)]
    lines = profile_lines(pipeline(), many, 80)
    assert max(map(len, lines)) <= 80
    assert cells(lines, "12 targets") == ["s", "%", "least", "most"]
    assert cells(lines, "tok/s") == ["7800", "100", "1200"]
    assert "#11" in "".join(profile_lines(pipeline(), many, 120))


def test_memory_and_mfu_where_they_were_measured() -> None:
    gpus = [
        drafter(n, mfu=0.2 + n / 10, memory_reserved=n * GIB, memory_peak=GIB, memory_total=94 * GIB) for n in (1, 2)
    ]
    lines = profile_lines(pipeline(), gpus, 80)
    assert cells(lines, "MFU") == ["35.0", "30.0", "40.0"]
    assert cells(lines, "GiB held of 94") == ["2.0", "1.0", "2.0"]  # The fullest, for that one runs out first.
    assert cells(lines, "GiB at the peak") == ["1.0", "1.0", "1.0"]


def test_shared_roles_have_one_block_with_the_stages_of_both() -> None:
    stages = {"target_forward": 30.0, "pack": 0.5, "forward": 10.0, "backward": 18.0, "optimizer": 1.0}
    lines = profile_lines(pipeline(limits="neither"), [rank(n, "shared", stages) for n in range(8)], 80)
    assert max(map(len, lines)) <= 80
    assert "balanced" in lines[0]
    assert cells(lines, "8 shared")[2:] == [f"#{n}" for n in range(8)]
    assert cells(lines, "target forward")[:2] == ["30.0", "50.0"]
    assert not [line for line in lines if line.startswith("wait")]


def test_what_took_no_time_is_left_out_and_unknown_stages_have_their_names() -> None:
    lines = profile_lines(
        pipeline(), [drafter(0) | {"stages": {"forward": 1.0, "checkpoint": 0.0, "draw_a_picture": 6.0}}], 80
    )
    assert not [line for line in lines if line.startswith(("checkpoint", "held-out"))]
    assert cells(lines, "draw a picture") == ["6.0", "10.0"]


def test_a_rank_that_says_nothing_any_more_leaves_the_table() -> None:
    lines = profile_lines(pipeline(), [target(0, time=850.0), target(1), drafter(2)], 80)
    assert any(line.startswith("target cuda:1") for line in lines)


def test_the_lines_of_an_older_trainer_make_a_table() -> None:
    old = [
        '2026-11-30T17:36:17.854Z stage_profile role="target" device="cuda:0" interval=10.00 tokens=5 stages={"pack":0.5}',
        '2026-11-30T17:36:17.854Z stage_profile role="drafter" device="cuda:1" interval=10.00 tokens=5 stages={}',
    ]
    ranks = [ev.parse_line(line) for line in old]
    assert [each["rank"] for each in ranks if each] == [-1, -1]
    lines = profile_lines(pipeline() | {"time": ranks[0]["time"]}, [each for each in ranks if each], 60)  # pyright: ignore
    assert cells(lines, "pack") == ["0.5", "5.0"]
    assert any(line.startswith("drafter cuda:1") for line in lines)
    two = [each | {"role": "target"} for each in ranks if each]
    assert cells(profile_lines(pipeline() | {"time": two[0]["time"]}, two, 60), "2 targets") == ["s", "%", "0", "1"]


def test_without_any_rank_there_is_the_summary() -> None:
    assert len(profile_lines(pipeline(), [], 120)) == 2


NUMBERS = st.floats(-1e9, 1e9) | st.sampled_from([math.nan, math.inf, -math.inf])


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["target", "drafter", "shared", "other"]),
            st.dictionaries(st.sampled_from(["read", "forward", "blocks", "new_stage", "checkpoint"]), NUMBERS),
            NUMBERS,
        ),
        max_size=20,
    ),
    NUMBERS,
)
def test_no_figure_breaks_it(ranks: list[tuple[str, dict[str, float], float]], figure: float) -> None:
    profiles = [
        rank(number, role, stages, interval=interval, busy=figure)
        for number, (role, stages, interval) in enumerate(ranks)
    ]
    lines = profile_lines(pipeline(padding=figure, target_wait=figure), profiles, 80)
    assert len(lines) >= 2


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_no_line_is_longer_than_the_terminal(columns: int) -> None:
    for count in range(1, 20):
        ranks = [*map(target, range(count)), *map(drafter, range(count, 2 * count))]
        assert max(map(len, profile_lines(pipeline(), ranks, columns))) <= columns
