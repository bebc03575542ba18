"""What is wrong on the way to a container has a sentence of its own and exit code 8, whatever the verb."""

from __future__ import annotations

import shlex

import pytest
from system.faults.laptop import Laptop, other_pct
from testbed.proxmox import HOST
from testbed.sshd import Sshd, free_port

from remote.protocol.errors import ExitCode

VERBS = ("status", "deploy")


def said(done) -> dict[str, str]:
    """Return the lines of the one error by their keys."""
    lines = done.stderr.splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith("error: "))
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    found = dict(line.strip().split(": ", 1) for line in lines[begin:])
    assert list(found) == ["error", "cause", "hint"], done.stderr
    return found


def refused(laptop: Laptop, tree, verb: str) -> dict[str, str]:
    """Run a verb that gets no answer, and return what it says."""
    more = ("--source", str(tree)) if verb == "deploy" else ()
    done = laptop(verb, *more)
    assert done.returncode == ExitCode.NO_ANSWER, done.stderr
    return said(done)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("ct", "error", "hint"),
    [
        ("202", "container 202 on {host} is stopped", "/usr/sbin/pct start 202"),
        ("203", "container 203 on {host} is stopped and locked (backup)", "/usr/sbin/pct unlock 203"),
        ("299", "container 299 is on node pve2, not on {host}", "--host"),
        ("777", "there is no container 777 on {host}", "/usr/sbin/pct list"),
    ],
)
def test_each_state_of_a_container(laptop, real_proxmox, tree, ct, error, hint, verb):
    laptop.ct = ct
    found = refused(laptop, tree, verb)
    assert found["error"] == error.format(host=HOST)
    assert hint in found["hint"]
    # Only after the failure is anything else asked of pct, and never with a lock of its own.
    assert {call[0] for call in real_proxmox.calls()[1:]} <= {"status", "config"}


@pytest.mark.parametrize("verb", VERBS)
def test_a_container_that_runs_answers(laptop, tree, verb):
    more = ("--source", str(tree)) if verb == "deploy" else ()
    assert laptop(verb, *more).returncode == 0


def test_a_locked_container_that_runs_answers(laptop, proxmox):
    proxmox.lock("200", "backup")
    assert laptop("status").returncode == 0


def test_a_frozen_container_is_named_by_every_verb(laptop, real_proxmox, tree):
    laptop.deploy(tree)
    laptop.start()
    real_proxmox["200"].freeze()
    verbs = (["status"], ["deploy", "--source", str(tree)], ["stop"], ["logs", "-f"], ["runs"], ["start"], ["doctor"])
    going = {words[0]: laptop.begin(*words) for words in verbs}
    try:
        for verb, process in going.items():
            out, err = process.communicate(timeout=60)
            assert process.returncode == ExitCode.NO_ANSWER, (verb, err)
            # doctor's table is wrapped.
            words = " ".join((err + out).split())
            assert f"container 200 on {HOST} does not answer: it is frozen or overloaded" in words, verb
            assert "lxc-unfreeze -n 200" in words
    finally:
        real_proxmox["200"].thaw()


ATTACH = "lxc-attach: 200: ../src/lxc/attach.c: lxc_attach_run_command: 1841"
BUG = f"pct on {HOST} does not understand what dflashctl asked"
NO_COPY = "pct could not set owner or mode of a file in container 200"
ROWS = [
    ("container '200' not running!", f"container 200 on {HOST} is stopped"),
    ("CT 200 not running", f"container 200 on {HOST} is stopped"),
    ("CT 200 already running", f"container 200 on {HOST} was being started by somebody else"),
    ("CT is locked (snapshot-delete)", f"container 200 on {HOST} is locked (snapshot-delete)"),
    ("Configuration file 'nodes/pve/lxc/298.conf' does not exist", f"there is no container 298 on {HOST}"),
    (
        "can't lock file '/run/lock/lxc/pve-config-200.lock' - got timeout",
        f"container 200 on {HOST} is busy: its configuration stayed locked",
    ),
    ("failed to create file: /x y: Is a directory", "pct could not write /x y in container 200: Is a directory"),
    (
        "failed to create file: /x: No space left on device",
        "pct could not write /x in container 200: No space left on device",
    ),
    ("failed to open /x for reading: Permission denied", "pct could not read /x to copy it for container 200"),
    ("failed to change file owner: Invalid argument", NO_COPY),
    ("invalid mode: 'rw'", NO_COPY),
    ("failed to get uid for: nosuch", NO_COPY),
    ("400 Parameter verification failed.\nvmid: type check ('integer') failed - got 'x'", BUG),
    ("400 unable to parse option\npct exec <vmid> [OPTIONS]", BUG),
    ("Unknown option: keep-env", BUG),
    ("missing command at /usr/share/perl5/PVE/CLI/pct.pm line 279.", BUG),
    ("please run as root", f"pct on {HOST} has to be run by root"),
    (f'{ATTACH} No such file or directory - Failed to exec "/opt/py"', f"container 200 on {HOST} has no /opt/py"),
    (
        f'{ATTACH} Permission denied - Failed to exec "/opt/py"',
        f"/opt/py in container 200 on {HOST} is not executable",
    ),
    ("sudo: a password is required", f"sudo on {HOST} wants a password for pct"),
]


# Every fourth row as old versions put it: which row it is makes no difference there.
PREFIXED = [("", *row) for row in ROWS] + [("Error: ", *row) for row in ROWS[::4]]


@pytest.mark.parametrize(("prefix", "words", "error"), PREFIXED, ids=[(old + words)[:35] for old, words, _ in PREFIXED])
def test_each_row_of_what_pct_says(laptop, real_proxmox, prefix, words, error):
    script = f'[ $1 = exec ] || exec /usr/sbin/pct.real "$@"; echo {shlex.quote(prefix + words)} >&2; exit 25'
    # 200 is there: what reads as missing is another one.
    laptop.ct = "298" if "298" in words else "200"
    with other_pct(real_proxmox, script):
        done = laptop("status")
    assert (done.returncode, said(done)["error"]) == (ExitCode.NO_ANSWER, error)
    assert said(done)["cause"] in prefix + words


def test_copies_that_only_a_running_container_takes_ask_for_its_state(laptop, real_proxmox):
    laptop.ct = "202"
    words = "can only push files to a running CT at /usr/share/perl5/PVE/CLI/pct.pm line 598."
    script = f'[ $1 = exec ] || exec /usr/sbin/pct.real "$@"; echo {shlex.quote(words)} >&2'
    with other_pct(real_proxmox, script):
        assert refused(laptop, "", "status")["error"] == f"container 202 on {HOST} is stopped"


@pytest.mark.long
def test_who_waits_for_a_lock_says_so_once_that_takes_too_long(laptop, real_proxmox):
    with other_pct(real_proxmox, "echo trying to acquire lock... >&2; exec sleep 30"):
        assert refused(laptop, "", "status")["error"] == f"container 200 on {HOST} is busy: pct waits for its lock"


def test_waiting_for_a_lock_for_a_moment_is_no_error(laptop, real_proxmox):
    wait = 'echo trying to acquire lock... >&2; sleep 0.5; echo " OK" >&2; exec /usr/sbin/pct.real "$@"'
    with other_pct(real_proxmox, wait):
        assert laptop("status").returncode == 0


@pytest.mark.parametrize(
    ("python", "error"),
    [
        ("/opt/none/python", f"container 200 on {HOST} has no /opt/none/python"),
        ("/etc/hosts", f"/etc/hosts in container 200 on {HOST} is not executable"),
    ],
)
@pytest.mark.parametrize("verb", VERBS)
def test_a_python_that_is_none(laptop, real_proxmox, tree, python, error, verb):
    laptop.python = python
    assert refused(laptop, tree, verb)["error"] == error


@pytest.mark.parametrize("verb", VERBS)
def test_a_host_without_pct(laptop, real_proxmox, tree, verb):
    real_proxmox.machine.run("mv", "/usr/sbin/pct", "/usr/sbin/pct.away")
    try:
        found = refused(laptop, tree, verb)
    finally:
        real_proxmox.machine.run("mv", "/usr/sbin/pct.away", "/usr/sbin/pct")
    assert found["error"] == f"{HOST} has no pct: it is not a Proxmox host"
    assert "--ct" in found["hint"]


def test_a_user_whom_sudo_refuses(laptop, real_proxmox):
    laptop.user = "guest"
    found = refused(laptop, "", "status")
    assert found["error"] == f"sudo on {HOST} wants a password for pct"
    assert found["cause"] == "sudo: a password is required"
    assert "NOPASSWD: /usr/sbin/pct" in found["hint"]


@pytest.mark.parametrize("code", [0, 1, 2, 126, 137, 255])
def test_no_exit_code_is_believed(laptop, real_proxmox, code):
    """Silence and any code: the host is asked, says that the container runs, and there is nothing more to know."""
    with other_pct(real_proxmox, f'[ $1 = exec ] || exec /usr/sbin/pct.real "$@"; exit {code}'):
        assert refused(laptop, "", "status")["error"] == f"no answer from container 200 on {HOST}"


class TestHostKeys:
    """No key that known_hosts does not vouch for lets anybody in, at no hop."""

    def with_gate(self, bed, gate: Sshd, known: str) -> None:
        path = bed.ssh_config(extra="ProxyJump gate")
        lines = [
            "Host gate",
            f"    HostName {gate.address}",
            f"    Port {gate.port}",
            f"    IdentityFile {gate.client_key}",
            "    IdentitiesOnly yes",
            f"    UserKnownHostsFile {bed.known_hosts}",
            "    GlobalKnownHostsFile none",
            "    ControlPath none",
        ]
        path.write_text("\n".join([path.read_text(), *lines, ""]))
        bed.known_hosts.write_text(known)

    @pytest.mark.parametrize("verb", VERBS)
    def test_an_unknown_one(self, laptop, proxmox, tree, verb):
        proxmox.known_hosts.write_text("")
        found = refused(laptop, tree, verb)
        assert found["error"] == f"the host key of {laptop_label(proxmox)} is not known"
        assert proxmox.sshd.fingerprint in found["cause"]
        assert f"dflashctl hosts trust --host {HOST}" in found["hint"]
        assert proxmox.known_hosts.read_text() == ""
        assert "Accepted publickey" not in proxmox.sshd.log().rpartition("Connection from")[2]
        assert proxmox.calls() == []

    @pytest.mark.parametrize("verb", VERBS)
    def test_a_changed_one(self, laptop, proxmox, tree, verb):
        before = proxmox.known_hosts.read_text()
        old = proxmox.sshd.fingerprint
        proxmox.sshd.new_host_key()
        found = refused(laptop, tree, verb)
        assert found["error"] == f"the host key of {laptop_label(proxmox)} has changed"
        assert old in found["cause"]
        assert proxmox.sshd.fingerprint in found["cause"]
        assert "--replace" in found["hint"]
        assert (proxmox.known_hosts.read_text(), proxmox.calls()) == (before, [])

    @pytest.mark.parametrize("what", ["known", "unknown", "changed"])
    def test_that_of_a_gateway(self, laptop, proxmox, what):
        with Sshd() as gate:
            good = proxmox.sshd.known_hosts_line() + gate.known_hosts_line()
            self.with_gate(proxmox, gate, proxmox.sshd.known_hosts_line() if what == "unknown" else good)
            if what == "changed":
                gate.new_host_key()
            # Its own way writes the configuration anew.
            laptop.ssh_config = proxmox.state / "ssh_config_root"
            if what == "known":
                assert laptop("status").returncode == 0
                assert "Accepted publickey" in gate.log()
                return
            found = refused(laptop, "", "status")
            words = {"unknown": "is not known", "changed": "has changed"}[what]
            assert found["error"].startswith("the host key of ")
            assert found["error"].endswith(words)
            assert str(gate.port) in found["error"]
            assert "Accepted publickey" not in gate.log()
            assert proxmox.calls() == []

    @pytest.mark.parametrize("what", ["unknown", "changed"])
    def test_the_one_behind_a_good_gateway(self, laptop, proxmox, what):
        with Sshd() as gate:
            if what == "changed":
                self.with_gate(proxmox, gate, proxmox.sshd.known_hosts_line() + gate.known_hosts_line())
                proxmox.sshd.new_host_key()
            else:
                self.with_gate(proxmox, gate, gate.known_hosts_line())
            laptop.ssh_config = proxmox.state / "ssh_config_root"
            found = refused(laptop, "", "status")
            assert found["error"].endswith({"unknown": "is not known", "changed": "has changed"}[what])
            assert str(proxmox.sshd.port) in found["error"]
            assert "Accepted publickey" in gate.log()
            assert proxmox.calls() == []

    def test_trusted_by_its_fingerprint_the_next_verb_gets_through(self, laptop, proxmox):
        proxmox.sshd.new_host_key()
        right = proxmox.sshd.fingerprint
        wrong = laptop("hosts", "trust", "--replace", "--fingerprint", f"SHA256:{'A' * 43}")
        assert wrong.returncode == ExitCode.NO_ANSWER
        assert laptop("status").returncode == ExitCode.NO_ANSWER
        assert laptop("hosts", "trust", "--replace", "--fingerprint", right).returncode == 0
        assert laptop("status").returncode == 0


def laptop_label(bed) -> str:
    return f"{bed.sshd.address}:{bed.sshd.port}"


@pytest.mark.parametrize("verb", VERBS)
def test_a_port_that_refuses(laptop, proxmox, tree, verb):
    port = free_port()
    laptop.ssh_config = proxmox.ssh_config(extra=f"Port {port}")
    found = refused(laptop, tree, verb)
    assert "refuses the connection" in found["error"]
    assert str(port) in found["cause"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_name_that_is_not_resolved(laptop, proxmox, tree, verb):
    # A label of 64 characters is one too long: nobody is asked for it.
    name = "x" * 64 + ".invalid"
    laptop.ssh_config = proxmox.ssh_config(extra=f"HostName {name}")
    assert refused(laptop, tree, verb)["error"] == f"the host name {name} cannot be resolved"


def test_a_key_that_opens_nothing(laptop, proxmox):
    with Sshd() as other:
        laptop.ssh_config = proxmox.ssh_config(extra=f"IdentityFile {other.client_key}")
        text = laptop.ssh_config.read_text().splitlines()
        key = str(proxmox.sshd.client_key)
        laptop.ssh_config.write_text("\n".join(line for line in text if key not in line) + "\n")
        found = refused(laptop, "", "status")
    assert "does not let" in found["error"]
    assert "ssh-copy-id" in found["hint"]
