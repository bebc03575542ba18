"""The bar and the colours, on a real pseudo-terminal."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
from pathlib import Path

import pytest
from terminal import on_terminal

from remote.protocol import events as ev

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, time
from dflashctl.logview import choose_view
from dflashctl.results import LogEnd
with choose_view(as_json=False, raw=False) as view:
    view.feed(sys.stdin.buffer.read())
    time.sleep(0.3)
    view.finish()
    view.notice("truncated")
view.ended(LogEnd("finished", "r"))
print(view.alarms, type(view).__name__)
"""


def step(number, loss):
    return ev.Step(
        time=0.0, step=number, total_steps=30, epoch=0, loss=loss, accuracy=0.5, accept_len=2.5, lr=1e-4, grad_norm=1.0,
        tokens=10, tokens_per_second=14500.0, eta_seconds=75.0,
    )  # fmt: skip


SAVED = ev.CheckpointSaved(time=0.0, step=3, path="/c", bytes=1_000_000, seconds=0.5)
PROFILE = ev.PipelineProfile(
    time=0.0,
    interval=9.0,
    tokens_per_second=5.0,
    target_tokens_per_second=6.0,
    drafter_tokens_per_second=7.0,
    target_wait=0.01,
    drafter_wait=math.nan,
    ring_bytes=1,
    ring_capacity=2,
    padding=0.02,
    limits="drafters",
)

STAGES = ev.StageProfile(
    time=0.0, role="drafter", device="cuda:5", interval=10.0, tokens=5, stages={"forward": 4.5, "wait_states": 0.0}
)

HELD_OUT = ev.HeldOutMeasured(time=0.0, step=3, loss=math.nan, accuracy=0.25, accept_len=1.5, seconds=0.5)
FINISHED = ev.RunFinished(
    time=0.0, result="finished", step=3, seconds=9.0, tokens=30, first_loss=9.5, last_loss=2.0, not_applied=1
)
WARMED = ev.WarmedUp(
    time=0.0,
    role="target",
    device="cuda:0",
    shape="8 x 512",
    seconds=42.0,
    peak_bytes=54 << 30,
    free_bytes=22_870_000_000,
)
LONG_PATH = "/checkpoints" * 9

LOG = "\n".join(
    [
        ev.render_line(ev.Phase(time=0.0, role="target", phase="loading")),
        ev.render_line(ev.RunStarted(time=0.0, run_id="r", topology="t", total_steps=30, first_step=1)),
        ev.render_line(WARMED),
        ev.render_line(step(2, 9.5)),
        ev.render_line(ev.AlarmRaised(time=0.0, alarm="stall", message="stands still")),
        ev.render_line(dataclasses.replace(step(3, 1.0), applied=False)),
        ev.render_line(step(3, math.nan)),
        ev.render_line(HELD_OUT),
        ev.render_line(SAVED),
        ev.render_line(dataclasses.replace(SAVED, path=LONG_PATH, best=True)),
        ev.render_line(ev.SaveProgress(time=0.0, step=3, written=1, total=2)),
        ev.render_line(STAGES),
        ev.render_line(PROFILE),
        ev.render_line(FINISHED),
        ev.render_line(step(4, 2.0))[:90],
        "Traceback (most recent call last):",
        "evil \x1b]0;title\x07",
    ]
)


def show(tmp_path, columns=120, **environment):
    (tmp_path / "log").write_text(LOG)
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
    kept |= {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color", "TZ": "UTC"} | environment
    code, seen = on_terminal(
        ["sh", "-c", f'"{sys.executable}" -c "$PROGRAM" < log'], kept | {"PROGRAM": PROGRAM}, tmp_path, columns
    )
    assert code == 0, seen
    return seen


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def test_bar_and_colours_on_a_terminal(tmp_path):
    seen = show(tmp_path)
    text = plain(seen)
    assert "step 2/30  loss 9.5000  accuracy 0.500  accept 2.50" in text
    assert "loss NaN" in text
    assert re.search(r"saving 50% ━+.* 3/30 loss NaN  14,500 tok/s  1m 15s left", text)
    assert "checkpoint of step 3: /c (976.6 KiB, 0.5 s)" in text
    assert "save_progress" not in text
    # A rank's profile waits for the pipeline's, and both are one table.
    assert "00:00:00 9 s at 5 tok/s, drafters limit: targets wait 1%, drafters nan%\n" in text
    assert re.search(r"^drafter cuda:5 +s +%\nwait for states +0\.0 +0\.0\nforward +4\.5 +45\.0\n", text, re.MULTILINE)
    assert "stage_profile" not in text
    assert "step step=4" in text  # a line cut short is text like any other
    assert "\x1b[1;32m9.5000" in seen
    assert "\\x1b]0;title\\x07" in text
    assert "\x1b]0;" not in seen
    assert "-- truncated" in text
    assert text.rstrip().endswith("1 LiveView")


KINDS_IN_WORDS = [
    "target: loading",
    "t, 30 steps, fresh",
    "ALARM stall: stands still",
    "target on cuda:0: 8 x 512 in 42 s, 21.3 GiB left at a peak of 54.0 GiB",
    "held-out loss nan, accuracy 0.250, accept 1.50 at step 3",
    "finished at step 3, 30 tokens in 9.0 s, loss 9.5000 to 2.0000, 1 step not applied",
]


@pytest.mark.parametrize("columns", [80, 160])
def test_events_are_told_in_words_and_fit_the_terminal(tmp_path, columns):
    text = plain(show(tmp_path, columns))
    lines = text.split("\n")
    unfolded = text.replace("\n         ", " ")
    for words in KINDS_IN_WORDS:
        assert re.search(rf"^\d\d:\d\d:\d\d {re.escape(words)}$", unfolded, re.MULTILINE), words
    assert not re.search(r"\b(phase|held_out|run_started|run_finished|checkpoint_saved) \w+=", text)
    told = [line for line in lines if re.match(r"\d\d:\d\d:\d\d |         \S", line) and LONG_PATH not in line]
    assert max(map(len, told)) <= columns
    # Between words, under the beginning of the line, and a path in one piece: it is there to be copied.
    assert any(re.fullmatch(rf".*{LONG_PATH}.*", line) for line in lines)
    assert (f"         {LONG_PATH}" in lines) == (columns == 80)


def test_a_narrow_terminal_has_the_figures_of_a_step_in_one_line(tmp_path):
    wide, narrow = (plain(show(tmp_path, columns)) for columns in (120, 80))
    figures = "step 3/30  loss 1.0000  accuracy 0.500  accept 2.50  "
    assert f"{figures}lr 1.00e-04  grad 1.00  14,500 tok/s  not applied" in wide
    assert f"{figures}not applied\n" in narrow
    assert "step 2/30  loss 9.5000  accuracy 0.500  accept 2.50  14,500 tok/s\n" in narrow


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1", "FORCE_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_bar_and_no_colour_where_they_are_unwelcome(tmp_path, environment):
    seen = show(tmp_path, **environment)
    assert "\x1b" not in seen
    assert "━" not in seen
    assert ev.render_line(step(2, 9.5)) in seen
    assert seen.rstrip().endswith("1 PlainView")
