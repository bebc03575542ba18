"""Failures as they reach a person, and a script."""

from __future__ import annotations

import json

import pytest

from dflashctl.errors import ConnectionLost, NoAnswer, report, report_bug
from dflashctl.talk import Talk
from remote.protocol import events as ev
from remote.protocol.codec import plain
from remote.protocol.errors import DflashError, ExitCode


def test_three_lines_then_the_detail(capsys):
    error = DflashError("e", cause="c\x1b[2J", hint="h", code=ExitCode.PREFLIGHT, detail="Traceback\n  x\x07")
    assert report(error, as_json=False) == 7
    shown = capsys.readouterr()
    assert shown.err.splitlines() == ["error: e", "  cause: c\\x1b[2J", "  hint: h", "  Traceback", "    x\\x07"]
    assert shown.out == ""


def test_the_same_as_json_on_stdout(capsys):
    report(DflashError("e", hint="h", code=ExitCode.NO_RUN), as_json=True)
    shown = capsys.readouterr()
    assert {"error": "e", "hint": "h", "code": 3}.items() <= json.loads(shown.out).items()
    assert shown.err.startswith("error: e\n")


def test_a_bug_is_one_error_that_says_where_and_how_to_see_more(capsys):
    with pytest.raises(ZeroDivisionError) as caught:
        int(1 / 0)
    assert report_bug(caught.value) == 1
    text = capsys.readouterr().err
    assert "this is a bug in dflashctl: ZeroDivisionError" in text
    assert "test_errors" in text
    assert "--debug" in text
    assert "Traceback" not in text


def test_kinds_of_no_answer():
    assert NoAnswer("x").code == ConnectionLost("x").code == ExitCode.NO_ANSWER
    assert isinstance(ConnectionLost("x"), NoAnswer)


def frame(event):
    return {"kind": event.kind, **plain(event)}


def test_talk_shows_events_keeps_the_latest_and_skips_what_it_does_not_know(capsys):
    talk = Talk()
    talk({"kind": "from_the_future", "x": 1})
    talk({"no": "kind"})
    talk(frame(ev.Phase(time=0, role="target", phase="loading")))
    talk(frame(ev.AlarmRaised(time=0, alarm="stall", message="\x1b[2Jm")))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" s  ")[1] for line in lines] == ["target: loading", "ALARM stall: \\x1b[2Jm"]
    assert isinstance(talk.latest[ev.Phase], ev.Phase)


def test_checkpoint_progress_is_not_a_flood(capsys):
    talk = Talk()
    for written in range(100):
        talk(frame(ev.SaveProgress(time=0, step=1, written=written, total=100)))
    assert capsys.readouterr().err.count("saving step 1") == 1
