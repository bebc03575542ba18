"""Which process: reused pids, zombies, hostile names, torn pidfiles."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote.protocol.identity import ProcessIdentity, boot_id, read_pidfile, read_stat, write_pidfile


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_process_is_itself(child):
    identity = ProcessIdentity.of(child.pid)
    assert identity.is_alive()
    assert identity == ProcessIdentity.of(child.pid)
    assert ProcessIdentity.of().pid == os.getpid()
    assert identity.boot_id == boot_id()
    assert read_stat(child.pid).parent == os.getpid()


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot_id": "another boot"}])
def test_a_reused_pid_is_another_process_and_is_not_signalled(child, change):
    identity = dataclasses.replace(ProcessIdentity.of(child.pid), **change)
    assert not identity.is_alive()
    assert identity.send(signal.SIGKILL) is False
    assert child.poll() is None


def test_a_signal_reaches_it_once(child):
    identity = ProcessIdentity.of(child.pid)
    assert identity.send(signal.SIGKILL) is True
    assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert read_stat(child.pid).state == "Z"
    assert not identity.is_alive(), "a zombie is dead"
    assert identity.send(signal.SIGKILL) is False
    child.wait()
    assert read_stat(child.pid) is None
    assert not identity.is_alive()
    assert identity.send(signal.SIGKILL) is False
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(child.pid)


def test_a_command_name_with_parentheses_and_spaces(tmp_path):
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as process:
        stat = read_stat(process.pid)
        assert (stat.parent, stat.start_ticks > 1) == (os.getpid(), True)
        process.kill()


def test_a_pidfile_begins_with_the_bare_pid(tmp_path):
    path = tmp_path / "trainer.pid"
    identity = ProcessIdentity.of()
    write_pidfile(path, identity)
    assert path.read_text().splitlines()[0] == str(os.getpid())
    assert read_pidfile(path) == identity


@given(
    st.builds(
        ProcessIdentity, st.from_regex(r"[0-9a-f-]{1,36}", fullmatch=True), st.integers(1, 2**22), st.integers(0, 2**62)
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
def test_pidfiles_round_trip(tmp_path: Path, identity):
    write_pidfile(tmp_path / "pid", identity)
    assert read_pidfile(tmp_path / "pid") == identity


@given(st.binary(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
def test_garbage_in_a_pidfile_is_nobody_or_a_dead_one(tmp_path: Path, content):
    (tmp_path / "pid").write_bytes(content)
    identity = read_pidfile(tmp_path / "pid")
    assert identity is None or not identity.is_alive()


def test_a_missing_pidfile(tmp_path):
    assert read_pidfile(tmp_path / "pid") is None
    assert read_pidfile(tmp_path / "no" / "pid") is None
    (tmp_path / "foreign").write_text("1234\n")
    assert read_pidfile(tmp_path / "foreign") is None
