"""Locks between processes, and why the other two kinds of lock would not do."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from remote.protocol.locks import (
    LockBusy,
    LockKind,
    acquire,
    acquire_within,
    holder_name,
    is_held,
    name_holder,
    still_named,
)

HOLD = """
import sys, time
from pathlib import Path
from remote.protocol.locks import LockKind, acquire
acquire(Path(sys.argv[1]), LockKind[sys.argv[2]])
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold(tmp_path: Path):
    """Return a function that holds a lock in another process; the process is returned."""
    made: list[subprocess.Popen[bytes]] = []

    def begin(path: Path, kind: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), kind], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"held\n"
        made.append(process)
        return process

    yield begin
    for process in made:
        process.kill()
        process.communicate()


def test_exclusive_means_alone(tmp_path, hold):
    path = tmp_path / "lock"
    process = hold(path, "EXCLUSIVE")
    assert is_held(path)
    for kind in LockKind:
        with pytest.raises(LockBusy):
            acquire(path, kind)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not is_held(path), "no crash leaves a lock behind"
    os.close(acquire(path, LockKind.EXCLUSIVE))


def test_shared_is_held_until_the_last_holder_is_gone(tmp_path, hold):
    path = tmp_path / "lock"
    first, second = hold(path, "SHARED"), hold(path, "SHARED")
    first.kill()
    first.wait()
    assert is_held(path)
    with pytest.raises(LockBusy):
        acquire(path, LockKind.EXCLUSIVE)
    second.kill()
    second.wait()
    assert not is_held(path)


def test_a_probe_takes_nothing_and_makes_nothing(tmp_path):
    path = tmp_path / "lock"
    assert not is_held(path)
    assert not path.exists()
    assert not is_held(tmp_path / "no" / "lock")
    descriptor = acquire(path, LockKind.EXCLUSIVE)
    assert is_held(path), "in the same process too: locks belong to open files, not to processes"
    os.close(descriptor)
    assert not is_held(path)


def test_a_probe_works_without_permission_to_write(tmp_path):
    path = tmp_path / "lock"
    descriptor = acquire(path, LockKind.SHARED)
    path.chmod(0o444)
    assert is_held(path)
    os.close(descriptor)


def test_the_lock_follows_the_descriptor_into_a_child_and_only_there(tmp_path):
    path = tmp_path / "lock"
    descriptor = acquire(path, LockKind.EXCLUSIVE)
    assert not os.get_inheritable(descriptor)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[descriptor]) as heir:
        os.close(descriptor)
        assert is_held(path), "handed over without a gap"
        heir.communicate(b"\n")
    assert not is_held(path)


def test_another_descriptor_closed_does_not_lose_it(tmp_path):
    path = tmp_path / "lock"
    descriptor = acquire(path, LockKind.EXCLUSIVE)
    os.close(os.open(path, os.O_RDWR))
    assert is_held(path)
    os.close(descriptor)


class TestWhatWouldNotDo:
    """The two other kinds of lock, wrong in the ways that the design names."""

    def test_flock_is_not_seen(self, tmp_path):
        path = tmp_path / "lock"
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert not is_held(path)

    def test_a_posix_lock_is_lost_when_any_descriptor_is_closed(self, tmp_path):
        path = tmp_path / "lock"
        with path.open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            assert is_held(path)
            os.close(os.open(path, os.O_RDWR))
            assert not is_held(path)


def test_waiting_for_a_lock(tmp_path, hold):
    path = tmp_path / "lock"
    process = hold(path, "EXCLUSIVE")
    with pytest.raises(LockBusy):
        acquire_within(path, LockKind.SHARED, 0.05)
    process.kill()
    process.wait()
    os.close(acquire_within(path, LockKind.SHARED, 0.05))


def test_a_lock_names_its_holder(tmp_path):
    path = tmp_path / "lock"
    assert holder_name(path) == "unknown"
    descriptor = acquire(path, LockKind.EXCLUSIVE)
    name_holder(descriptor, "a long name of a holder")
    name_holder(descriptor, "ünï, pid 5")
    assert holder_name(path) == "ünï, pid 5"
    os.close(descriptor)


def test_a_deleted_or_replaced_lock_is_no_longer_the_one_at_its_path(tmp_path):
    path = tmp_path / "run" / "sup.lock"
    path.parent.mkdir()
    descriptor = acquire(path, LockKind.EXCLUSIVE)
    try:
        assert still_named(descriptor, path)
        path.unlink()
        assert not still_named(descriptor, path)
        path.touch()
        assert not still_named(descriptor, path), "same name, another file"
        path.unlink()
        path.parent.rmdir()
        assert not still_named(descriptor, path)
    finally:
        os.close(descriptor)
