"""What a destination means: taken apart here, and looked up as ssh itself looks it up."""

from __future__ import annotations

import getpass
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.transport.sshconfig import CONNECT_TIMEOUT, Address, expand, parse_destination, resolve
from remote.protocol.errors import DflashError, ExitCode

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh here: apt-get install openssh-client")


@pytest.fixture
def configured(tmp_path):
    """Return a function that resolves a destination by a configuration file of the given text."""

    def run(text, destination):
        (tmp_path / "config").write_text(text)
        return resolve(destination, str(tmp_path / "config"))

    return run


@pytest.fixture(params=["ssh", "paramiko"])
def reader(request, monkeypatch, tmp_path):
    """Each of the two readers of configuration files."""
    if request.param == "paramiko":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif shutil.which("ssh") is None:
        pytest.skip("no ssh here")
    return request.param


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("box", Address("box")),
        ("root@10.1.2.6", Address("10.1.2.6", "root")),
        ("root@box:2222", Address("box", "root", 2222)),
        ("fe80::1%eth0", Address("fe80::1%eth0")),
        ("[::1]:22", Address("::1", "", 22)),
        ("me@[fe80::1%eth0]", Address("fe80::1%eth0", "me")),
        ("a@b@box", Address("box", "a@b")),
        ("ssh://root@box:23", Address("box", "root", 23)),
    ],
)
def test_a_destination_is_taken_apart(text, address):
    assert parse_destination(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "@box", "box:", "box:0", "box:65536", "box:x", "-oProxyCommand=id", "me@-box", "-me@box", "a b", "box\n"]
    + [
        "10.1.2.6/200",
        "ssh://box/x",
        "root:secret@box",
        "$(id)",
        "`id`",
        "a;b",
        "me'@box",
        "[::1",
        "[::1]x",
        "[box]:22",
        "box:²",
    ],
)
def test_what_is_none_is_refused_without_contact(text):
    with pytest.raises(DflashError) as caught:
        parse_destination(text)
    assert caught.value.code == ExitCode.USAGE
    assert "[user@]host[:port]" in caught.value.hint
    assert "secret" not in "\n".join([caught.value.error, caught.value.cause])


@given(st.text(max_size=30))
def test_whatever_is_typed_gives_an_address_or_a_usage_error(text):
    try:
        address = parse_destination(text)
    except DflashError as error:
        code = error.code
        assert code == ExitCode.USAGE
        return
    for name in (address.host, address.user):
        assert not name.startswith("-")
        assert not set(name) & set("'`\"$\\;&<>|(){} \n")


def test_the_configuration_is_asked(configured, reader):
    (hop,) = configured(
        "Host box\n HostName 10.9.8.7\n User trainer\n Port 2200\n IdentityFile /keys/%h\n HostKeyAlias the-box\n"
        " ConnectTimeout 3\n IdentitiesOnly yes\n CertificateFile /keys/c.pub\n",
        "box",
    )
    assert (hop.host, hop.port, hop.user, hop.user_named) == ("10.9.8.7", 2200, "trainer", True)
    assert (hop.key_name, hop.timeout, hop.identities_only) == ("the-box", 3.0, True)
    assert (hop.identities, hop.default_identities) == ((Path("/keys/10.9.8.7"),), False)
    assert hop.certificates == (Path("/keys/c.pub"),)
    assert (hop.place, hop.label, hop.is_gateway) == ("10.9.8.7:2200", "10.9.8.7:2200", False)


def test_what_is_typed_wins(configured, reader):
    (hop,) = configured("Host *\n User other\n Port 2200\n", "root@box:22")
    assert (hop.user, hop.port, hop.key_name) == ("root", 22, "box")


def test_without_any_configuration(reader):
    (hop,) = resolve("Box", "/dev/null")
    assert (hop.user, hop.user_named, hop.port) == (getpass.getuser(), False, 22)
    assert (hop.timeout, hop.default_identities, hop.agent) == (CONNECT_TIMEOUT, True, "SSH_AUTH_SOCK")
    assert hop.known_hosts[0] == Path.home() / ".ssh" / "known_hosts"
    assert Path.home() / ".ssh" / "id_ed25519" in hop.identities
    assert hop.key_name == "box"


def test_a_port_is_part_of_the_name_in_known_hosts(reader):
    assert resolve("[::1]:2222", "/dev/null")[0].key_name == "[::1]:2222"
    assert resolve("[::1]:2222", "/dev/null")[0].place == "[::1]:2222"


JUMPS = """\
Host inner
  ProxyJump first,me@second:2222
Host first
  HostName 10.0.0.1
Host second
  HostName 10.0.0.2
  ProxyJump never-used
"""


def test_several_jumps_are_hops_in_order(configured, reader):
    hops = configured(JUMPS, "inner")
    assert [hop.place for hop in hops] == ["10.0.0.1", "10.0.0.2:2222", "inner"]
    assert [hop.is_gateway for hop in hops] == [True, True, False]
    assert hops[1].user == "me"
    assert hops[0].label == "the gateway 10.0.0.1"


def test_the_first_jump_may_have_a_jump_of_its_own(configured, reader):
    hops = configured("Host inner\n ProxyJump middle\nHost middle\n ProxyJump outer\n", "inner")
    assert [hop.host for hop in hops] == ["outer", "middle", "inner"]


def test_jump_none_means_none(configured, reader):
    assert len(configured("Host inner\n ProxyJump none\nHost *\n ProxyJump gate\n", "inner")) == 1


@pytest.mark.parametrize("text", ["Host a\n ProxyJump b\nHost b\n ProxyJump a\n", "Host *\n ProxyJump gate\n"])
def test_jumps_in_a_circle_are_a_usage_error(configured, reader, text):
    with pytest.raises(DflashError) as caught:
        configured(text, "a")
    assert caught.value.code == ExitCode.USAGE
    # ssh itself notices a gateway that is its own; our limit finds the longer circles.
    assert "circle" in caught.value.cause or "loop" in caught.value.cause


def test_a_proxy_command_belongs_to_the_nearest_hop(configured, reader):
    (hop,) = configured("Host box\n ProxyCommand connect %h %p\n", "box")
    assert hop.proxy_command.split()[0] == "connect"
    (hop,) = configured("Host box\n ProxyCommand none\n", "box")
    assert hop.proxy_command == ""


@needs_ssh
def test_what_only_ssh_understands(configured, tmp_path):
    (tmp_path / "more").write_text("Host box\n  User included\n")
    (hop,) = configured(f"Include {tmp_path}/more\nMatch exec true\n  Port 2201\n", "box")
    assert (hop.user, hop.port) == ("included", 2201)


@needs_ssh
def test_files_and_agent(configured):
    (hop,) = configured(
        'Host *\n UserKnownHostsFile ~/one "/two words" %d/three\n GlobalKnownHostsFile none\n HashKnownHosts yes\n'
        " IdentityAgent ~/agent.sock\n RevokedHostKeys /revoked\n IdentityFile none\n",
        "box",
    )
    home = Path.home()
    assert hop.known_hosts == (home / "one", Path("/two words"), home / "three")
    assert (hop.global_known_hosts, hop.hash_names, hop.identities) == ((), True, ())
    assert (hop.agent, hop.revoked_keys) == (str(home / "agent.sock"), (Path("/revoked"),))


@needs_ssh
@pytest.mark.parametrize(
    ("line", "agent"),
    [("none", ""), ("SSH_AUTH_SOCK", "SSH_AUTH_SOCK"), ("$MY_AGENT", "MY_AGENT"), ("/run/agent", "/run/agent")],
)
def test_the_agent_may_be_none_a_variable_or_a_path(configured, line, agent, monkeypatch):
    monkeypatch.setenv("MY_AGENT", "/run/other")
    (hop,) = configured(f"Host *\n IdentityAgent {line}\n", "box")
    assert hop.agent in (agent, "/run/other")


def test_a_bad_configuration_is_a_usage_error_with_its_line(configured, reader, tmp_path):
    with pytest.raises(DflashError) as caught:
        resolve("box", str(tmp_path / "missing"))
    assert (caught.value.code, "missing" in caught.value.cause) == (ExitCode.USAGE, True)
    assert "--ssh-config" in caught.value.hint


@needs_ssh
def test_a_mistake_in_it_is_named(configured):
    with pytest.raises(DflashError) as caught:
        configured("Host *\n Frobnicate yes\n", "box")
    assert "frobnicate" in caught.value.cause.lower()


@needs_ssh
def test_a_configuration_that_hangs_is_given_up(configured, monkeypatch):
    monkeypatch.setattr("dflashctl.transport.sshconfig._SSH_PATIENCE", 0.3)
    with pytest.raises(DflashError) as caught:
        configured('Match exec "sleep 20"\n Port 3\n', "box")
    assert "Match exec" in caught.value.cause


def test_tokens_are_put_in_once():
    assert expand("%h-%%h-%x-%", {"h": "%p", "p": "no", "%": "%"}) == "%p-%h-%x-%"
