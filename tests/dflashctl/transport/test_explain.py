"""Every row of the table of pct's words has its own sentence, in whatever noise it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.transport.explain import (
    Ask,
    Place,
    elsewhere,
    frozen,
    host_silent,
    old_python,
    python_spoke,
    read,
    stopped,
)
from remote.protocol.errors import ExitCode

PLACE = Place("200", "10.1.2.6", "/usr/sbin/pct", "op")

# Words -> what the sentence says. The words are those that the tools print, one case a row (and a kind of a row).
TABLE = {
    "container '200' not running!": "container 200 on 10.1.2.6 is stopped",
    "CT 200 not running": "container 200 on 10.1.2.6 is stopped",
    "lxc-attach: 200: ../src/lxc/attach.c: get_attach_context: 405 Connection refused - Failed to get init pid": (
        "container 200 on 10.1.2.6 is stopped"
    ),
    "CT 200 already running": "container 200 on 10.1.2.6 was being started by somebody else",
    "CT is locked (backup)": "container 200 on 10.1.2.6 is locked (backup)",
    "CT is locked (snapshot-delete)": "container 200 on 10.1.2.6 is locked (snapshot-delete)",
    "Configuration file 'nodes/pve/lxc/200.conf' does not exist": "there is no container 200 on 10.1.2.6",
    "can only push files to a running CT": "pct cannot copy files: container 200 on 10.1.2.6 does not run there",
    "failed to create file: /opt/x: No such file or directory": (
        "pct could not write /opt/x in container 200: No such file or directory"
    ),
    "failed to create file: /opt/x: Is a directory": "pct could not write /opt/x in container 200: Is a directory",
    "failed to create file: /opt/x: Text file busy": "pct could not write /opt/x in container 200: Text file busy",
    "failed to create file: /opt/x: No space left on device": (
        "pct could not write /opt/x in container 200: No space left on device"
    ),
    "failed to open /opt/x for reading": "pct could not read /opt/x to copy it for container 200",
    "failed to change file owner: Operation not permitted": "pct could not set owner or mode of a file in container 200",
    "invalid mode: '0888'": "pct could not set owner or mode of a file in container 200",
    "failed to get uid for: nobody2": "pct could not set owner or mode of a file in container 200",
    "can't lock file '/run/lock/lxc/pve-config-200.lock' - got timeout": (
        "container 200 on 10.1.2.6 is busy: its configuration stayed locked"
    ),
    "400 Parameter verification failed.": "pct on 10.1.2.6 does not understand what dflashctl asked",
    "400 unable to parse option": "pct on 10.1.2.6 does not understand what dflashctl asked",
    "Unknown option: keep-env": "pct on 10.1.2.6 does not understand what dflashctl asked",
    "missing command at /usr/share/perl5/PVE/CLI/pct.pm line 120.": "pct on 10.1.2.6 does not understand what dflashctl asked",
    "please run as root": "pct on 10.1.2.6 has to be run by root",
    'lxc-attach: 200: ../src/lxc/attach.c: run_command: 1841 No such file or directory - Failed to exec "/usr/bin/python3"': (
        "container 200 on 10.1.2.6 has no /usr/bin/python3"
    ),
    'lxc-attach: 200: ../src/lxc/attach.c: lxc_attach_run_command: 1841 Permission denied - Failed to exec "/opt/py"': (
        "/opt/py in container 200 on 10.1.2.6 is not executable"
    ),
    "bash: pct: command not found": "10.1.2.6 has no pct: it is not a Proxmox host",
    "bash: line 1: /usr/sbin/pct: No such file or directory": "10.1.2.6 has no pct: it is not a Proxmox host",
    "sh: 1: pct: not found": "10.1.2.6 has no pct: it is not a Proxmox host",
    "sudo: /usr/sbin/pct: command not found": "10.1.2.6 has no pct: it is not a Proxmox host",
    "zsh:1: no such file or directory: /usr/sbin/pct": "10.1.2.6 has no pct: it is not a Proxmox host",
    "fish: Unknown command: /usr/sbin/pct": "10.1.2.6 has no pct: it is not a Proxmox host",
    "sudo: a password is required": "sudo on 10.1.2.6 wants a password for pct",
    "bash: line 1: sudo: command not found": "10.1.2.6 has no sudo, and pct needs root",
    "Sorry, user op is not allowed to execute '/usr/sbin/pct exec 200' as root on pve.": (
        "sudo on 10.1.2.6 does not allow pct to op"
    ),
    "op is not in the sudoers file.": "sudo on 10.1.2.6 does not allow pct to op",
    "root@10.1.2.6: Permission denied (publickey,password).": "a hop to 10.1.2.6 refused the login",
    "Host key verification failed.": "the host key of a hop to 10.1.2.6 is not known",
    "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.": (
        "the host key of a hop to 10.1.2.6 has changed"
    ),
    "ssh: connect to host gate port 22: Connection refused": "a hop to 10.1.2.6 refused the connection",
    "ssh: connect to host gate port 22: Connection timed out": "a hop to 10.1.2.6 did not answer",
    "ssh: Could not resolve hostname gate: Name or service not known": "the name of a hop to 10.1.2.6 is not known",
}  # fmt: skip

NOISE = st.text(st.characters(codec="utf-8", exclude_characters="'\"`:(!"), max_size=60)


@pytest.mark.parametrize("words", TABLE)
@pytest.mark.parametrize("prefix", ["", "Error: "])
def test_every_row_has_its_sentence_its_cause_and_its_way_out(words, prefix):
    reading = read(prefix + words, PLACE)
    assert reading.error.error == TABLE[words]
    assert reading.error.code == ExitCode.NO_ANSWER
    assert reading.error.cause in prefix + words
    assert reading.error.hint
    assert "{" not in reading.error.render()


def test_the_rows_differ_in_what_they_say():
    # Fewer sentences than rows only where two texts mean the same (stopped, bug, no pct, owner or mode, sudoers).
    assert len(set(TABLE.values())) == 27


@given(st.sampled_from(sorted(TABLE)), NOISE, NOISE)
def test_noise_before_and_after_changes_nothing(words, before, after):
    reading = read(f"Last login: today\n{before}\n{words}\n{after}\nbye", PLACE)
    assert reading.error.error == TABLE[words]


@given(NOISE)
def test_noise_alone_means_nothing(noise):
    assert read(noise, PLACE) is None


def test_words_about_another_container_are_noise():
    assert read("container '201' not running!", PLACE) is None
    assert read("Configuration file 'nodes/pve/lxc/2000.conf' does not exist", PLACE) is None


def test_waiting_for_a_lock_is_only_a_reason_when_nothing_follows():
    assert read("trying to acquire lock...", PLACE) is None
    reading = read("trying to acquire lock...", PLACE, silent=True)
    assert reading.error.error == "container 200 on 10.1.2.6 is busy: pct waits for its lock"
    # Once it gave up, that is the reason, silent or not.
    both = "trying to acquire lock...\ncan't lock file '/run/lock/lxc/pve-config-200.lock' - got timeout"
    assert "stayed locked" in read(both, PLACE, silent=True).error.error


@pytest.mark.parametrize(
    ("words", "ask"),
    [
        ("container '200' not running!", Ask.LOCK),
        ("Configuration file 'nodes/pve/lxc/200.conf' does not exist", Ask.NODE),
        ("can only push files to a running CT", Ask.STATUS),
        ("sudo: a password is required", Ask.NOTHING),
    ],
)
def test_what_the_words_leave_open_is_named(words, ask):
    assert read(words, PLACE).ask is ask


def test_the_command_of_a_hint_is_the_one_that_works_there():
    place = Place("200", "pve", "sudo /usr/sbin/pct", "op")
    assert read("container '200' not running!", place).error.hint == "start it there: `sudo /usr/sbin/pct start 200`"


def test_the_sudoers_line_is_the_one_to_copy():
    hint = read("sudo: a password is required", PLACE).error.hint
    assert "`op ALL=(root) NOPASSWD: /usr/sbin/pct` in /etc/sudoers.d/dflashctl" in hint


def test_each_state_of_a_container_has_a_sentence_of_its_own():
    errors = [
        stopped(PLACE, "", "c"),
        stopped(PLACE, "backup", "c"),
        frozen(PLACE, ""),
        frozen(PLACE, "backup"),
        host_silent(PLACE, 3.0),
        elsewhere(PLACE, "/etc/pve/nodes/pve2/lxc/200.conf", "c"),
        elsewhere(PLACE, "/etc/pve/nodes/pve2/qemu-server/200.conf", "c"),
        read("Configuration file 'nodes/pve/lxc/200.conf' does not exist", PLACE).error,
    ]
    assert len({error.error for error in errors}) == len(errors)
    assert {error.code for error in errors} == {ExitCode.NO_ANSWER}
    assert all(error.cause and error.hint for error in errors)
    assert "is on node pve2, not on 10.1.2.6" in errors[5].error
    assert "virtual machine" in errors[6].error


def test_the_page_for_operators_shows_sentences_that_exist():
    place = Place("200", "HOST", "pct", "op")
    sentences = {read(words, place).error.error for words in TABLE if read(words, place)}
    sentences |= {frozen(place, lock).error for lock in ("", "backup")}
    sentences |= {stopped(place, "backup", "").error, host_silent(place, 3.0).error}
    sentences |= {elsewhere(place, f"/nodes/pve2/{kind}/200.conf", "").error for kind in ("lxc", "qemu-server")}
    page = (Path(__file__).parents[3] / "docs" / "proxmox.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (.+?) \|", page.partition("| message |")[2], re.MULTILINE)
    assert len(shown) == 12
    for message in shown:
        assert any(sentence.endswith(message.removeprefix("... ")) for sentence in sentences), message


@given(st.text(max_size=80))
def test_a_search_that_found_nothing_of_ours_places_it_nowhere(found):
    error = elsewhere(PLACE, found, "c")
    assert error is None or re.search(r"/nodes/[^/\s]+/(lxc|qemu-server)/200\.conf", found)


def test_an_old_python_gets_the_commands_that_make_a_newer_one():
    error = old_python(
        "agent: Python 3.11 or newer is needed, this is 3.9.2", "container 200 on pve", "/usr/bin/python3"
    )
    assert error.error == "/usr/bin/python3 of container 200 on pve is Python 3.9.2, and 3.11 or newer is needed"
    assert error.code == ExitCode.PREFLIGHT
    assert "python3.11 -m venv /opt/dflash-venv" in error.hint
    assert "--python /opt/dflash-venv/bin/python" in error.hint
    assert old_python("container '200' not running!", "x", "y") is None


@pytest.mark.parametrize(
    ("said", "spoke"),
    [
        ("/usr/bin/python3: can't open file '/r/agent.pyz': [Errno 2] No such file or directory", True),
        ("/usr/bin/python3: can't find '__main__' module in '/r/agent.pyz'", True),
        ("Traceback (most recent call last):\n  File ...", True),
        ("agent: standard input ended before the agent was complete", True),
        ("lxc-attach: 200: Failed to exec", False),
        ("", False),
    ],
)
def test_what_only_a_python_says(said, spoke):
    assert python_spoke(said) == spoke
