"""A disk that is really full: a file system of one megabyte under ROOT."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote.protocol.layout import is_run_id
from remote.protocol.locks import is_held
from remote.protocol.records import RunState, read_record


@pytest.fixture
def small(far) -> Iterator[Path]:
    """Put ROOT on a file system of its own; skipped where that takes rights we do not have."""
    away = far.root.path.with_name("away")
    far.root.path.rename(away)
    far.root.path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", str(far.root.path)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        shutil.copytree(away, far.root.path, symlinks=True, dirs_exist_ok=True)
        yield far.root.path
    finally:
        far.close()
        # Lazily: the run that was just killed may hold a file open for another moment.
        subprocess.run(["umount", "--lazy", str(far.root.path)], check=True)


def fill(folder: Path) -> Path:
    """Take all the space that is left."""
    path = folder / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        for size in (65536, 4096, 512, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass
    return path


def test_a_run_goes_on_and_its_alarms_come_when_there_is_room_again(far, small, wait_for):
    far.running("--hang-after", "1", spec={"stall_timeout": 1.5})
    wait_for(lambda: read_record(RunState, far.run.state).state == "running")
    before = far.run.state.read_bytes()
    filler = fill(small)
    # Long enough for the alarm of the stall, which cannot be written.
    time.sleep(2.5)
    assert far.run.state.read_bytes() == before, "the previous state stays readable"
    assert far.ok("status")["state"] == "running"
    assert [path for path in far.run.path.iterdir() if path.name.endswith(".tmp")] == []
    filler.unlink()
    alarms = wait_for(lambda: read_record(RunState, far.run.state).alarms)
    assert {alarm.kind for alarm in alarms} == {"stall", "state_unwritten"}
    assert far.ok("stop", now=True)["status"]["state"] == "stopped"


def test_a_run_on_a_full_disk_can_be_stopped(far, small, wait_for):
    far.running()
    filler = fill(small)
    error = far.call("stop").error
    assert (error["code"], "stop --now" in error["hint"]) == (9, True)
    stop = far.begin("stop", now=True)
    wait_for(lambda: not is_held(far.run.run_lock))
    filler.unlink()
    assert stop.reply().result["status"]["state"] == "failed"


def test_a_start_leaves_nothing(far, small):
    fill(small)
    error = far.start().error
    assert error["code"] == 7
    assert "space" in error["hint"]
    assert [path for path in far.root.runs.iterdir() if is_run_id(path.name)] == []


def test_a_deploy_leaves_nothing_and_current_stays(far, small):
    error = far.deploy({**far.files(), "large.bin": os.urandom(2 << 20)}).error
    assert (error["code"], error["error"]) == (7, f"no space left in {small}")
    assert far.root.current.resolve().name == far.release
    assert {path.name for path in far.root.releases.iterdir()} == {far.release, ".history.json"}
    assert far.deploy().result["changed"] is False
