from __future__ import annotations

import io
import re
import sys

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
    with Progress("prepare", every_s=3600) as progress:
        progress.add(5, 10)
        assert said(capsys) == []
    (line,) = said(capsys)
    assert line.group(1, 2, 3, 4) == ("prepare", "5", None, "10")


def test_nothing_done_is_no_division_by_zero(capsys: pytest.CaptureFixture[str]) -> None:
    Progress("prepare", 0).say()
    assert said(capsys)[0].group(4) == "0"


def test_a_share_that_the_caller_knows_gives_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    Progress("prepare", every_s=0).add(5, 10, share=0.5)
    (line,) = said(capsys)
    assert line.group(6) is not None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("prepare", every_s=0) as progress:
        progress.add(5, 10, share=0.5)
        progress.add(5, 10, share=1.0)
    frames = terminal.getvalue().removesuffix("\n").split("\r")[1:]
    assert terminal.getvalue().count("\n") == 1
    assert frames[0].startswith("━" * 12 + "─" * 12 + "  50% prepare: 5 rows")
    assert frames[-1].startswith("━" * 24 + " 100% prepare: 10 rows")
    assert all(frame.endswith("\x1b[K") for frame in frames)


def test_a_failure_is_not_reported_as_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), Progress("prepare"):
        raise RuntimeError
    assert said(capsys) == []
