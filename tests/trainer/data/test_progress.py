from __future__ import annotations

import re

import pytest

from trainer.data.progress import Progress

LINE = re.compile(r"^(\w+): (\d+)(?:/(\d+))? rows, ([\d,]+) tokens, ([\d,]+) tok/s(?:, ([\d,]+) s left)?$")


def said(capsys: pytest.CaptureFixture[str]) -> list[re.Match[str]]:
    captured = capsys.readouterr()
    assert captured.out == "", "stdout is for data"
    found = [LINE.match(line) for line in captured.err.splitlines()]
    assert all(found)
    return [match for match in found if match]


def test_counts_add_up_and_an_estimate_is_given_in_between(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("generate", 4, every_s=0)
    for _ in range(4):
        progress.add(1, 1000)
    lines = said(capsys)
    assert [line.group(2, 3, 4) for line in lines] == [(str(i), "4", f"{i},000") for i in range(1, 5)]
    assert [line.group(6) is not None for line in lines] == [True, True, True, False]


def test_it_is_quiet_until_its_time_has_come(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("prepare", every_s=3600)
    progress.add(5, 10)
    assert said(capsys) == []
    progress.say()
    (line,) = said(capsys)
    assert line.group(1, 2, 3, 4) == ("prepare", "5", None, "10")


def test_nothing_done_is_no_division_by_zero(capsys: pytest.CaptureFixture[str]) -> None:
    Progress("prepare", 0).say()
    assert said(capsys)[0].group(4) == "0"
