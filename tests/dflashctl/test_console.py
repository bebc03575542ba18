"""Streams: what reaches them, and what becomes of a reader who has gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflashctl.console import ERR, OUT
from dflashctl.talk import Talk
from remote.protocol import events as ev
from remote.protocol.codec import plain

REPOSITORY = Path(__file__).resolve().parents[2]


def run_python(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        timeout=30,
        check=False,
    )


def test_lines_are_there_at_once_and_bytes_keep_their_place(capfdbinary):
    OUT.line("one")
    OUT.raw(b"\xff\x00")
    OUT.line("two")
    ERR.line("three")
    shown = capfdbinary.readouterr()
    assert (shown.out, shown.err) == (b"one\n\xff\x00two\n", b"three\n")


@pytest.mark.parametrize("write", ["OUT.line('x' * 100)", "OUT.raw(b'x' * 100)"])
def test_a_reader_who_has_gone_raises_and_the_exit_is_quiet(write):
    program = f"""
import os, sys
from dflashctl.console import OUT
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
try:
    {write}
except BrokenPipeError:
    OUT.silence()
    sys.stderr.write("gone")
    sys.exit(0)
"""
    done = run_python(program)
    assert (done.returncode, done.stderr) == (0, b"gone")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_the_encoding_lacks_is_escaped_not_fatal(encoding):
    program = "from dflashctl.cli import main; import sys; sys.argv = ['dflashctl', '--he\\N{SNOWMAN}']; main()"
    done = run_python(program, PYTHONIOENCODING=encoding)
    assert done.returncode == 2
    assert b"no such option" in done.stderr
    assert b"Traceback" not in done.stderr


class FakeTerminal:
    """Collects what is written, and says it is a terminal."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that puts a terminal in stderr's place (a fixture itself runs before pytest's own capture)."""

    def put():
        terminal = FakeTerminal()
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        return terminal

    return put


def frame(event):
    return {"kind": event.kind, **plain(event)}


def test_on_a_terminal_a_checkpoints_progress_is_one_line_that_moves(terminal):
    screen, talk = terminal(), Talk()
    for written in (1, 2, 3):
        talk(frame(ev.SaveProgress(time=0, step=9, written=written, total=3)))
    talk(frame(ev.CheckpointSaved(time=0, step=9, path="/c", bytes=3, seconds=1.0)))
    moving, _, last = screen.text.rpartition("\r\x1b[K")
    assert moving.count("\r\x1b[K") == 3
    assert "\n" not in moving
    assert "checkpoint of step 9: /c (3 B, 1.0 s)" in last
    assert last.endswith("\n")


def test_on_a_terminal_shapes_of_a_warm_up_are_one_line_that_moves(terminal):
    screen, talk = terminal(), Talk()
    for width in (512, 480, 448):
        talk(frame(ev.WarmedUp(time=0, role="target", device="cuda:0", shape=f"8 x {width}", seconds=0.4)))
    talk(frame(ev.Phase(time=0, role="target", phase="warmup", detail="3 shapes on cuda:0", seconds=1.2)))
    moving, _, last = screen.text.rpartition("\r\x1b[K")
    assert moving.count("\r\x1b[K") == 3
    assert "\n" not in moving
    assert last.endswith("target: warm-up 3 shapes on cuda:0 (1.2 s)\n")


def test_on_a_terminal_alarms_stand_out(terminal):
    screen = terminal()
    Talk()(frame(ev.AlarmRaised(time=0, alarm="stall", message="m")))
    assert "\x1b[31;1mALARM stall: m\x1b[0m" in screen.text
