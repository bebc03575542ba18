"""A directory that appears whole or not at all."""

from __future__ import annotations

import os

import pytest

from remote.protocol.errors import DflashError, ExitCode
from trainer.target.new_directory import new_directory


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
