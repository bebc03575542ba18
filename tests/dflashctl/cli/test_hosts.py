"""`hosts trust` learns a key only after somebody vouched for it; `hosts list` shows what deploy remembered."""

from __future__ import annotations

import json
import stat

import pytest
from sshoperator import Operator
from sshrelay import Relay
from testbed.sshd import Sshd, missing_sshd

from dflashctl.destinations import Destination, DestinationStore
from remote.protocol.errors import ExitCode
from tests.dflashctl.terminal import on_terminal

pytestmark = pytest.mark.skipif(bool(missing_sshd()), reason=missing_sshd())


@pytest.fixture
def operator(tmp_path):
    made = Operator(tmp_path)
    yield made
    for ssh in made.opened:
        ssh.close()


@pytest.fixture
def sshd(operator):
    with Sshd() as made:
        operator.configure(made)
        yield made


@pytest.fixture
def trust(cli, operator, sshd):
    """Return a function that runs `hosts trust` without a terminal."""

    def run(*arguments, host=None):
        host = host or f"127.0.0.1:{sshd.port}"
        return cli("hosts", "trust", "--host", host, "--ssh-config", str(operator.config), *arguments)

    return run


def at_a_terminal(cli, answer, *arguments, **environment):
    """Run a command line with all three streams on a terminal, where somebody types `answer`."""
    environment = cli.environment(TERM="xterm", **environment)
    return on_terminal(cli.command(*arguments), environment, cli.directory, typed=answer)


def connects(operator, sshd):
    channel = operator.ssh(sshd).open(["echo", "in"])
    answer = channel.receive(10)
    channel.close()
    return answer == b"in\n"


def test_without_a_terminal_the_fingerprint_must_be_given(trust, operator, sshd):
    ran = trust()
    assert ran.returncode == ExitCode.USAGE
    assert f"--fingerprint {sshd.fingerprint}" in ran.stderr
    assert f"ED25519 {sshd.fingerprint}" in ran.stderr
    assert not operator.known_hosts.exists()


def test_a_key_with_the_right_fingerprint_is_learnt(trust, operator, sshd):
    ran = trust("--fingerprint", sshd.fingerprint)
    assert (ran.returncode, ran.stdout) == (0, "")
    assert f"added to {operator.known_hosts}" in ran.stderr
    assert operator.known_hosts.read_text() == sshd.known_hosts_line()
    assert stat.S_IMODE(operator.known_hosts.stat().st_mode) == 0o600
    assert connects(operator, sshd)
    # Nobody has to log in for that.
    assert sshd.log().count("Accepted publickey") == 1


def test_the_fingerprint_may_come_without_its_prefix(trust, operator, sshd):
    assert trust("--fingerprint", sshd.fingerprint.removeprefix("SHA256:")).returncode == 0


def test_a_wrong_fingerprint_learns_nothing(trust, operator, sshd):
    ran = trust("--fingerprint", "SHA256:" + "A" * 43)
    assert ran.returncode == ExitCode.NO_ANSWER
    assert "another key" in ran.stderr
    assert sshd.fingerprint in ran.stderr
    assert not operator.known_hosts.exists()


def test_a_known_key_is_left_alone(trust, operator, sshd):
    operator.knows(sshd)
    before = operator.known_hosts.read_bytes()
    ran = trust()
    assert ran.returncode == 0
    assert f"is known already, from {operator.known_hosts}:1" in ran.stderr
    assert operator.known_hosts.read_bytes() == before


def test_a_changed_key_needs_replace(trust, operator, sshd):
    operator.known_hosts.write_text("# mine\n" + sshd.known_hosts_line() + "other ssh-ed25519 AAAA\n")
    old = sshd.fingerprint
    sshd.new_host_key()
    ran = trust("--fingerprint", sshd.fingerprint)
    assert ran.returncode == ExitCode.NO_ANSWER
    assert "--replace" in ran.stderr
    assert old in ran.stderr
    ran = trust("--fingerprint", sshd.fingerprint, "--replace")
    assert ran.returncode == 0
    # Both are shown, so that somebody can see what is given up.
    assert old in ran.stderr
    assert sshd.fingerprint in ran.stderr
    assert operator.known_hosts.read_text() == "# mine\nother ssh-ed25519 AAAA\n" + sshd.known_hosts_line()
    assert connects(operator, sshd)


def test_replace_alone_is_no_consent(trust, operator, sshd):
    operator.knows(sshd)
    sshd.new_host_key()
    before = operator.known_hosts.read_bytes()
    assert trust("--replace").returncode == ExitCode.USAGE
    assert operator.known_hosts.read_bytes() == before


def test_a_revoked_key_is_never_learnt(trust, operator, sshd):
    operator.known_hosts.write_text(f"@revoked * {sshd.host_key}\n")
    ran = trust("--fingerprint", sshd.fingerprint, "--replace")
    assert ran.returncode == ExitCode.NO_ANSWER
    assert "is revoked" in ran.stderr


def test_an_old_key_in_another_file_cannot_be_replaced(trust, operator, sshd, tmp_path):
    (tmp_path / "site").write_text(sshd.known_hosts_line())
    operator.configure(sshd, "Host *", f" GlobalKnownHostsFile {tmp_path}/site")
    sshd.new_host_key()
    ran = trust("--fingerprint", sshd.fingerprint, "--replace")
    assert ran.returncode == ExitCode.NO_ANSWER
    assert f"{tmp_path}/site:1" in ran.stderr
    assert not operator.known_hosts.exists()


def test_where_no_key_can_be_kept(trust, operator, sshd):
    operator.configure(sshd, "Host *", " UserKnownHostsFile none")
    assert trust("--fingerprint", sshd.fingerprint).returncode == ExitCode.USAGE
    operator.configure(sshd, "Host *", " UserKnownHostsFile /dev/null")
    assert trust("--fingerprint", sshd.fingerprint).returncode == ExitCode.NO_ANSWER


def test_names_are_hashed_where_the_configuration_says_so(trust, operator, sshd):
    operator.configure(sshd, "Host *", " HashKnownHosts yes")
    assert trust("--fingerprint", sshd.fingerprint).returncode == 0
    assert operator.known_hosts.read_text().startswith("|1|")
    assert connects(operator, sshd)


def test_json(trust, operator, sshd):
    ran = trust("--fingerprint", sshd.fingerprint, "--json")
    (key,) = json.loads(ran.stdout)["keys"]
    assert (key["type"], key["fingerprint"], key["state"]) == ("ssh-ed25519", sshd.fingerprint, "new")
    assert (key["name"], key["file"]) == (f"[127.0.0.1]:{sshd.port}", str(operator.known_hosts))
    ran = trust("--json")
    assert json.loads(ran.stdout)["keys"][0]["state"] == "known"
    sshd.stop()
    ran = trust("--json")
    assert json.loads(ran.stdout)["code"] == ExitCode.NO_ANSWER


def test_gateways_come_first(trust, operator, sshd):
    with Sshd() as gateway:
        gateway.authorize(sshd.client_key.with_suffix(".pub"))
        jump = f" ProxyJump 127.0.0.1:{gateway.port}"
        operator.configure(sshd, "Host inner", " HostName 127.0.0.1", f" Port {sshd.port}", jump)
        ran = trust("--fingerprint", sshd.fingerprint, host="inner")
        assert ran.returncode == ExitCode.NO_ANSWER
        assert f"the gateway 127.0.0.1:{gateway.port} shows another key" in ran.stderr
        assert "Accepted" not in gateway.log()
        ran = trust("--fingerprint", gateway.fingerprint, "--fingerprint", sshd.fingerprint, "--json", host="inner")
        assert [key["port"] for key in json.loads(ran.stdout)["keys"]] == [gateway.port, sshd.port]
        assert "Accepted" not in sshd.log()
        channel = operator.ssh("inner").open(["echo", "in"])
        assert channel.receive(10) == b"in\n"
        channel.close()


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("yes\n", 0), ("\n", 1), ("n\n", 1), ("\x04", 1)])
def test_at_a_terminal_somebody_is_asked(cli, operator, sshd, answer, code):
    line = ["hosts", "trust", "--host", f"127.0.0.1:{sshd.port}", "--ssh-config", str(operator.config)]
    ended, seen = at_a_terminal(cli, answer, *line)
    assert ended == code
    assert "[y/N]" in seen
    assert sshd.fingerprint in seen
    assert operator.known_hosts.exists() == (code == 0)


def test_a_dumb_terminal_asks_nothing(cli, operator, sshd):
    line = ["hosts", "trust", "--host", f"127.0.0.1:{sshd.port}", "--ssh-config", str(operator.config)]
    ended, seen = at_a_terminal(cli, "y\n", *line, NO_COLOR="1")
    assert (ended, "[y/N]" in seen) == (ExitCode.USAGE, False)


def test_this_machine_has_no_key(cli):
    ran = cli("hosts", "trust")
    assert ran.returncode == ExitCode.USAGE
    assert "--host" in ran.stderr


def test_a_bad_destination_is_a_usage_error(cli):
    assert cli("hosts", "trust", "--host", "-oProxyCommand=x").returncode == ExitCode.USAGE
    assert cli("hosts", "trust", "--host", "box:0").returncode == ExitCode.USAGE


def test_the_list_marks_the_destination_in_use(cli):
    assert "no destination yet" in cli("hosts", "list").stdout
    store = DestinationStore(cli.home)
    store.remember(Destination("10.1.2.6", "200", root="/opt/dflashctl", release="abc"), make_current=True)
    store.remember(Destination("local", root="/tmp/x"), make_current=False)
    lines = cli("hosts", "list").stdout.splitlines()
    assert lines[0].split() == ["host", "ct", "root", "release"]
    assert lines[1].split() == ["*", "10.1.2.6", "200", "/opt/dflashctl", "abc"]
    assert lines[2].split() == ["local", "/tmp/x"]
    listed = json.loads(cli("hosts", "list", "--json").stdout)
    assert (listed["current"], len(listed["known"])) == ("10.1.2.6/200", 2)


def test_help_knows_both(cli):
    page = cli("--help").stdout
    assert "hosts trust" in page
    assert "hosts list" in page
    assert "--fingerprint" in cli("hosts", "--help").stdout


def test_debug_shows_what_went_wrong_in_paramikos_thread(cli, operator, sshd):
    line = ["status", "--host", f"127.0.0.1:{sshd.port}", "--ssh-config", str(operator.config)]
    operator.knows(sshd)
    with Relay(sshd.port, garble={5: 255}) as relay:
        line[2] = f"127.0.0.1:{relay.port}"
        quiet, loud = cli.process(*line), cli.process(*line, "--debug")
    assert (quiet.returncode, loud.returncode) == (ExitCode.NO_ANSWER, ExitCode.NO_ANSWER)
    assert len(quiet.stderr.splitlines()) == 3
    assert "paramiko.transport: Traceback" in loud.stderr
