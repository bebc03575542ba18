"""Log bytes as they are shown, and the alarms in them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dflashctl.logview import JsonView, PipedView, PlainView, RawView, choose_view, end_line, readable
from dflashctl.results import LogEnd
from remote.protocol import events as ev
from remote.protocol.records import ExitRecord, HeldOut

ALARM = ev.AlarmRaised(time=1.0, alarm="non_finite", message="loss NaN on drafter 1", step=3)
SAVED = ev.CheckpointSaved(time=2.0, step=3, path="/c", bytes=10, seconds=0.5)
LOG = f"loading\xff\n{ev.render_line(ALARM)}\n  alarm in a sentence\n{ev.render_line(SAVED)}\nno newline".encode(
    "latin-1"
)


def feed(view, data, size):
    with view:
        for start in range(0, len(data), size):
            view.feed(data[start : start + size])
        view.finish()


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("kind", [PipedView, RawView])
def test_a_pipe_gets_every_byte(kind, size, capfdbinary):
    view = kind()
    feed(view, LOG, size)
    assert capfdbinary.readouterr().out == LOG
    assert view.alarms == 1


def test_a_terminal_without_colours_gets_harmless_lines(capsys):
    view = PlainView()
    feed(view, LOG + b"\n10%\r 50%\r100%\n\x1b[2Jboo\n", 5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "loading\N{REPLACEMENT CHARACTER}"
    assert lines[-2:] == ["100%", "\\x1b[2Jboo"]
    assert view.alarms == 1


def test_json_gives_events_as_objects_and_the_rest_as_text(capsys):
    view = JsonView()
    feed(view, LOG + b'\n{"kind":"alarm","alarm":"x"}\n{"kind": torn\n', 9)
    view.ended(LogEnd("failed", "r", ExitRecord("r", "failed", 1.0, "trainer", code=1)))
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["kind"] for entry in objects] == [
        "text", "alarm", "text", "checkpoint_saved", "text", "alarm", "text", "end"
    ]  # fmt: skip
    assert objects[3]["path"] == "/c"
    assert (objects[-1]["state"], objects[-1]["exit"]["code"]) == ("failed", 1)
    assert view.alarms == 2


def test_the_end_of_a_raw_log_is_no_part_of_it(capsys):
    RawView().ended(LogEnd("finished"))
    PipedView().ended(LogEnd("finished"))
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("run finished\n", "run finished\n")


def test_end_line():
    record = ExitRecord("r", "stopped", 1.0, "trainer", last_step=7, last_checkpoint="/c")
    assert end_line(LogEnd("stopped", "r", record)) == "run r stopped at step 7, checkpoint /c"


def test_end_line_with_what_was_measured_and_refused():
    best, newest = HeldOut(4, 2.5, 0.25, 1.5, "/c/4"), HeldOut(7, 2.75, 0.2, 1.4, "/c/7")
    record = ExitRecord(
        "r", "finished", 1.0, "trainer", last_step=7, last_checkpoint="/c/7", held_out=newest, best=best, not_applied=1
    )
    assert end_line(LogEnd("finished", "r", record)) == (
        "run r finished at step 7, 1 step not applied, held-out loss 2.7500, checkpoint /c/7, "
        "best (held-out loss 2.5000) /c/4"
    )
    record = dataclasses.replace(record, best=newest, not_applied=0)
    assert end_line(LogEnd("finished", "r", record)).endswith("held-out loss 2.7500, checkpoint /c/7")


def test_the_view_fits_the_stream(monkeypatch):
    assert type(choose_view(as_json=True, raw=False)) is JsonView
    assert type(choose_view(as_json=False, raw=True)) is RawView
    assert type(choose_view(as_json=False, raw=False)) is PipedView
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert type(choose_view(as_json=False, raw=False)) is PlainView


@pytest.mark.parametrize(("raw", "text"), [(b"a\r\n"[:-1], "a"), (b"\rx\ry", "y"), (b"", ""), (b"\x07", "\\x07")])
def test_readable(raw, text):
    assert readable(raw) == text
