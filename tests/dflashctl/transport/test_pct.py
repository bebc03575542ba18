"""Pct over a host that tests play: what is sent to it, what it is asked after a failure, how long that may take."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.errors import NoAnswer, NoProgram
from dflashctl.transport import EXPLANATION_SECONDS, Finding, Silence, Transport, make_transport
from dflashctl.transport.local import Local
from dflashctl.transport.memory import Memory
from dflashctl.transport.pct import PCT, Pct, is_ct
from remote.protocol.errors import DflashError, ExitCode

MISSING = b"Configuration file 'nodes/pve/lxc/200.conf' does not exist\n"


def host(answers=None, *, user="root", **more):
    """Return a machine whose commands answer as `answers` says: words of a command -> what it prints."""
    answers = answers or {}

    def handler(argv, sent):
        words = " ".join(argv).removeprefix("sudo -n ").removeprefix(f"{PCT} ")
        answer = answers.get(words, b"")
        yield from [answer] if isinstance(answer, bytes) else answer

    memory = Memory(handler, user=user, **more)
    memory.name = "10.1.2.6"
    return memory


def asked(memory):
    return [" ".join(channel.argv) for channel in memory.channels]


class TestOpen:
    """One argv on the host, no more."""

    def test_the_command_goes_behind_exec(self):
        memory = host()
        Pct(200, memory).open(["/usr/bin/python3", "-I", "-c", "x = 1", "status"])
        assert memory.channels[0].argv == [
            *(PCT, "exec", "200", "--"),
            *("/usr/bin/python3", "-I", "-c", "x = 1", "status"),
        ]

    def test_who_is_not_root_goes_through_sudo_that_never_asks(self):
        memory = host(user="op")
        Pct("200", memory).open(["true"])
        assert memory.channels[0].argv == ["sudo", "-n", "/usr/sbin/pct", "exec", "200", "--", "true"]

    @given(st.lists(st.text(max_size=20), max_size=6))
    def test_any_words_stay_words(self, argv):
        memory = host()
        Pct(200, memory).open(argv)
        assert memory.channels[0].argv[4:] == argv
        assert "--keep-env" not in memory.channels[0].argv[:4]

    @pytest.mark.parametrize("ct", ["", "99", "0200", "200 ", "-200", "2e3", "200;id", "1234567890", "٢٠٠", 7, -200])
    def test_what_is_no_container_id_sends_nothing(self, ct):
        memory = host()
        with pytest.raises(DflashError) as caught:
            Pct(ct, memory)
        assert caught.value.code == ExitCode.USAGE
        assert memory.channels == []

    @given(st.integers(100, 999_999_999))
    def test_every_id_of_proxmox_is_one(self, ct):
        assert is_ct(str(ct))

    def test_its_name_names_the_container_and_the_host(self):
        pct: Transport = Pct(200, host())
        assert pct.name == "container 200 on 10.1.2.6"
        pct.close()

    def test_it_is_composed_from_the_settings(self):
        assert isinstance(make_transport("local", ""), Local)
        pct = make_transport("local", "200")
        assert (type(pct), pct.name) == (Pct, "container 200 on local")

    @pytest.mark.parametrize(
        ("user", "sentence"),
        [("root", "has no pct: it is not a Proxmox host"), ("op", "has no sudo, and pct needs root")],
    )
    def test_a_machine_without_the_program_says_so_at_once(self, user, sentence):
        class Bare(Memory):
            def open(self, argv):
                raise NoProgram(f"cannot run {argv[0]} on this machine", hint="name a Python with --python")

        with pytest.raises(NoAnswer, match=sentence) as caught:
            Pct(200, Bare(lambda argv, sent: [], user=user)).open(["true"])
        assert "--python" not in caught.value.hint


class TestExplain:
    """Asked only after a failure; what the words say is never asked again."""

    def explain(self, memory, said, *, silent=False):
        error = Pct(200, memory).explain(said, silent=silent)
        return error.error if error else None

    def test_the_host_that_one_sits_at_is_this_machine(self):
        memory = host({"config 200": b""})
        memory.name = "local"
        assert self.explain(memory, "container '200' not running!") == "container 200 on this machine is stopped"

    def test_words_that_say_it_all_cost_no_call(self):
        memory = host()
        assert self.explain(memory, "sudo: a password is required") == "sudo on 10.1.2.6 wants a password for pct"
        assert asked(memory) == []

    def test_a_stopped_container(self):
        memory = host({"config 200": b"arch: amd64\nhostname: gpu\n"})
        assert self.explain(memory, "container '200' not running!") == "container 200 on 10.1.2.6 is stopped"
        assert asked(memory) == [f"{PCT} config 200"]

    def test_a_stopped_container_that_is_locked(self):
        memory = host({"config 200": b"hostname: gpu\nlock: backup\nmemory: 512\n"}, user="op")
        error = Pct(200, memory).explain("container '200' not running!")
        assert error.error == "container 200 on 10.1.2.6 is stopped and locked (backup)"
        assert "`sudo /usr/sbin/pct unlock 200`" in error.hint

    def test_a_missing_one_and_where_it_is(self):
        assert self.explain(host(), MISSING.decode()) == "there is no container 200 on 10.1.2.6"
        find = "find /etc/pve/nodes -maxdepth 3 -name 200.conf"
        memory = host({find: b"/etc/pve/nodes/pve2/lxc/200.conf\n"})
        assert self.explain(memory, MISSING.decode()) == "container 200 is on node pve2, not on 10.1.2.6"
        assert asked(memory) == [find]

    def test_who_is_not_root_cannot_look_into_the_cluster(self):
        memory = host(user="op")
        assert self.explain(memory, MISSING.decode()) == "there is no container 200 on 10.1.2.6"
        assert asked(memory) == []

    def test_silence_of_a_container_that_runs_is_a_frozen_one(self):
        memory = host({"status 200": b"status: running\n"})
        sentence = "container 200 on 10.1.2.6 does not answer: it is frozen or overloaded"
        assert self.explain(memory, "", silent=True) == sentence

    def test_a_backup_freezes_a_container(self):
        memory = host({"status 200": b"status: running\n", "config 200": b"lock: backup\n"})
        assert "while it is locked (backup)" in self.explain(memory, "Last login: today", silent=True)

    def test_an_end_without_a_word_from_a_container_that_runs_stays_open(self):
        memory = host({"status 200": b"status: running\n"})
        assert self.explain(memory, "") is None
        assert asked(memory) == [f"{PCT} status 200"]

    @pytest.mark.parametrize(
        ("status", "sentence"),
        [
            (b"status: stopped\n", "container 200 on 10.1.2.6 is stopped"),
            (MISSING, "there is no container 200 on 10.1.2.6"),
            (b"sudo: a password is required\n", "sudo on 10.1.2.6 wants a password for pct"),
            (
                b"bash: line 1: /usr/sbin/pct: No such file or directory\n",
                "10.1.2.6 has no pct: it is not a Proxmox host",
            ),
            (b"gibberish", None),
            (b"", None),
        ],
    )
    @pytest.mark.parametrize("silent", [True, False])
    def test_without_words_the_status_tells(self, status, sentence, silent):
        assert self.explain(host({"status 200": status}), "noise", silent=silent) == sentence

    def test_a_push_that_failed_is_looked_into(self):
        said = "can only push files to a running CT"
        assert self.explain(host({"status 200": MISSING}), said) == "there is no container 200 on 10.1.2.6"
        assert self.explain(host({"status 200": b"status: stopped"}), said) == "container 200 on 10.1.2.6 is stopped"
        assert self.explain(host(), said).startswith("pct cannot copy files")

    def test_a_host_that_says_nothing_either_is_the_reason(self):
        memory = host({"status 200": [Silence()]})
        assert self.explain(memory, "", silent=True) == "10.1.2.6 does not answer"
        assert all(channel.closed for channel in memory.channels)

    def test_a_host_that_cannot_be_reached_any_more_is_the_reason(self):
        class Gone(Memory):
            def open(self, argv):
                raise NoAnswer("10.1.2.6 refused the connection")

        assert self.explain(Gone(lambda argv, sent: []), "", silent=True) == "10.1.2.6 refused the connection"
        # What the words said is known better than that.
        assert "is stopped" in self.explain(Gone(lambda argv, sent: []), "container '200' not running!")

    def test_the_hop_behind_explains_its_own_words(self):
        class Knowing(Memory):
            def explain(self, said, *, silent=False):
                return NoAnswer("the gateway is gone") if "gateway" in said else None

        assert self.explain(Knowing(lambda argv, sent: []), "gateway: bye") == "the gateway is gone"
        # Noise that means something to it is not the reason when the container's is known.
        assert "is stopped" in self.explain(
            Knowing(lambda argv, sent: []), "gateway: bye\ncontainer '200' not running!"
        )

    def test_no_explanation_takes_longer_than_it_may(self, monkeypatch):
        monkeypatch.setattr("dflashctl.transport.pct.EXPLANATION_SECONDS", 0.2)

        class Stuck(Memory):
            def open(self, argv):
                # A connection that is being made: nothing can interrupt it.
                time.sleep(1.5)
                return super().open(argv)

        began = time.monotonic()
        assert self.explain(Stuck(lambda argv, sent: []), "", silent=True) == "memory does not answer"
        assert "is stopped" in self.explain(Stuck(lambda argv, sent: []), "container '200' not running!")
        # Two bounds of 0.2 s, and not 1.5 s each.
        assert time.monotonic() - began < 1.5
        assert EXPLANATION_SECONDS <= 3.0

    def test_a_far_end_that_never_stops_talking_is_cut_off(self):
        memory = host({"status 200": itertools.repeat(b"x" * 60_000)})
        assert self.explain(memory, "") is None

    @given(said=st.text(max_size=200), status=st.binary(max_size=200), silent=st.booleans())
    def test_whatever_is_said_there_is_a_sentence_or_none(self, said, status, silent):
        error = Pct(200, host({"status 200": status})).explain(said, silent=silent)
        assert error is None or error.code == ExitCode.NO_ANSWER


class TestExamine:
    """The lines of `doctor`."""

    def examine(self, memory):
        return [(finding.name, finding.state, finding.text) for finding in Pct(200, memory).examine()]

    def test_all_is_well(self):
        memory = host({"status 200": b"status: running\n"}, user="op")
        assert self.examine(memory) == [
            ("pct", "ok", "sudo /usr/sbin/pct answers"),
            ("container", "ok", "200 is running"),
        ]

    def test_a_lock_is_a_warning(self):
        memory = host({"status 200": b"status: running\n", "config 200": b"lock: backup\n"})
        assert self.examine(memory)[1] == ("container", "warning", "200 is running, locked (backup)")

    @pytest.mark.parametrize(
        ("status", "text"),
        [
            (b"status: stopped\n", "container 200 on 10.1.2.6 is stopped"),
            (MISSING, "there is no container 200 on 10.1.2.6"),
        ],
    )
    def test_a_container_that_is_not_there(self, status, text):
        assert self.examine(host({"status 200": status})) == [
            ("pct", "ok", "/usr/sbin/pct answers"),
            ("container", "failed", text),
        ]

    @pytest.mark.parametrize(
        ("said", "text"),
        [
            (b"sudo: a password is required\n", "sudo on 10.1.2.6 wants a password for pct"),
            (b"sh: 1: pct: not found\n", "10.1.2.6 has no pct: it is not a Proxmox host"),
            (b"", "`/usr/sbin/pct status 200` said nothing"),
            ([Silence()], "10.1.2.6 does not answer"),
        ],
    )
    def test_it_ends_where_pct_fails(self, said, text):
        assert self.examine(host({"status 200": said})) == [("pct", "failed", text)]

    def test_it_ends_at_a_hop_that_failed(self):
        class Broken(Memory):
            def examine(self):
                yield Finding("ssh", "failed", "no connection", "hint")

        memory = Broken(lambda argv, sent: [])
        assert self.examine(memory) == [("ssh", "failed", "no connection")]
        assert memory.channels == []

    @given(st.binary(max_size=200))
    def test_whatever_is_said_it_ends(self, said):
        findings = self.examine(host({"status 200": said}))
        assert findings[0][0] == "pct"
        assert len(findings) <= 2
