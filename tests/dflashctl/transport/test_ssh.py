"""Host keys are verified on every hop before anybody logs in; gateways, proxy commands, and what doctor is told."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from sshrelay import Relay
from testbed.sshd import Sshd, missing_sshd

from dflashctl.errors import NoAnswer
from dflashctl.transport import Silence, make_transport
from dflashctl.transport.ssh import Ssh
from remote.protocol.errors import DflashError, ExitCode

pytestmark = pytest.mark.skipif(bool(missing_sshd()), reason=missing_sshd())


def output(ssh, *argv):
    channel = ssh.open(argv)
    data = b""
    while piece := channel.receive(10):
        data += piece
    channel.close()
    return data.decode()


def refusal(ssh):
    with pytest.raises(NoAnswer) as caught:
        ssh.open(["true"])
    assert caught.value.code == ExitCode.NO_ANSWER
    return caught.value


@pytest.fixture
def gateway():
    with Sshd() as made:
        yield made


@pytest.fixture
def behind(operator, shared_sshd, gateway):
    """The operator, with a way to the shared sshd called `inner` through a gateway; he knows both."""
    gateway.authorize(shared_sshd.client_key.with_suffix(".pub"))
    lines = ["Host inner", " HostName 127.0.0.1", f" Port {shared_sshd.port}", f" ProxyJump 127.0.0.1:{gateway.port}"]
    operator.configure(shared_sshd, *lines)
    operator.knows(shared_sshd, gateway)
    return operator


def test_it_is_what_a_destination_makes(operator, shared_sshd):
    operator.configure(shared_sshd)
    transport = make_transport("trainer@127.0.0.1", "", str(operator.config))
    assert isinstance(transport, Ssh)
    assert (transport.name, transport.user) == ("trainer@127.0.0.1", "trainer")


@pytest.mark.parametrize("destination", ["", "-oProxyCommand=touch hit", "a b", "box:99999", "$(id)"])
def test_a_bad_destination_is_a_usage_error_at_once(destination):
    with pytest.raises(DflashError) as caught:
        Ssh(destination)
    assert caught.value.code == ExitCode.USAGE


def test_a_command_line_with_a_mistake_imports_neither_fabric_nor_paramiko():
    program = (
        "import sys\nfrom dflashctl.transport.ssh import Ssh\nassert Ssh('root@box').user == 'root'\n"
        "assert not {'fabric', 'paramiko', 'invoke'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_key_is_refused_with_its_fingerprint(operator, shared_sshd):
    operator.configure(shared_sshd)
    before = shared_sshd.log().count("Accepted")
    error = refusal(operator.ssh(shared_sshd))
    assert error.error == f"the host key of 127.0.0.1:{shared_sshd.port} is not known"
    assert f"ED25519 {shared_sshd.fingerprint}" in error.cause
    assert f"dflashctl hosts trust --host 127.0.0.1:{shared_sshd.port}" in error.hint
    # Nobody logged in: a machine that only pretends must not see what we would do there.
    assert shared_sshd.log().count("Accepted") == before
    assert not operator.known_hosts.exists()


def test_a_changed_key_is_refused_naming_the_old_one(operator, sshd):
    operator.configure(sshd)
    operator.known_hosts.write_text("# first line\n" + sshd.known_hosts_line())
    old = sshd.fingerprint
    assert output(operator.ssh(sshd), "echo", "x") == "x\n"
    sshd.new_host_key()
    error = refusal(operator.ssh(sshd))
    assert error.error == f"the host key of 127.0.0.1:{sshd.port} has changed"
    assert sshd.fingerprint in error.cause
    assert f"{old} in {operator.known_hosts}:2" in error.cause
    assert "--replace" in error.hint


def test_strict_host_key_checking_cannot_be_switched_off(operator, sshd):
    operator.configure(sshd, "Host *", " StrictHostKeyChecking no")
    assert "is not known" in refusal(operator.ssh(sshd)).error


def test_a_revoked_key_is_refused(operator, shared_sshd):
    operator.configure(shared_sshd)
    operator.known_hosts.write_text(shared_sshd.known_hosts_line() + f"@revoked * {shared_sshd.host_key}\n")
    error = refusal(operator.ssh(shared_sshd))
    assert "is revoked" in error.error
    assert f"{operator.known_hosts}:2" in error.cause


def test_a_key_in_a_list_of_revoked_ones_is_refused(operator, shared_sshd, tmp_path):
    (tmp_path / "revoked").write_text(shared_sshd.host_key + "\n")
    operator.configure(shared_sshd, "Host *", f" RevokedHostKeys {tmp_path}/revoked")
    operator.knows(shared_sshd)
    assert "is revoked" in refusal(operator.ssh(shared_sshd)).error


def test_a_certificate_authority_alone_is_refused_with_a_sentence(operator, shared_sshd):
    operator.configure(shared_sshd)
    operator.known_hosts.write_text(f"@cert-authority * {shared_sshd.host_key}\n")
    error = refusal(operator.ssh(shared_sshd))
    assert "certificate authority" in error.cause


def test_hashed_names_and_an_alias(operator, shared_sshd):
    operator.configure(shared_sshd, "Host *", " HostKeyAlias the-box")
    operator.known_hosts.write_text(shared_sshd.known_hosts_line("the-box", port=False))
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", operator.known_hosts], check=True, capture_output=True)
    assert output(operator.ssh(shared_sshd), "echo", "x") == "x\n"


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_type_that_is_known_is_asked_for(operator, index):
    with Sshd(host_key_types=("ed25519", "ecdsa", "rsa")) as sshd:
        operator.configure(sshd)
        operator.known_hosts.write_text(sshd.known_hosts_line().splitlines()[index] + "\n")
        assert output(operator.ssh(sshd), "echo", "x") == "x\n"


def test_a_file_of_known_hosts_that_cannot_be_read(operator, shared_sshd):
    operator.configure(shared_sshd)
    operator.known_hosts.mkdir()
    assert "cannot read the known hosts" in refusal(operator.ssh(shared_sshd)).error


def test_through_a_gateway(behind, gateway, shared_sshd):
    ssh = behind.ssh("inner")
    assert output(ssh, "sh", "-c", "echo $SSH_CONNECTION").split()[3] == str(shared_sshd.port)
    assert "Accepted publickey" in gateway.log()


def test_the_gateway_and_its_connections_end_with_close(behind, gateway):
    ssh = behind.ssh("inner")
    assert output(ssh, "echo", "x") == "x\n"
    ssh.close()
    ssh.close()
    deadline = time.monotonic() + 5
    while gateway.sessions() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gateway.sessions() == []


def test_an_unknown_key_of_the_gateway_is_refused(behind, gateway, shared_sshd):
    behind.knows(shared_sshd)
    error = refusal(behind.ssh("inner"))
    assert error.error == f"the host key of the gateway 127.0.0.1:{gateway.port} is not known"
    assert "hosts trust --host inner" in error.hint
    assert "Accepted" not in gateway.log()


def test_an_unknown_key_behind_the_gateway_is_refused(behind, gateway, shared_sshd):
    behind.knows(gateway)
    error = refusal(behind.ssh("inner"))
    assert error.error == f"the host key of 127.0.0.1:{shared_sshd.port} is not known"


def test_a_changed_key_of_the_gateway_is_refused(behind, gateway):
    gateway.new_host_key()
    assert "the gateway" in refusal(behind.ssh("inner")).error


def test_a_gateway_that_is_down_is_named(behind, gateway):
    gateway.stop()
    error = refusal(behind.ssh("inner"))
    assert error.error == f"the gateway 127.0.0.1:{gateway.port} refuses the connection"


def test_a_gateway_that_is_frozen_is_named(behind, gateway):
    gateway.freeze()
    assert "the gateway" in refusal(behind.ssh("inner")).error


def test_a_machine_that_the_gateway_does_not_reach(behind, gateway, shared_sshd):
    behind.config.write_text(behind.config.read_text().replace(f"Port {shared_sshd.port}", "Port 9"))
    error = refusal(behind.ssh("inner"))
    assert error.error == f"the gateway 127.0.0.1:{gateway.port} cannot connect to 127.0.0.1:9"


def test_a_gateway_that_forwards_nothing(operator, shared_sshd):
    with Sshd(extra="AllowTcpForwarding no") as gateway:
        gateway.authorize(shared_sshd.client_key.with_suffix(".pub"))
        operator.configure(shared_sshd, "Host inner", " HostName 127.0.0.1", f" ProxyJump 127.0.0.1:{gateway.port}")
        operator.knows(gateway)
        error = refusal(operator.ssh("inner"))
    assert "prohibited" in error.cause
    assert "AllowTcpForwarding" in error.hint


def test_a_gateway_that_is_cut_is_the_end_of_the_stream(behind, gateway):
    ssh = behind.ssh("inner")
    channel = ssh.open(["cat"])
    gateway.kill_sessions()
    assert channel.receive(10) == b""
    channel.close()
    assert output(ssh, "echo", "back") == "back\n"


def test_through_two_gateways(operator, shared_sshd, gateway, sshd):
    for each in (gateway, sshd):
        each.authorize(shared_sshd.client_key.with_suffix(".pub"))
    jumps = f"127.0.0.1:{gateway.port},127.0.0.1:{sshd.port}"
    lines = ["Host inner", " HostName 127.0.0.1", f" Port {shared_sshd.port}", f" ProxyJump {jumps}"]
    operator.configure(shared_sshd, *lines)
    operator.knows(shared_sshd, gateway, sshd)
    ssh = operator.ssh("inner")
    assert output(ssh, "echo", "x") == "x\n"
    (connection, _) = ssh.examine()
    assert connection.text.count("through") == 2
    operator.knows(shared_sshd, gateway)
    assert f"the gateway 127.0.0.1:{sshd.port}" in refusal(operator.ssh("inner")).error


RELAY = "import socket,sys,threading,shutil\ns=socket.create_connection(('127.0.0.1',int(sys.argv[1])))\n"
RELAY += (
    "threading.Thread(target=lambda: shutil.copyfileobj(s.makefile('rb',0), open(1,'wb',0)), daemon=True).start()\n"
)
RELAY += "while d:=open(0,'rb',0,closefd=False).read(65536): s.sendall(d)\n"


def test_a_proxy_command(operator, shared_sshd, tmp_path):
    (tmp_path / "relay.py").write_text(RELAY)
    operator.configure(shared_sshd, "Host *", f" ProxyCommand exec '{sys.executable}' -IS {tmp_path}/relay.py %p")
    operator.knows(shared_sshd)
    ssh = operator.ssh(shared_sshd)
    assert output(ssh, "echo", "x") == "x\n"
    ssh.close()


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("sh -c 'echo no such tunnel >&2; exit 3'", "no such tunnel"),
        ("sh -c 'exit 3'", "ended with code 3"),
        ("/no/such/program %h", "No such file"),
    ],
)
def test_a_proxy_command_that_fails_says_so(operator, shared_sshd, command, word):
    operator.configure(shared_sshd, "Host *", f" ProxyCommand {command}")
    operator.knows(shared_sshd)
    error = refusal(operator.ssh(shared_sshd))
    assert "ProxyCommand" in error.error
    assert word in error.cause


def test_a_proxy_command_that_never_speaks_is_ended(operator, shared_sshd, tmp_path):
    operator.configure(shared_sshd, "Host *", f" ProxyCommand sh -c 'echo $$ > {tmp_path}/pid; exec sleep 77'")
    operator.knows(shared_sshd)
    assert "does not answer" in refusal(operator.ssh(shared_sshd)).error
    pid = int((tmp_path / "pid").read_text())
    assert subprocess.run(["ps", "-p", str(pid)], capture_output=True, check=False).returncode == 1


def test_names_in_a_proxy_command_are_no_shell_words(operator, shared_sshd, tmp_path):
    hit = tmp_path / "hit"
    operator.configure(shared_sshd, "Host *", f" ProxyCommand echo %h ; touch {hit} #")
    refusal(operator.ssh(shared_sshd))
    assert not hit.exists()


def test_doctor_sees_the_connection_and_the_key(ssh, operator, shared_sshd):
    connection, key = ssh.examine()
    assert (connection.name, connection.state, key.name, key.state) == ("ssh", "ok", "host key", "ok")
    assert f"@127.0.0.1:{shared_sshd.port}, connected in 0." in connection.text
    assert "OpenSSH" in connection.text
    assert key.text == f"ED25519 {shared_sshd.fingerprint}, known from {operator.known_hosts}:1"


def test_doctor_sees_each_key_on_the_way(behind, gateway, shared_sshd):
    connection, key = behind.ssh("inner").examine()
    assert f"through 127.0.0.1:{gateway.port}" in connection.text
    assert shared_sshd.fingerprint in key.text
    assert f"the gateway 127.0.0.1:{gateway.port}: ED25519 {gateway.fingerprint}" in key.text


def test_doctor_is_told_what_open_would_say(operator, sshd):
    operator.configure(sshd)
    (key,) = operator.ssh(sshd).examine()
    assert (key.name, key.state, key.code) == ("host key", "failed", ExitCode.NO_ANSWER)
    assert "is not known" in key.text
    assert "hosts trust" in key.hint
    sshd.stop()
    (connection,) = operator.ssh(sshd).examine()
    assert (connection.name, connection.state) == ("ssh", "failed")
    assert "refuses the connection" in connection.text


def test_small_packets_do_not_wait_for_each_other(operator, shared_sshd):
    """Nagle's algorithm off: counted in packets that wait, not by the clock."""
    import socket as sockets

    operator.configure(shared_sshd)
    operator.knows(shared_sshd)
    set_options = []
    real = sockets.socket.setsockopt

    class Watched(sockets.socket):
        def setsockopt(self, *arguments):
            set_options.append(arguments)
            return real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sockets, "socket", Watched)
        assert output(operator.ssh(shared_sshd), "echo", "x") == "x\n"
    assert (sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1) in set_options


def test_a_relay_in_between_changes_nothing(operator, shared_sshd):
    with Relay(shared_sshd.port) as relay:
        operator.configure(shared_sshd, "Host *", " HostKeyAlias the-box")
        operator.known_hosts.write_text(shared_sshd.known_hosts_line("the-box", port=False))
        ssh = operator.ssh(f"127.0.0.1:{relay.port}")
        assert output(ssh, "echo", "x") == "x\n"
        ssh.close()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_an_address_of_version_six(operator, shared_sshd):
    with Relay(shared_sshd.port, address="::1") as relay:
        operator.configure(shared_sshd)
        operator.known_hosts.write_text(f"[::1]:{relay.port} {shared_sshd.host_key}\n")
        ssh = operator.ssh(f"[::1]:{relay.port}")
        assert output(ssh, "echo", "x") == "x\n"
        assert f"@[::1]:{relay.port}," in next(ssh.examine()).text
        ssh.close()


def test_after_a_silence_the_next_command_has_a_new_connection(operator, sshd):
    """What fell silent may be frozen, and nothing would tell."""
    operator.configure(sshd)
    operator.knows(sshd)
    ssh = operator.ssh(sshd)
    channel = ssh.open(["cat"])
    with pytest.raises(Silence):
        channel.receive(0.1)
    other = ssh.open(["echo", "same connection"])
    assert other.receive(10) == b"same connection\n"
    other.close()
    channel.close()
    assert sshd.log().count("Accepted publickey") == 1
    assert output(ssh, "echo", "x") == "x\n"
    assert sshd.log().count("Accepted publickey") == 2


def test_new_keys_in_the_middle_of_much_data(operator):
    """sshd asks for new keys every megabyte here; paramiko would after half a gigabyte."""
    with Sshd(extra="RekeyLimit 1M") as sshd:
        operator.configure(sshd)
        operator.knows(sshd)
        ssh = operator.ssh(sshd)
        channel = ssh.open(["cat"])
        payload = bytes(range(256)) * 40_000
        channel.send(payload, 10)
        channel.finish()
        came = bytearray()
        while piece := channel.receive(10):
            came += piece
        channel.close()
    assert came == payload
