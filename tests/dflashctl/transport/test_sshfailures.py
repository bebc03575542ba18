"""Each way in which no connection comes about has a sentence of its own and exit code 8, within the bound."""

from __future__ import annotations

import getpass
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sshrelay import Relay
from testbed.sshd import Sshd, free_port, make_key, missing_sshd

from dflashctl.errors import NoAnswer
from dflashctl.transport import Silence
from remote.protocol.errors import DflashError, ExitCode

pytestmark = pytest.mark.skipif(bool(missing_sshd()), reason=missing_sshd())


def failure(ssh, *argv):
    """Return how opening a channel fails; nothing of the attempt may be left."""
    with pytest.raises(DflashError) as caught:
        ssh.open(argv or ["true"])
    assert caught.value.code == ExitCode.NO_ANSWER
    assert caught.value.cause
    assert caught.value.hint
    expect_no_thread()
    return caught.value


def expect_no_thread():
    deadline = time.monotonic() + 5
    while threads_of_paramiko() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads_of_paramiko() == []


def threads_of_paramiko():
    """Return the threads that it and the bounds of ours started; those of a relay are not among them."""
    return [
        thread
        for thread in threading.enumerate()
        if type(thread).__module__.startswith("paramiko")
        or isinstance(thread, threading.Timer)
        or thread.name == "bounded"
    ]


@pytest.fixture
def known(operator, shared_sshd):
    """The operator, who knows the shared sshd."""
    operator.configure(shared_sshd)
    operator.knows(shared_sshd)
    return operator


def test_a_name_that_nobody_knows(known):
    error = failure(known.ssh("no-such-host.invalid"))
    assert error.error == "the host name no-such-host.invalid cannot be resolved"


def test_a_name_server_that_is_silent(known, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(2.5))
    began = time.monotonic()
    with pytest.raises(NoAnswer) as caught:
        known.ssh("box").open(["true"])
    assert time.monotonic() - began < 2.4
    assert "name server" in caught.value.cause


def test_nobody_listens(known):
    port = free_port()
    error = failure(known.ssh(f"127.0.0.1:{port}"))
    assert error.error == f"127.0.0.1:{port} refuses the connection"


def test_an_address_without_a_route(known):
    # A documentation prefix: no machine routes it. Where it is dropped rather than refused, the time-out ends it.
    error = failure(known.ssh("[2001:db8::1]"))
    assert "[2001:db8::1]" in error.error


def test_a_machine_that_drops_everything(known):
    # A listener whose queue is full: the kernel drops further SYNs, as a firewall does.
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        error = failure(known.ssh(f"127.0.0.1:{full.getsockname()[1]}"))
        for each in waiting:
            each.close()
    assert error.error.startswith("no connection to 127.0.0.1:")
    assert "2 s" in error.cause


def test_something_else_listens(known):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            client, _ = server.accept()
            client.recv(100)
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            client.close()

        thread = threading.Thread(target=answer)
        thread.start()
        error = failure(known.ssh(f"127.0.0.1:{server.getsockname()[1]}"))
        thread.join()
    assert "speaks no ssh" in error.error


def test_a_frozen_sshd(operator, sshd):
    operator.configure(sshd)
    operator.knows(sshd)
    sshd.freeze()
    error = failure(operator.ssh(sshd))
    assert "accepts connections but does not answer" in error.error
    assert "2 s" in error.cause


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1))
def test_cut_anywhere_on_the_way_to_the_first_byte(known, shared_sshd, total, share):
    with Relay(shared_sshd.port, limit=int(share * (total - 1)), cut=True) as relay:
        known.known_hosts.write_text(shared_sshd.known_hosts_line().replace(str(shared_sshd.port), str(relay.port)))
        began = time.monotonic()
        error = failure(known.ssh(f"127.0.0.1:{relay.port}"))
        assert time.monotonic() - began < 6
    assert str(relay.port) in error.error


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 0.8), bit=st.integers(0, 7))
def test_garbled_anywhere_on_the_way(known, shared_sshd, total, place, bit):
    with Relay(shared_sshd.port, garble={int(place * total): 1 << bit}) as relay:
        known.known_hosts.write_text(shared_sshd.known_hosts_line().replace(str(shared_sshd.port), str(relay.port)))
        ssh = known.ssh(f"127.0.0.1:{relay.port}")
        # A few bytes do not matter: the version's comment, or a name in a list of algorithms that nobody chose.
        try:
            ssh.open(["true"]).close()
        except DflashError as error:
            code = error.code
            assert code == ExitCode.NO_ANSWER
        ssh.close()
    expect_no_thread()


@pytest.mark.parametrize("share", [0.01, 0.3, 0.85, 0.95, 0.999])
def test_frozen_anywhere_on_the_way_to_the_first_byte(known, shared_sshd, total, share):
    with Relay(shared_sshd.port, limit=int(share * total)) as relay:
        known.known_hosts.write_text(shared_sshd.known_hosts_line().replace(str(shared_sshd.port), str(relay.port)))
        began = time.monotonic()
        error = failure(known.ssh(f"127.0.0.1:{relay.port}"))
        # ConnectTimeout is 2 s, and a stage that just began has all of it.
        assert time.monotonic() - began < 7
    assert str(relay.port) in error.error


@pytest.fixture
def total(known, shared_sshd):
    """How many bytes a server says until a command runs."""
    with Relay(shared_sshd.port) as relay:
        known.known_hosts.write_text(shared_sshd.known_hosts_line().replace(str(shared_sshd.port), str(relay.port)))
        ssh = known.ssh(f"127.0.0.1:{relay.port}")
        ssh.open(["sleep", "1"]).close()
        total = relay.passed
        ssh.close()
    return total


def test_frozen_with_a_connection_open(operator, sshd):
    operator.configure(sshd)
    operator.knows(sshd)
    ssh = operator.ssh(sshd)
    channel = ssh.open(["cat"])
    sshd.freeze()
    with pytest.raises(Silence):
        channel.receive(0.3)
    began = time.monotonic()
    with pytest.raises(Silence):
        # More than the window and all buffers between: at the end the socket itself takes nothing.
        channel.send(b"x" * 30_000_000, 0.5)
    channel.close()
    ssh.close()
    assert time.monotonic() - began < 6


def test_frozen_when_the_second_command_comes(operator, sshd):
    operator.configure(sshd)
    operator.knows(sshd)
    ssh = operator.ssh(sshd)
    ssh.open(["true"]).close()
    sshd.freeze()
    error = failure(ssh)
    assert "fell silent" in error.error
    sshd.thaw()
    # A connection that once hung is not used again.
    channel = ssh.open(["echo", "back"])
    assert channel.receive(5) == b"back\n"
    channel.close()


def test_the_wrong_key(known, tmp_path):
    other = make_key(tmp_path / "other")
    known.config.write_text(known.config.read_text().replace("IdentityFile", f"IdentityFile {other}\n #"))
    error = failure(known.ssh(target(known)))
    assert f"does not let {getpass.getuser()} in" in error.error
    assert f"refused: {other}" in error.cause
    assert "--host root@127.0.0.1" in error.hint


def target(operator):
    """Return the destination of the machine that the operator knows."""
    return operator.known_hosts.read_text().split()[0].strip("[").replace("]", "")


def test_a_user_that_was_named_is_not_doubted(known, tmp_path):
    known.config.write_text(known.config.read_text().replace("IdentityFile", "IdentityFile none\n #"))
    error = failure(known.ssh(f"somebody@{target(known)}"))
    assert "does not let somebody in" in error.error
    assert "no key to offer" in error.cause
    assert "nobody named a user" not in error.hint


def test_an_encrypted_key_names_ssh_add(known, shared_sshd, tmp_path):
    key = make_key(tmp_path / "locked", passphrase="secret")
    known.config.write_text(known.config.read_text().replace(str(shared_sshd.client_key), str(key)))
    error = failure(known.ssh(shared_sshd))
    assert "encrypted" in error.cause
    assert f"ssh-add {key}" in error.hint


@pytest.mark.parametrize(
    ("content", "word"), [(None, "no such file"), (b"junk", "no private key"), ("folder", "directory")]
)
def test_a_key_file_that_is_none(known, shared_sshd, tmp_path, content, word):
    key = tmp_path / "key"
    if content == "folder":
        key.mkdir()
    elif content is not None:
        key.write_bytes(content)
    known.config.write_text(known.config.read_text().replace(str(shared_sshd.client_key), str(key)))
    error = failure(known.ssh(shared_sshd))
    assert str(key) in error.cause
    assert word in error.cause.lower()


def test_too_many_keys(operator, tmp_path):
    with Sshd(extra="MaxAuthTries 2") as sshd:
        keys = [make_key(tmp_path / f"key{number}") for number in range(4)]
        operator.configure(sshd, "Host *", *(f" IdentityFile {key}" for key in keys))
        operator.knows(sshd)
        error = failure(operator.ssh(sshd))
    assert "key0" in error.cause
    assert "after" in error.cause
    assert "IdentitiesOnly" in error.hint


def test_a_second_factor(operator):
    with Sshd(extra="AuthenticationMethods publickey,keyboard-interactive\nKbdInteractiveAuthentication yes") as sshd:
        operator.configure(sshd)
        operator.knows(sshd)
        error = failure(operator.ssh(sshd))
    assert "wants more than a key" in error.error
    assert "keyboard-interactive" in error.cause


def test_passwords_only(operator):
    with Sshd(extra="PubkeyAuthentication no\nPasswordAuthentication yes") as sshd:
        operator.configure(sshd)
        operator.knows(sshd)
        error = failure(operator.ssh(sshd))
    assert "accepts password" in error.cause
    assert "types no passwords" in error.hint


def test_no_session_left(operator):
    with Sshd(extra="MaxSessions 2") as sshd:
        operator.configure(sshd)
        operator.knows(sshd)
        ssh = operator.ssh(sshd)
        channels = [ssh.open(["cat"]) for _ in range(2)]
        with pytest.raises(NoAnswer) as caught:
            ssh.open(["true"])
        assert "no further session" in caught.value.error
        assert "MaxSessions" in caught.value.hint
        channels[0].send(b"x", 5)
        assert channels[0].receive(5) == b"x"
        for channel in channels:
            channel.close()


def test_nothing_in_common(operator):
    with Sshd(extra="Ciphers chacha20-poly1305@openssh.com") as sshd:
        operator.configure(sshd)
        operator.knows(sshd)
        error = failure(operator.ssh(sshd))
    assert "no algorithm in common" in error.error


def test_paramiko_writes_nothing_to_stderr(operator, sshd, tmp_path):
    operator.configure(sshd)
    operator.knows(sshd)
    program = (
        "import sys\nfrom dflashctl.transport.ssh import Ssh\nfrom dflashctl.errors import NoAnswer\n"
        "ssh = Ssh(sys.argv[1], config_file=sys.argv[2])\nchannel = ssh.open(['cat'])\nprint('open', flush=True)\n"
        "sys.stdin.readline()\nprint(channel.receive(5))\ntry: ssh.open(['true'])\nexcept NoAnswer as error: print(error.error)\n"
    )
    command = [sys.executable, "-c", program, f"127.0.0.1:{sshd.port}", str(operator.config)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout.readline() == "open\n"
        sshd.stop()
        out, err = process.communicate("\n", timeout=20)
    assert (out.splitlines()[0], err) == ("b''", "")
    assert "refuses the connection" in out


def test_a_process_ends_although_the_handshake_hangs(operator, sshd):
    operator.configure(sshd)
    operator.knows(sshd)
    with Relay(sshd.port, limit=100) as relay:
        program = "import sys; from dflashctl.transport.ssh import Ssh; Ssh(sys.argv[1], config_file=sys.argv[2]).open(['true'])"
        began = time.monotonic()
        ran = subprocess.run(
            [sys.executable, "-c", program, f"127.0.0.1:{relay.port}", str(operator.config)],
            capture_output=True,
            timeout=20,
            check=False,
        )
    assert ran.returncode == 1
    # paramiko's timer for the handshake would hold the process for as long again.
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("bash: line 1: /opt/py: No such file or directory", "/opt/py"),
        ("bash: python9: command not found", "python9"),
        ("sh: 1: /usr/bin/python3: not found", "/usr/bin/python3"),
        ("zsh:1: no such file or directory: /opt/py", "/opt/py"),
        ("/bin/sh: /usr/bin/python3: Permission denied", "/usr/bin/python3"),
        ("motd\nThis account is currently not available.\n", "runs nothing"),
    ],
)
def test_what_a_shell_says_is_explained(known, shared_sshd, said, word):
    error = known.ssh(shared_sshd).explain(said)
    assert error is not None
    assert word in error.error
    assert error.code == ExitCode.NO_ANSWER


@pytest.mark.parametrize("said", ["", "Traceback (most recent call last):\nValueError: x", "hello: world"])
def test_what_no_shell_says_is_not(known, shared_sshd, said):
    assert known.ssh(shared_sshd).explain(said) is None


def test_what_the_real_shell_says_is_explained(ssh):
    channel = ssh.open(["/no/such/python", "-c", "x"])
    assert channel.receive(5) == b""
    error = ssh.explain(channel.diagnostics())
    assert error is not None
    assert "/no/such/python" in error.error
    channel.close()
