"""Which keys are offered, in which order: from a real agent, from files, with certificates."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading

import pytest
from testbed.sshd import Sshd, make_key, missing_sshd

from dflashctl.errors import NoAnswer

pytestmark = pytest.mark.skipif(bool(missing_sshd()), reason=missing_sshd())


@pytest.fixture
def agent(tmp_path):
    """Return a function that adds a key to a real ssh-agent; its socket is tmp_path/agent."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("no ssh-agent here")
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.PIPE)
    process.stdout.readline()

    def add(*arguments):
        environment = os.environ | {"SSH_AUTH_SOCK": str(path), "SSH_ASKPASS_REQUIRE": "force"}
        subprocess.run(["ssh-add", "-q", *arguments], env=environment, check=True, capture_output=True, timeout=10)

    add.path = path
    yield add
    process.send_signal(signal.SIGTERM)
    process.wait(5)
    process.stdout.close()


@pytest.fixture
def configure(operator, shared_sshd):
    """Return a function that writes a configuration of these lines alone, the known hosts aside."""
    operator.knows(shared_sshd)

    def write(*lines):
        base = [f"UserKnownHostsFile {operator.known_hosts}", "ConnectTimeout 2"]
        operator.config.write_text("\n".join([*lines, *base]) + "\n")
        return operator.ssh(shared_sshd)

    return write


def works(ssh):
    channel = ssh.open(["echo", "in"])
    answer = channel.receive(10)
    channel.close()
    return answer == b"in\n"


def denial(ssh):
    with pytest.raises(NoAnswer) as caught:
        ssh.open(["true"])
    return caught.value


def test_a_key_of_the_agent(agent, configure, shared_sshd):
    agent(shared_sshd.client_key)
    assert works(configure(f"IdentityAgent {agent.path}", "IdentityFile none"))


def test_the_agent_of_the_environment(agent, configure, shared_sshd, monkeypatch):
    agent(shared_sshd.client_key)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.path))
    assert works(configure("IdentityFile none"))
    assert "no key to offer" in denial(configure("IdentityFile none", "IdentityAgent none")).cause


def test_identities_only_keeps_the_agents_other_keys_back(agent, configure, shared_sshd, tmp_path):
    agent(shared_sshd.client_key)
    other = make_key(tmp_path / "other")
    lines = (f"IdentityAgent {agent.path}", f"IdentityFile {other}")
    assert denial(configure(*lines, "IdentitiesOnly yes")).cause == f"refused: {other}"
    assert works(configure(*lines))


def test_a_public_key_names_one_of_the_agent(agent, configure, shared_sshd, tmp_path):
    agent(shared_sshd.client_key)
    public = shutil.copy(f"{shared_sshd.client_key}.pub", tmp_path / "token.pub")
    lines = (f"IdentityAgent {agent.path}", f"IdentityFile {public}", "IdentitiesOnly yes")
    assert works(configure(*lines))
    agent("-D")
    assert f"{public} (not in the agent)" in denial(configure(*lines)).cause


def test_an_encrypted_key_that_the_agent_holds(agent, configure, shared_sshd, tmp_path):
    locked = tmp_path / "locked"
    shutil.copy(shared_sshd.client_key, locked)
    locked.chmod(0o600)
    agent(locked)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", locked], check=True, capture_output=True)
    # No .pub beside it: the public half stands unencrypted in the private file.
    assert works(configure(f"IdentityAgent {agent.path}", f"IdentityFile {locked}", "IdentitiesOnly yes"))


def test_named_keys_come_before_the_agents_others(agent, operator, tmp_path):
    with Sshd(extra="MaxAuthTries 2") as sshd:
        for number in range(5):
            agent(make_key(tmp_path / f"key{number}"))
        agent(sshd.client_key)
        operator.knows(sshd)
        base = f"UserKnownHostsFile {operator.known_hosts}\nIdentityAgent {agent.path}\n"
        operator.config.write_text(base + f"IdentityFile {sshd.client_key}\n")
        assert works(operator.ssh(sshd))
        operator.config.write_text(base + "IdentityFile none\n")
        error = denial(operator.ssh(sshd))
    assert "closed the connection after" in error.cause
    assert "from the agent" in error.cause


def test_an_agent_that_is_gone_is_said_only_when_nothing_else_helps(configure, shared_sshd, tmp_path):
    gone = f"IdentityAgent {tmp_path}/gone"
    assert works(configure(gone, f"IdentityFile {shared_sshd.client_key}"))
    assert "the agent (No such file" in denial(configure(gone, "IdentityFile none")).cause


def test_an_agent_that_hangs_is_given_up(configure, shared_sshd, tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "hangs"))
        listener.listen()
        ssh = configure(f"IdentityAgent {tmp_path}/hangs", f"IdentityFile {shared_sshd.client_key}")
        assert works(ssh)


def test_an_agent_that_does_not_sign(agent, configure, shared_sshd, tmp_path):
    agent(shared_sshd.client_key)

    def listen():
        client, _ = listener.accept()
        with client, socket.socket(socket.AF_UNIX) as real:
            real.connect(str(agent.path))
            while request := client.recv(10_000):
                if request[4] == 13:  # SSH2_AGENTC_SIGN_REQUEST, answered with SSH_AGENT_FAILURE
                    client.sendall(b"\x00\x00\x00\x01\x05")
                else:
                    real.sendall(request)
                    client.sendall(real.recv(10_000))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "stubborn"))
        listener.listen()
        thread = threading.Thread(target=listen)
        thread.start()
        error = denial(configure(f"IdentityAgent {tmp_path}/stubborn", "IdentityFile none"))
        thread.join(5)
    assert "does not sign" in error.error


@pytest.fixture
def certified(operator, tmp_path):
    """An sshd that lets in by certificate only, and a key with one beside it."""
    authority, key = make_key(tmp_path / "authority"), make_key(tmp_path / "mine")
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run(
        ["ssh-keygen", "-q", "-s", authority, "-I", "me", "-n", user, f"{key}.pub"], check=True, capture_output=True
    )
    with Sshd(extra=f"TrustedUserCAKeys {authority}.pub") as sshd:
        operator.knows(sshd)
        yield sshd, key


def test_a_certificate_beside_the_key(certified, operator):
    sshd, key = certified
    operator.configure(sshd, f"IdentityFile {key}")
    assert works(operator.ssh(sshd))


def test_a_certificate_elsewhere(certified, operator, tmp_path):
    sshd, key = certified
    moved = (tmp_path / "mine-cert.pub").rename(tmp_path / "moved.pub")
    operator.configure(sshd, f"IdentityFile {key}", f"CertificateFile {moved}", f"CertificateFile {tmp_path}/missing")
    assert works(operator.ssh(sshd))


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_other_types_of_keys(operator, kind, tmp_path, shared_sshd):
    key = make_key(tmp_path / kind, kind)
    with Sshd() as sshd:
        sshd.authorize(key.with_suffix(".pub"))
        operator.configure(sshd, f"IdentityFile {key}")
        operator.knows(sshd)
        assert works(operator.ssh(sshd))


def test_the_default_keys_of_a_home_are_not_missed(operator, shared_sshd, tmp_path, monkeypatch):
    # Without ssh on PATH: ssh itself takes the home directory from the password file.
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "known_hosts").write_text(shared_sshd.known_hosts_line())
    operator.config.write_text("Host *\n IdentityAgent none\n")
    error = denial(operator.ssh(shared_sshd))
    assert "no key to offer" in error.cause
    assert "left out" not in error.cause
    shutil.copy(shared_sshd.client_key, tmp_path / ".ssh" / "id_ed25519")
    assert works(operator.ssh(shared_sshd))
