"""What a person sees, without a terminal: plain, complete, harmless."""

from __future__ import annotations

import dataclasses
import io
import os
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.console import OUT, Stream, harmless, width
from dflashctl.training import Training
from dflashctl.views import (
    alarm_lines,
    duration,
    event_text,
    finished_text,
    first_step_line,
    plan_lines,
    runs_lines,
    size,
    status_lines,
    table,
    wrapped,
)
from remote.protocol import events as ev
from remote.protocol.records import Alarm, HeldOut, Lifecycle, RunStatus
from trainer.config import TrainConfig, config_flags

STATUS = RunStatus(
    "20261130-120000-abcdef",
    "running",
    step=12,
    total_steps=200,
    loss=7.5,
    tokens_per_second=12345.6,
    topology="5 targets / 3 drafters",
    created=1000.0,
    last_event=1059.0,
    phase="training",
    by="me@laptop",
)
STEP = ev.Step(
    time=0.0, step=1, total_steps=9, epoch=0, loss=11.94, accuracy=0, accept_len=1, lr=1, grad_norm=1, tokens=1,
    tokens_per_second=1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (60, "1m 00s"), (3725, "1h 02m"), (200_000, "2d 7h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3.46e9, "3.2 GiB"), (5e12, "4656.6 GiB")]
)
def test_sizes(count, text):
    assert size(count) == text


def test_the_card_of_a_living_run():
    text = "\n".join(status_lines(STATUS, "local", OUT, now=1060.0))
    for words in (
        "running",
        "12 of 200 (6%)",
        "7.5000",
        "12,346 tok/s",
        "5 targets / 3 drafters",
        "1.0 s ago",
        "by me",
    ):
        assert words in text
    assert "\x1b" not in text


def test_alarms_lead_and_a_failed_run_shows_its_traceback():
    failed = dataclasses.replace(
        STATUS,
        state="failed",
        traceback="Traceback:\n  boom\x1b[2J",
        message="rank 3",
        hint="lower this",
        alarms=(Alarm("stall", "a\nb", 1.0),),
    )
    lines = status_lines(failed, "container 200 on h", OUT, now=1060.0)
    assert lines[0] == "ALARM stall: a\\x0ab"
    assert lines[-1] == "    boom\\x1b[2J"
    assert "hint        lower this" in lines
    assert not [line for line in lines if line.startswith(("phase", "last sign"))]


def test_held_out_figures_the_best_checkpoint_and_refused_steps():
    best = HeldOut(6, 2.5, 0.25, 1.5, "/c/step-6")
    shown = dataclasses.replace(
        STATUS,
        held_out=HeldOut(9, 2.75, 0.2, float("nan"), "/c/step-9"),
        best=best,
        last_checkpoint="/c/step-9",
        not_applied=1,
    )
    lines = status_lines(shown, "local", OUT, now=1060.0)
    assert "held-out    loss 2.7500, accuracy 0.200, accept nan at step 9" in lines
    assert "not applied 1 step" in lines
    at = lines.index("best        held-out loss 2.5000 at step 6")
    assert lines[at - 1 : at + 2 : 2] == ["checkpoint  /c/step-9", "            /c/step-6"]
    newest = status_lines(dataclasses.replace(shown, last_checkpoint="/c/step-6", not_applied=2), "local", OUT)
    assert "best        the newest, held-out loss 2.5000 at step 6" in newest
    assert "not applied 2 steps" in newest
    without = "\n".join(status_lines(STATUS, "local", OUT))
    assert not [word for word in ("held-out", "best", "not applied") if word in without]


def test_a_phase_is_written_as_people_write_it():
    assert "phase       warm-up" in status_lines(dataclasses.replace(STATUS, phase="warmup"), "local", OUT)
    assert (
        event_text(ev.Phase(time=0, role="target", phase="warmup", detail="(128, 24)")) == "target: warm-up (128, 24)"
    )


@pytest.mark.parametrize("state", list(Lifecycle))
def test_every_state_has_a_card(state):
    assert status_lines(RunStatus("", str(state)), "local", OUT)


@given(st.text())
def test_nothing_foreign_drives_the_terminal(text):
    shown = harmless(text)
    assert not [letter for letter in shown if letter != "\t" and (ord(letter) < 32 or 127 <= ord(letter) < 160)]


def test_the_table_of_runs_is_aligned():
    short = dataclasses.replace(STATUS, run_id="r", state="lost", loss=None, total_steps=0, created=0.0)
    heading, first, second = runs_lines([STATUS, short], OUT, now=1060.0)
    assert heading.index("step") == first.index("12/200") == second.index("12")
    assert table(("a",), [], OUT) == ["a"]


def test_the_plan_shows_every_key_and_marks_what_differs(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    config = TrainConfig.from_mapping({"lr": 0.5, "target_model": "/m", "target_gpus": [0, 1], "drafter_gpus": [2]})
    lines = plan_lines(Training(config, {}, "/c.toml", "--config"), OUT)
    text = " ".join(lines)
    empty = {flag.key for flag in config_flags() if config.to_dict()[flag.key] in ("", [])}
    assert [flag.key for flag in config_flags() if f" {flag.key}=" not in text and flag.key not in empty] == []
    for word in ("lr=0.5*", "target_model=/m*", "target_gpus=0,1*", "drafter_gpus=2*", "epochs=6 "):
        assert word in text
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120


@given(st.lists(st.text("abc", min_size=1, max_size=30), max_size=30), st.integers(5, 60))
def test_wrapping_loses_no_word_and_breaks_none(words, columns):
    lines = wrapped(words, columns)
    assert [word for line in lines for word in line] == words
    assert all(len(line) <= 1 or sum(map(len, line)) + len(line) - 1 <= columns for line in lines)


def test_the_width_is_bounded(monkeypatch):
    for columns, expected in (("20", 40), ("100", 100), ("500", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        assert width() == expected


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (ev.Phase(time=0, role="target", phase="loading", detail="/m", seconds=12.0), "target: loading /m (12 s)"),
        (ev.Phase(time=0, role="agent", phase="preflight"), "preflight"),
        (ev.SaveProgress(time=0, step=3, written=1 << 30, total=24 << 30), "saving step 3: 1.0 GiB of 24.0 GiB"),
        (
            ev.WarmedUp(
                time=0,
                role="target",
                device="cuda:0",
                shape="8 x 512",
                seconds=0.45,
                peak_bytes=54 << 30,
                free_bytes=(21 << 30) + (300 << 20),
            ),
            "target on cuda:0: 8 x 512 in 0.5 s, 21.3 GiB left at a peak of 54.0 GiB",
        ),
        (
            ev.WarmedUp(time=0, role="drafter", device="cpu", shape="64 tokens, 9 blocks", seconds=0.1),
            "drafter on cpu: 64 tokens, 9 blocks in 0.1 s",
        ),
        (ev.AlarmRaised(time=0, alarm="stall", message="m"), "ALARM stall: m"),
        (ev.Message(time=0, level="info", text="hello"), "hello"),
        (ev.RunFinished(time=0, result="stopped", step=4), "stopped at step 4"),
        (
            ev.RunFinished(time=0, result="finished", step=4, tokens=9, not_applied=2),
            "finished at step 4, 2 steps not applied",
        ),
        (
            ev.HeldOutMeasured(time=0, step=8, loss=3.5, accuracy=0.25, accept_len=1.75, seconds=2.0),
            "held-out loss 3.5000, accuracy 0.250, accept 1.75 at step 8",
        ),
        (
            ev.CheckpointSaved(time=0, step=8, path="/c", bytes=1024, seconds=1.0, best=True),
            "checkpoint of step 8, the best so far: /c (1.0 KiB, 1.0 s)",
        ),
        (STEP, ""),
    ],
)
def test_events_in_words(event, text):
    assert event_text(event) == text


def test_the_end_in_a_log_has_all_its_figures():
    finished = ev.RunFinished(
        time=0, result="finished", step=4, seconds=75.0, tokens=6668, first_loss=9.5, last_loss=3.25, not_applied=2
    )
    assert finished_text(finished) == (
        "finished at step 4, 6,668 tokens in 1m 15s, loss 9.5000 to 3.2500, 2 steps not applied"
    )
    assert finished_text(ev.RunFinished(time=0, result="stopped", step=0)) == "stopped at step 0"


def test_every_kind_of_event_has_words_or_none():
    assert set(ev.KINDS) >= {"step", "phase", "alarm"}
    started = ev.RunStarted(
        time=0, run_id="r", topology="1 target / 1 drafter", total_steps=5, first_step=3, resumed_from="/c"
    )
    assert event_text(started) == "1 target / 1 drafter, 5 steps, resumed from /c"


def test_the_last_line_of_start():
    profile = ev.PipelineProfile(
        time=0, interval=1, target_tokens_per_second=1, drafter_tokens_per_second=1, tokens_per_second=1,
        target_wait=0.031, drafter_wait=0.4, ring_bytes=0, ring_capacity=1, padding=0, limits="targets",
    )  # fmt: skip
    expected = "step 1, loss 11.94, 5 targets / 3 drafters, targets wait 3%, drafters 40%"
    assert first_step_line(STATUS, STEP, profile) == expected
    assert first_step_line(STATUS, None, None) == "step 12, loss 7.5, 5 targets / 3 drafters"
    assert first_step_line(dataclasses.replace(STATUS, loss=None, topology=""), None, None) == "step 12"


class Terminal:
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("environment", "live"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({}, False),
    ],
)
def test_colours_only_where_they_are_welcome(monkeypatch, environment, live):
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", Terminal())
    stream = Stream("stdout")
    assert stream.live is live
    assert stream.style("x", "red bold") == ("\x1b[31;1mx\x1b[0m" if live else "x")


def test_a_pipe_is_never_live_even_with_force_color(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not OUT.live


class Screen(Stream):
    """A stream that says it is a terminal, without colours."""

    class Device(io.StringIO):
        def isatty(self):
            return True

    @property
    def file(self):
        return self.Device()


@given(st.lists(st.text(max_size=300), min_size=1, max_size=4))
def test_whatever_old_runs_are_called_each_has_one_line_that_fits(names):
    runs = [dataclasses.replace(STATUS, name=name) for name in names]
    for stream in (Screen("stdout"), OUT):
        lines = runs_lines(runs, stream, now=1060.0)
        assert len(lines) == len(names) + 1
        assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for line in lines[1:] for letter in line)
    with mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}):
        assert max(map(len, runs_lines(runs, Screen("stdout"), now=1060.0))) <= 100


@pytest.mark.parametrize(("columns", "told"), [("80", False), ("120", True)])
def test_what_a_run_is_a_restart_of_is_told_where_there_is_room(monkeypatch, columns, told):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    run = dataclasses.replace(STATUS, run_id="20261130-211503-3bf1c2", restarted_from="20261130-211230-aba96c", name="")
    table = runs_lines([run], Screen("stdout"), now=1060.0)
    assert ("restart of" in table[0]) is told
    assert max(map(len, table)) <= int(columns)
    assert "restart of" in runs_lines([run], OUT)[0]


def test_a_name_of_today_is_whole_in_a_pipe_and_cut_on_a_terminal():
    run = dataclasses.replace(STATUS, name="n" * 200)
    assert runs_lines([run], OUT)[1].endswith(" " + "n" * 200)
    assert runs_lines([run], Screen("stdout"))[1].endswith("n…")


def test_the_card_escapes_what_the_far_end_says():
    evil = dataclasses.replace(STATUS, name="a\nb", note="c\td", topology="\x1b[2J", last_checkpoint="\x07")
    text = "\n".join(status_lines(evil, "local", OUT, now=1060.0))
    assert [word for word in ("(a\\x0ab)", "c\\td", "\\x1b[2J", "\\x07") if word not in text] == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=8))
def test_alarms_are_one_line_a_kind_with_their_number(raised):
    alarms = tuple(Alarm(kind, f"message {index}", 0.0, count=count) for index, (kind, count) in enumerate(raised))
    lines = alarm_lines(alarms, OUT)
    assert [line.split()[1].rstrip(":") for line in lines] == list(dict.fromkeys(kind for kind, _ in raised))
    for line in lines:
        kind = line.split()[1].rstrip(":")
        times = sum(count for each, count in raised if each == kind)
        assert line.endswith(f"({times} times)") is (times > 1)
        newest = max(index for index, (each, _) in enumerate(raised) if each == kind)
        assert f"message {newest}" in line
