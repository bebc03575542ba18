"""Ways put together from settings, and given back whatever becomes of the verb."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from testbed.proxmox import HOST, Proxmox

from dflashctl.agent_client import STATUS_SECONDS, AgentClient
from dflashctl.cli import run
from dflashctl.errors import NoAnswer
from dflashctl.release import build_release
from dflashctl.transport import connections, make_transport
from dflashctl.transport.local import Local
from dflashctl.transport.pct import Pct
from dflashctl.transport.ssh import Ssh
from remote.protocol.errors import DflashError, ExitCode


class TestMake:
    """What host and container come to."""

    def test_each_pair_is_a_way_with_a_name(self):
        assert isinstance(make_transport("local", ""), Local)
        assert isinstance(make_transport("10.1.2.6", ""), Ssh)
        for host in ("local", "root@10.1.2.6"):
            way = make_transport(host, "200")
            assert (type(way), way.name) == (Pct, f"container 200 on {host}")

    def test_what_can_be_no_container_is_a_usage_error(self):
        with pytest.raises(DflashError) as caught:
            make_transport("local", "7")
        assert caught.value.code == ExitCode.USAGE


class TestConnections:
    """Closed at the end of the verb, without waiting for who does not answer."""

    @pytest.fixture
    def closed(self, monkeypatch):
        names = []
        monkeypatch.setattr(Local, "close", lambda self: names.append(self.name))
        return names

    @pytest.mark.parametrize("ct", ["", "200"])
    def test_what_was_made_inside_is_given_back(self, closed, ct):
        with connections():
            make_transport("local", ct)
            assert closed == []
        assert closed == ["local"]
        make_transport("local", ct)
        assert closed == ["local"]

    def test_also_when_the_verb_fails(self, closed):
        with pytest.raises(DflashError), connections():
            make_transport("local", "200") and make_transport("local", "7")
        assert closed == ["local"]

    def test_one_that_hangs_is_left_behind(self, monkeypatch):
        monkeypatch.setattr("dflashctl.transport._CLOSING_SECONDS", 0.05)
        monkeypatch.setattr(Local, "close", lambda self: time.sleep(1.0))
        began = time.monotonic()
        with connections():
            make_transport("local", "")
        assert time.monotonic() - began < 1.0

    def test_every_command_line_does_it(self, closed, monkeypatch, tmp_path, capsys):
        monkeypatch.setenv("DFLASHCTL_HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        assert run(["status", "--host", "local", "--root", str(tmp_path / "root")]) == 0
        assert closed == ["local"]
        assert "no run yet on local" in capsys.readouterr().out


@pytest.fixture
def bed(real_proxmox: Proxmox) -> Proxmox:
    """Real containers: a shim of them neither freezes nor keeps a login's environment out."""
    return real_proxmox


@pytest.fixture
def pyz(standin_tree) -> bytes:
    return build_release(standin_tree()).pyz


def client_of(bed, pyz, ct="200", user="root"):
    way = make_transport(HOST, ct, str(bed.ssh_config(user)))
    return AgentClient(way, python="/usr/bin/python3", pyz=lambda: pyz)


class TestThroughSsh:
    """Pct(200, Ssh(...)) against a real sshd and real containers."""

    @pytest.mark.parametrize("user", ["root", "ops"])
    def test_one_call_on_the_normal_path_over_one_connection(self, bed, pyz, user):
        with connections():
            client = client_of(bed, pyz, user=user)
            assert [client.status().state, client.status().state] == ["none", "none"]
            assert [argv[0] for argv in bed.calls()] == ["exec", "exec"]
            assert client.calls == 2

    @pytest.mark.parametrize(
        ("ct", "sentence"),
        [
            ("202", f"container 202 on {HOST} is stopped"),
            ("203", f"container 203 on {HOST} is stopped and locked (backup)"),
            ("299", f"container 299 is on node pve2, not on {HOST}"),
            ("204", f"there is no container 204 on {HOST}"),
        ],
    )
    def test_each_state_has_its_sentence(self, bed, pyz, ct, sentence):
        with connections(), pytest.raises(NoAnswer) as caught:
            client_of(bed, pyz, ct).status()
        assert (caught.value.error, caught.value.code) == (sentence, ExitCode.NO_ANSWER)

    def test_the_lines_of_doctor_come_hop_by_hop(self, bed):
        with connections():
            way = make_transport(HOST, "200", str(bed.ssh_config("ops")))
            findings = list(way.examine())
        assert [(finding.name, finding.state) for finding in findings] == [
            ("ssh", "ok"),
            ("host key", "ok"),
            ("pct", "ok"),
            ("container", "ok"),
        ]

    def test_a_noisy_login_is_no_trouble_and_no_reason(self, bed, pyz):
        noise = "echo Welcome; echo 'bash: cargo: command not found' >&2\n"
        bashrc = bed.state / "home" / "root" / ".bashrc"
        bashrc.write_text(noise)
        try:
            with connections():
                assert client_of(bed, pyz).status().state == "none"
                with pytest.raises(NoAnswer, match="is stopped"):
                    client_of(bed, pyz, "202").status()
        finally:
            bashrc.unlink()

    @pytest.mark.parametrize("user", ["root", "ops"])
    def test_any_words_arrive_unchanged_and_nothing_is_executed_from_them(self, bed, user):
        program = "import json, sys; print(json.dumps(sys.argv[1:]))"
        with connections():
            way = make_transport(HOST, "200", str(bed.ssh_config(user)))

            # ASCII, as all of ours is: what is not would be destroyed by a host whose locale is C.
            @settings(max_examples=15, deadline=None)
            @given(st.lists(st.text(st.characters(min_codepoint=1, max_codepoint=126), max_size=12), max_size=5))
            @example(["$(touch /tmp/executed)", "`touch /tmp/executed`", "; touch /tmp/executed", "a\nb", "'\"", ""])
            @example(["--keep-env", "-n", "--", "-", "*", "~", "!!", "\\", "%s", "#x"])
            def arrives(words):
                channel = way.open(["/usr/bin/python3", "-I", "-c", program, *words])
                channel.finish()
                said = b""
                while piece := channel.receive(10):
                    said += piece
                channel.close()
                assert json.loads(said) == words

            arrives()
        assert not bed["200"].path("/tmp/executed").exists()
        assert bed.machine.run("ls", "/tmp/executed", check=False).returncode != 0

    def test_an_sshd_that_freezes_under_a_call_is_named_within_the_bound(self, bed, pyz):
        def open_and_freeze(argv):
            channel = opened(argv)
            bed.sshd.freeze()
            return channel

        began = time.monotonic()
        with connections():
            client = client_of(bed, pyz)
            opened, client.transport.open = client.transport.open, open_and_freeze
            with pytest.raises(NoAnswer, match=f"{HOST} does not answer"):
                client.status()
        # Its good-bye is not waited for. The second is for a machine that does other things as well.
        assert time.monotonic() - began < STATUS_SECONDS + 1.0
