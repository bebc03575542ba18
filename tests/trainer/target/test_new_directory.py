"""A directory that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from remote.protocol.errors import DflashError, ExitCode
from trainer.target.new_directory import new_directory, told_if_unwritable


def test_it_appears_when_the_block_ends(tmp_path):
    destination = tmp_path / "deep" / "made"
    with new_directory(destination) as directory:
        (directory / "a").write_text("1")
        (directory / "sub").mkdir()
        assert not destination.exists()
    assert (destination / "a").read_text() == "1"
    assert [path.name for path in destination.parent.iterdir()] == ["made"]


def test_nothing_stays_after_a_failure(tmp_path):
    def fail():
        with new_directory(tmp_path / "made") as directory:
            (directory / "a").write_text("1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_another_directory_is_never_overwritten(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "kept").touch()
    with pytest.raises(DflashError, match="exists already") as caught, new_directory(tmp_path / "made"):
        pass
    assert caught.value.code is ExitCode.PREFLIGHT
    assert (tmp_path / "made" / "kept").exists()


def test_one_that_appears_meanwhile_is_kept(tmp_path):
    def race():
        with new_directory(tmp_path / "made") as directory:
            (directory / "ours").touch()
            (tmp_path / "made").mkdir()
            (tmp_path / "made" / "theirs").touch()

    with pytest.raises(DflashError, match="exists already"):
        race()
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_an_empty_directory_is_taken(tmp_path):
    (tmp_path / "made").mkdir()
    with new_directory(tmp_path / "made") as directory:
        (directory / "a").touch()
    assert (tmp_path / "made" / "a").exists()


def test_modes_are_ordinary_under_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with new_directory(tmp_path / "made") as directory:
            (directory / "a").touch(mode=0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "made" / "a").stat().st_mode & 0o777 == 0o640


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DflashError, match="cannot write") as caught, new_directory(tmp_path / "file" / "made"):
        pass
    assert caught.value.code is ExitCode.PREFLIGHT


KILLED = """
import os, sys, time
from pathlib import Path
from trainer.target.new_directory import new_directory
with new_directory(Path(sys.argv[1])) as directory:
    (directory / "a").write_text("1")
    print(directory, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_is_removed_by_the_next_one_and_a_living_one_is_left_alone(tmp_path):
    destination = tmp_path / "made"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", KILLED, str(destination)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        left = Path(child.stdout.readline().strip())
        with contextlib.suppress(ZeroDivisionError), new_directory(destination):
            _ = 1 / 0
        assert (left / "a").exists()
        child.kill()
    assert (left / "a").exists()
    # Names that are like it and not ours.
    (tmp_path / ".made.12345678").mkdir()
    (tmp_path / ".other.unfinished-12345678").mkdir()
    with new_directory(destination):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".made.12345678", ".other.unfinished-12345678", "made"]


def test_a_link_is_written_through(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "made")
    with new_directory(tmp_path / "link") as directory:
        (directory / "a").touch()
    assert (tmp_path / "disk" / "made" / "a").exists()
    assert (tmp_path / "link" / "a").exists()


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), SafetensorError("No space left")])
def test_what_a_full_disk_raises_is_told(tmp_path, problem):
    with pytest.raises(DflashError, match="cannot write") as caught, told_if_unwritable(tmp_path):
        raise problem
    assert "No space left" in caught.value.cause
    assert caught.value.code is ExitCode.PREFLIGHT
