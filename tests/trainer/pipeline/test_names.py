"""Names in places that all share: recorded, forgotten, and swept only where their owner is known to be dead."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from remote.protocol.identity import ProcessIdentity
from remote.protocol.layout import RunLayout
from trainer.pipeline import names


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place that is swept, for /dev/shm and for TMPDIR."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(names, "SHARED_MEMORY", place)
    monkeypatch.setattr(names, "_SHORT_PLACE", place)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


def name_of(owner: ProcessIdentity, scope: str | None = None) -> str:
    return f"dflash-{scope or names.scope()}-{owner.pid}-{owner.start_ticks}-0123abcd"


@pytest.fixture(scope="module")
def dead() -> ProcessIdentity:
    """A process that has ended."""
    with subprocess.Popen(["sleep", "60"]) as process:
        identity = ProcessIdentity.of(process.pid)
        process.kill()
    return identity


def test_a_name_tells_whose_it_is_and_leaves_room_for_a_socket() -> None:
    name = names.new_name()
    assert name != names.new_name()
    me = ProcessIdentity.of()
    assert name.split("-")[1:4] == [names.scope(), str(me.pid), str(me.start_ticks)]
    longest = "x" * names._LONGEST_PLACE + f"/dflash-{names.scope()}-4194304-{10**12 - 1}-0123abcd/pair-99-99.sock"
    assert len(longest) <= 107


def test_what_a_run_reserved_is_forgotten_however_far_it_came(place: Path, tmp_path: Path) -> None:
    run = RunLayout(tmp_path / "run")
    run.create()
    names.forget(run)
    sockets = names.make_sockets(run)
    assert sockets.stat().st_mode & 0o777 == 0o700
    (sockets / "events.sock").touch()
    names.forget(run)
    assert list(place.iterdir()) == []
    names.forget(run)


def test_a_record_of_another_form_is_not_followed(place: Path, tmp_path: Path) -> None:
    run = RunLayout(tmp_path / "run")
    run.create()
    mine = tmp_path / "mine"
    mine.mkdir()
    run.sockets.write_text(f"{mine}\n")
    names.forget(run)
    assert mine.exists()


def test_names_of_the_dead_are_swept(place: Path, dead: ProcessIdentity) -> None:
    directory = place / name_of(dead)
    directory.mkdir()
    (directory / "board").touch()
    assert names.sweep() == [directory]
    directory.touch()  # A ring without its directory.
    assert names.sweep() == [directory]
    assert names.sweep() == []


def test_a_pid_that_another_process_has_now_is_no_owner(place: Path) -> None:
    me = ProcessIdentity.of()
    ring = place / name_of(ProcessIdentity(me.boot_id, me.pid, me.start_ticks - 1))
    ring.touch()
    assert names.sweep() == [ring]


def test_what_lives_or_cannot_be_known_stays(place: Path, dead: ProcessIdentity) -> None:
    kept = [
        name_of(ProcessIdentity.of()),
        name_of(ProcessIdentity.of(os.getppid())),
        name_of(dead, scope="00000000"),  # another boot, container or host: its pids are not ours to judge
        "dflash-0123abcd",
        "dflash-selfcheck-x7w",
        f"{name_of(dead)}.old",
        f"x{name_of(dead)}",
    ]
    for name in kept:
        (place / name).touch()
    assert names.sweep() == []
    assert sorted(path.name for path in place.iterdir()) == sorted(kept)


def test_what_belongs_to_another_user_stays(
    place: Path, dead: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = place / name_of(dead)
    ring.touch()
    monkeypatch.setattr("os.geteuid", lambda: ring.stat().st_uid + 1)
    assert names.sweep() == []
    assert ring.exists()


def test_a_link_is_neither_followed_nor_removed(place: Path, dead: ProcessIdentity, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").touch()
    (place / name_of(dead)).symlink_to(mine)
    assert names.sweep() == []
    assert (mine / "file").exists()


def test_the_scope_is_this_boot_and_this_pid_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    here = names.scope()
    assert here == names.scope()
    monkeypatch.setattr(names, "boot_id", lambda: "another")
    assert names.scope() != here
