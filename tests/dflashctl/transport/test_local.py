"""Channels to real child processes: every wait ends, no pipe blocks another, nothing is left behind."""

from __future__ import annotations

import pwd
import sys
import time

import pytest

from dflashctl.errors import NoProgram
from dflashctl.transport import ChannelClosed, Silence
from dflashctl.transport.local import Local
from remote.protocol.identity import read_stat


def python(program):
    return Local().open([sys.executable, "-c", program])


def read_all(channel):
    data = b""
    while piece := channel.receive(10):
        data += piece
    return data


def test_bytes_go_through_unchanged_in_both_directions():
    payload = bytes(range(256)) * 20_000
    channel = python("import sys, shutil; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)")
    # Five megabytes each way: far more than the pipes hold, so sending has to take in what comes back.
    channel.send(payload, 10)
    channel.finish()
    assert read_all(channel) == payload
    channel.close()


def test_a_flood_on_stderr_does_not_block_stdout_and_its_end_is_kept():
    channel = python("import sys; sys.stderr.write('x' * 3_000_000 + 'last words'); print('done')")
    assert read_all(channel) == b"done\n"
    assert channel.diagnostics().endswith("last words")
    assert len(channel.diagnostics()) <= 4096
    channel.close()


def test_silence_is_bounded_in_both_directions():
    channel = python("import time; time.sleep(60)")
    began = time.monotonic()
    with pytest.raises(Silence):
        channel.receive(0.2)
    with pytest.raises(Silence):
        channel.send(b"x" * 10_000_000, 0.2)
    assert time.monotonic() - began < 10
    channel.close()


def test_a_reader_who_ended_is_told_apart_and_his_words_are_kept():
    channel = python("import sys; print('no', flush=True); sys.stdin.close(); sys.exit(3)")
    with pytest.raises(ChannelClosed):
        channel.send(b"x" * 10_000_000, 10)
    with pytest.raises(ChannelClosed):
        channel.send(b"more", 1)
    assert read_all(channel) == b"no\n"
    channel.close()


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", "import sys; sys.stdin.read()", "pass"])
def test_close_leaves_no_process(program, monkeypatch):
    monkeypatch.setattr("dflashctl.transport.local._CLOSE_PATIENCE", 0.2)
    channel = python(f"import os; print(os.getpid(), flush=True); {program}")
    pid = int(channel.receive(10))
    channel.close()
    channel.close()
    assert read_stat(pid) is None


def test_the_child_has_a_session_of_its_own_so_that_ctrl_c_spares_it():
    channel = python("import os; print(os.getsid(0) == os.getpid())")
    assert read_all(channel) == b"True\n"
    channel.close()


@pytest.mark.parametrize(("uid", "user"), [(0, "root"), (1, pwd.getpwuid(1).pw_name), (987_654, "#987654")])
def test_it_knows_who_runs_it(monkeypatch, uid, user):
    monkeypatch.setattr("os.geteuid", lambda: uid)
    assert Local().user == user


@pytest.mark.parametrize("path", ["/nonexistent/python3", "/etc/passwd", "/etc/passwd/python"])
def test_a_python_that_is_none_is_no_answer(path):
    with pytest.raises(NoProgram) as caught:
        Local().open([path, "-c", ""])
    assert path in caught.value.error
    assert "--python" in caught.value.hint
