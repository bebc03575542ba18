"""destinations.json: what was written comes back, many writers lose nothing, garbage is said."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.destinations import Destination, DestinationStore
from dflashctl.home import locked, replace_file, state_directory, user_file
from remote.protocol.errors import DflashError

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.builds(Destination, host=texts.filter(bool), ct=texts, root=texts, python=texts, release=texts, config=texts))
def test_what_is_remembered_comes_back(tmp_path_factory, destination):
    store = DestinationStore(tmp_path_factory.mktemp("home"))
    store.remember(destination, make_current=True)
    assert store.current() == destination
    assert store.get(destination.host, destination.ct) == destination


def test_only_deploy_changes_the_current_one(tmp_path):
    store = DestinationStore(tmp_path)
    assert store.current() is None
    first, second = Destination("a", "200"), Destination("b")
    store.remember(first, make_current=True)
    store.remember(second, make_current=False)
    assert store.current() == first
    store.remember(dataclasses.replace(first, release="1" * 12), make_current=False)
    assert store.get("a", "200").release == "1" * 12
    assert store.get("b", "") == second


def test_ten_writers_at_once_lose_nothing(tmp_path):
    program = (
        "import sys; from pathlib import Path; from dflashctl.destinations import *;"
        "DestinationStore(Path(sys.argv[1])).remember(Destination(sys.argv[2]), make_current=True)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), f"host{n}"]) for n in range(10)]
    assert [writer.wait(30) for writer in writers] == [0] * 10
    assert sorted(d.host for d in DestinationStore(tmp_path).load().known) == sorted(f"host{n}" for n in range(10))
    assert [path.name for path in tmp_path.iterdir()] == ["destinations.json"]


@pytest.mark.parametrize("content", ["", "{", '{"known": 3}', '{"known": [{"host": 1}]}', "[]"])
def test_garbage_is_an_error_with_a_way_out(tmp_path, content):
    (tmp_path / "destinations.json").write_text(content)
    with pytest.raises(DflashError, match="cannot read") as caught:
        DestinationStore(tmp_path).load()
    assert "deploy again" in caught.value.hint


def test_a_newer_file_opens(tmp_path):
    text = '{"schema": 9, "current": "h", "known": [{"host": "h", "color": "red"}], "more": 1}'
    (tmp_path / "destinations.json").write_text(text)
    assert DestinationStore(tmp_path).current() == Destination("h")


def test_a_lock_left_by_a_crash_is_broken_but_a_fresh_one_is_not(tmp_path, monkeypatch):
    lock = tmp_path / "x.lock"
    lock.touch()
    os.utime(lock, (time.time() - 60, time.time() - 60))
    with locked(lock):
        monkeypatch.setattr("dflashctl.home._LOCK_PATIENCE", 0.1)
        with pytest.raises(DflashError, match="is locked"), locked(lock):
            pass
    assert not lock.exists()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "f"
    replace_file(file, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(file, "\ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_home_is_where_it_is_told_or_where_the_platform_says():
    assert str(state_directory({"DFLASHCTL_HOME": "/h"})) == "/h"
    assert str(user_file({"DFLASHCTL_HOME": "/h"})) == "/h/config.toml"
    assert state_directory({}).name == user_file({}).parent.name == "dflashctl"


def test_a_directory_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DflashError, match="cannot") as caught:
        DestinationStore(tmp_path / "file").remember(Destination(), make_current=True)
    assert "DFLASHCTL_HOME" in caught.value.hint


def test_a_file_of_a_newer_version_is_not_written_over(tmp_path):
    store = DestinationStore(tmp_path)
    newer = '{"schema": 2, "current": "", "known": [], "places": {"x": 1}}'
    store.path.write_text(newer)
    with pytest.raises(DflashError, match="cannot write") as caught:
        store.remember(Destination("a"), make_current=True)
    assert "newer dflashctl" in caught.value.cause
    assert store.path.read_text() == newer


def test_a_current_destination_that_is_not_known_is_no_reason_to_take_this_machine(tmp_path):
    store = DestinationStore(tmp_path)
    store.path.write_text('{"schema": 1, "current": "10.1.2.6/999", "known": []}')
    with pytest.raises(DflashError, match="is used, and does not know it"):
        store.current()
    assert store.get("10.1.2.6", "999") is None, "named on the command line it may be deployed to again"
