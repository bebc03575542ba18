from __future__ import annotations

import subprocess
import time

import pytest
from testbed.sshd import Sshd, make_key, missing_sshd

pytestmark = pytest.mark.skipif(bool(missing_sshd()), reason=missing_sshd())


@pytest.fixture
def sshd():
    with Sshd() as made:
        yield made


@pytest.fixture
def ssh(tmp_path):
    """Return a function that runs the system's ssh against an sshd, knowing its host key as of the first call."""

    def run(sshd: Sshd, *command: str, wait: bool = True):
        known = tmp_path / "known_hosts"
        if not known.exists():
            known.write_text(sshd.known_hosts_line())
        options = ["-F", "none", "-i", str(sshd.client_key), "-p", str(sshd.port), "-o", "BatchMode=yes"]
        options += ["-o", f"UserKnownHostsFile={known}", "-o", "ConnectTimeout=2", "-o", "ControlPath=none"]
        argv = ["ssh", *options, f"{sshd.users[0]}@127.0.0.1", *command]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, text=True)
        if not wait:
            return process
        out, err = process.communicate(timeout=20)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    return run


def test_a_command_runs(sshd, ssh):
    ran = ssh(sshd, "echo hello; exit 3")
    assert (ran.returncode, ran.stdout) == (3, "hello\n")
    assert sshd.log().count("Accepted publickey") == 1


def test_a_new_host_key_is_refused(sshd, ssh):
    assert ssh(sshd, "true").returncode == 0
    port, before = sshd.port, sshd.fingerprint
    sshd.new_host_key()
    assert sshd.port == port
    assert sshd.fingerprint != before
    ran = ssh(sshd, "true")
    assert ran.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED!" in ran.stderr


def test_killed_sessions_leave_what_they_ran(sshd, ssh, tmp_path):
    going = ssh(sshd, f"trap '' HUP; echo started >{tmp_path}/s; sleep 1; echo done >{tmp_path}/d", wait=False)
    deadline = time.monotonic() + 10
    while not (tmp_path / "s").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sshd.sessions()
    sshd.kill_sessions()
    assert going.wait(10) == 255
    going.stdout.close()
    going.stderr.close()
    while not (tmp_path / "d").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / "d").exists()
    assert ssh(sshd, "true").returncode == 0


def test_a_frozen_sshd_answers_nothing_until_it_is_thawed(sshd, ssh):
    sshd.freeze()
    ran = ssh(sshd, "true")
    assert ran.returncode == 255
    assert "timed out" in ran.stderr
    sshd.thaw()
    assert ssh(sshd, "true").returncode == 0


def test_a_key_that_nobody_authorized(sshd, ssh, tmp_path):
    stranger = make_key(tmp_path / "stranger")
    own = sshd.client_key
    sshd.client_key = stranger
    assert "Permission denied (publickey)." in ssh(sshd, "true").stderr
    sshd.authorize(tmp_path / "stranger.pub")
    assert ssh(sshd, "true").returncode == 0
    sshd.client_key = own


def test_two_at_once_and_one_as_the_gateway_of_the_other(sshd, ssh, tmp_path):
    with Sshd(host_key_types=("ed25519", "ecdsa")) as other:
        assert other.port != sshd.port
        (tmp_path / "known_hosts").write_text(other.known_hosts_line() + sshd.known_hosts_line())
        key = f"-i {sshd.client_key} -o UserKnownHostsFile={tmp_path}/known_hosts -F none"
        proxy = f"ProxyCommand=ssh {key} -p {sshd.port} -W 127.0.0.1:{other.port} {sshd.users[0]}@127.0.0.1"
        options = ["-F", "none", "-o", proxy, "-i", str(other.client_key), "-p", str(other.port)]
        argv = ["ssh", *options, "-o", f"UserKnownHostsFile={tmp_path}/known_hosts", f"{other.users[0]}@127.0.0.1"]
        ran = subprocess.run([*argv, "echo through"], capture_output=True, text=True, timeout=20, check=False)
        assert ran.stdout == "through\n", ran.stderr
        assert "Accepted publickey" in sshd.log()


def test_nothing_is_left_after_a_stop(sshd, ssh):
    going = ssh(sshd, "sleep 3", wait=False)
    deadline = time.monotonic() + 10
    while "Starting session" not in sshd.log() and time.monotonic() < deadline:
        time.sleep(0.02)
    sshd.stop()
    assert going.wait(10) == 255
    going.stdout.close()
    going.stderr.close()
    assert sshd.sessions() == []
    sshd.start()
    assert ssh(sshd, "true").returncode == 0
