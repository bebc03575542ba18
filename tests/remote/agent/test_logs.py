"""The verb logs: every byte once, whatever happens to the file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote.agent.logs import Follower
from remote.agent.tail import last_lines, line_start
from remote.protocol.frames import Kind
from remote.protocol.locks import LockKind, acquire


class Recorder:
    """Stands at the Answer's place and keeps what is sent."""

    def __init__(self) -> None:
        self.bytes = b""
        self.notes: list[dict] = []

    def data(self, payload: bytes) -> None:
        self.bytes += payload

    def note(self, value: dict) -> None:
        self.notes.append(value)

    @property
    def notices(self) -> list[str]:
        return [note["notice"].partition(":")[0] for note in self.notes if note["notice"]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_bytes(b"one\ntwo\nthree\n")
    return path


def follower(path: Path, recorder: Recorder, **begin) -> Follower:
    made = Follower(path, "train", recorder)
    made.begin(**{"offset": None, "tail": None, "device": None, "inode": None, **begin})
    return made


def drain(made: Follower) -> None:
    while made.step():
        pass


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300), newlines=st.lists(st.integers(0, 300), max_size=20), count=st.integers(0, 25))
def test_the_last_lines_are_those_of_a_full_read(tmp_path: Path, content, newlines, count):
    data = bytearray(content)
    for at in newlines:
        data[at:at] = b"\n"
    path = tmp_path / "file"
    path.write_bytes(data)
    with path.open("rb") as file:
        start = line_start(file.fileno(), count)
    assert bytes(data[start:]) == b"".join(lines(data)[-count:] if count else [])


def lines(data: bytes) -> list[bytes]:
    """Split at newlines alone: a carriage return is part of a progress bar."""
    parts = bytes(data).split(b"\n")
    whole = [part + b"\n" for part in parts[:-1]]
    return [*whole, parts[-1]] if parts[-1] else whole


def test_the_end_of_a_huge_file_is_found_without_reading_it(tmp_path: Path):
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(10 << 30)  # sparse: reading it whole would take minutes
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast but one\nlast\n")
    with path.open("rb") as file:
        start = line_start(file.fileno(), 2)
        assert os.pread(file.fileno(), 100, start) == b"last but one\nlast\n"
    assert last_lines(path, 2) == "last but one\nlast"


def test_a_line_longer_than_a_block(tmp_path: Path):
    path = tmp_path / "long"
    path.write_bytes(b"first\n" + b"x" * 200_000 + b"\nend")
    with path.open("rb") as file:
        assert line_start(file.fileno(), 2) == 6


def test_growth_truncation_deletion(log):
    recorder = Recorder()
    with follower(log, recorder, tail=1) as made:
        drain(made)
        assert recorder.bytes == b"three\n"
        with log.open("ab") as writer:
            writer.write(b"four\xff\x00\r50%")
            writer.flush()
            drain(made)
            assert recorder.bytes == b"three\nfour\xff\x00\r50%"
            log.unlink()
            assert made.step() is False
            writer.write(b" still here\n")
            writer.flush()
            drain(made)
        assert recorder.bytes.endswith(b" still here\n")
        log.write_bytes(b"anew\n")
        drain(made)
        assert recorder.bytes.endswith(b"anew\n")
        log.write_bytes(b"x\n")
        drain(made)
    assert recorder.notices == ["deleted", "rotated", "truncated"]
    assert recorder.bytes.endswith(b"anew\nx\n")


def test_copytruncate(log):
    recorder = Recorder()
    with follower(log, recorder) as made:
        drain(made)
        shutil.copy(log, log.with_suffix(".1"))
        os.truncate(log, 0)
        with log.open("ab") as writer:
            writer.write(b"4\n")
        drain(made)
    assert recorder.bytes == b"one\ntwo\nthree\n4\n"
    assert recorder.notices == ["truncated"]


def test_an_empty_newcomer_does_not_hide_a_log_that_is_still_written(log):
    recorder = Recorder()
    with log.open("ab") as writer, follower(log, recorder) as made:
        drain(made)
        log.rename(log.with_suffix(".1"))
        log.touch()
        drain(made)
        writer.write(b"four\n")
        writer.flush()
        drain(made)
    assert recorder.bytes.endswith(b"three\nfour\n")
    assert recorder.notices == []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(min_size=1, max_size=2000), cut=st.integers(0, 2000), rename=st.booleans())
def test_resuming_at_a_position_doubles_and_loses_nothing(tmp_path: Path, content, cut, rename):
    for old in tmp_path.iterdir():
        old.unlink()
    path = tmp_path / "train.log"
    path.write_bytes(content[:cut])
    first = Recorder()
    with follower(path, first) as made:
        drain(made)
        position = made.position
    with path.open("ab") as writer:
        writer.write(content[cut:])
    if rename:
        path.rename(tmp_path / "train.log.1")
        path.write_bytes(b"new file")
    second = Recorder()
    with follower(path, second, **position) as made:
        drain(made)
    assert first.bytes + second.bytes == content + (b"new file" if rename else b"")


def test_a_position_in_a_file_that_is_gone_begins_anew_and_says_so(log):
    recorder = Recorder()
    with follower(log, recorder, device=1, inode=99999999, offset=5) as made:
        drain(made)
    assert recorder.bytes == log.read_bytes()
    assert recorder.notices == ["rotated"]


def test_a_file_that_appears_later(tmp_path: Path):
    recorder = Recorder()
    with follower(tmp_path / "train.log", recorder, tail=5) as made:
        assert made.step() is False
        (tmp_path / "train.log").write_bytes(b"hello")
        drain(made)
        drain(made)
    assert recorder.bytes == b"hello"


class TestVerb:
    """Over the wire, with a run."""

    def test_following_ends_with_the_run_and_its_result(self, far):
        far.running("--steps", "12")
        reply = far.call("logs", follow=True, tail=1)
        assert reply.result["state"] == "finished"
        assert reply.result["exit"]["result"] == "finished"
        assert far.run.train_log.read_bytes().endswith(reply.data)
        assert b"run_finished" in reply.data
        assert reply.events[0]["inode"] == far.run.train_log.stat().st_ino
        assert reply.events[0]["run"] == reply.result["run"] == far.run.run_id

    def test_the_other_files_and_a_fixed_end(self, far):
        far.running("--pause", "0.01")
        whole = far.call("logs", file="events", offset=0)
        assert whole.result["state"] == "running"
        assert far.run.events.read_bytes().startswith(whole.data)
        assert b"leader is pid" in far.call("logs", file="supervisor").data
        assert far.call("logs", file="passwd").error["code"] == 2

    def test_a_killed_run_is_drained(self, far):
        far.running()
        call = far.begin("logs", follow=True, tail=0)
        call.until(lambda frame: frame.kind is Kind.DATA)
        far.ok("stop", now=True)
        assert call.reply().result["state"] == "stopped"

    def test_a_client_that_goes_away_ends_the_agent(self, far, wait_for):
        far.running()
        call = far.begin("logs", follow=True)
        call.until(lambda frame: frame.kind is Kind.DATA)
        call.process.stdout.close()
        assert call.process.wait(10) == 1
        call.kill()

    def test_heartbeats_come_while_nothing_happens(self, far):
        far.root.create()
        run = far.root.run("20200101-000000-aaaaaa")
        run.create()
        lock = acquire(run.sup_lock, LockKind.EXCLUSIVE)
        call = far.begin("logs", follow=True)
        call.until(lambda frame: frame.kind is Kind.HEARTBEAT)
        os.close(lock)
        assert call.reply().result["state"] == "lost"

    def test_without_a_run(self, far):
        assert far.call("logs").error["code"] == 3
        assert far.call("logs", run="20200101-000000-aaaaaa").error["code"] == 3
        assert far.call("logs", run="../..").error["code"] == 3

    @pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
    @pytest.mark.parametrize("follow", [False, True])
    def test_what_is_no_file_is_told_with_a_way_out(self, far, make, follow):
        run = far.root.run("20200101-000000-aaaaaa")
        run.create()
        make(run.train_log)
        error = far.call("logs", follow=follow, tail=10).error
        assert (error["code"], run.run_id in error["error"]) == (1, True)
        assert "not a file" in error["cause"]
        assert error["hint"]
