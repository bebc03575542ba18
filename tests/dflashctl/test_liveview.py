"""The bar and the colours, on a real pseudo-terminal."""

from __future__ import annotations

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


LOG = "\n".join(
    [
        ev.render_line(ev.Phase(time=0.0, role="target", phase="loading")),
        ev.render_line(ev.RunStarted(time=0.0, run_id="r", topology="t", total_steps=30, first_step=1)),
        ev.render_line(step(2, 9.5)),
        ev.render_line(ev.AlarmRaised(time=0.0, alarm="stall", message="stands still")),
        ev.render_line(step(3, math.nan)),
        "Traceback (most recent call last):",
        "evil \x1b]0;title\x07",
    ]
)


def show(tmp_path, **environment):
    (tmp_path / "log").write_text(LOG)
    kept = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    kept |= {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color", "TZ": "UTC"} | environment
    code, seen = on_terminal(
        ["sh", "-c", f'"{sys.executable}" -c "$PROGRAM" < log'], kept | {"PROGRAM": PROGRAM}, tmp_path
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
    assert re.search(r"step ━+.* 3/30 loss NaN  14,500 tok/s  1m 15s left", text)
    assert "\x1b[1;32m9.5000" in seen
    assert "\\x1b]0;title\\x07" in text
    assert "\x1b]0;" not in seen
    assert "-- truncated" in text
    assert text.rstrip().endswith("1 LiveView")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1", "FORCE_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_bar_and_no_colour_where_they_are_unwelcome(tmp_path, environment):
    seen = show(tmp_path, **environment)
    assert "\x1b" not in seen
    assert "━" not in seen
    assert ev.render_line(step(2, 9.5)) in seen
    assert seen.rstrip().endswith("1 PlainView")
