"""Pct against real containers: what each state of one says, what reaches a run, which uploads are refused."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

import pytest
from testbed.machine import OTHER_USER, SUDO_USER
from testbed.proxmox import HOST, Proxmox

from dflashctl.agent_client import STATUS_SECONDS, AgentClient, StartRequest
from dflashctl.errors import ConnectionLost, NoAnswer
from dflashctl.release import Release, build_release
from dflashctl.transport.local import Local
from dflashctl.transport.pct import Pct
from remote.protocol.errors import DflashError, ExitCode
from remote.protocol.layout import new_run_id
from remote.protocol.records import RunSpec

ROOT = "/workspace/dflashctl"
# What a login on a Proxmox host brings along, and what would harm or mislead a run.
LEAKS = {
    "HOME": "/home/operator",
    "SSL_CERT_FILE": "/etc/operator.pem",
    "PYTHONPATH": "/home/operator/lib",
    "PYTHONHOME": "/home/operator/python",
    "CUDA_VISIBLE_DEVICES": "7",
    "TMPDIR": "/home/operator/tmp",
    "LC_ALL": "C",
    "DFLASH_ROOT": "/elsewhere",
    "LS_COLORS": "x" * 2000,
}


class Login(Local):
    """A shell's place on the testbed's host, without ssh: as root or another user, with the environment of a login."""

    name = HOST

    def __init__(self, bed: Proxmox, user: str = "root", environment: dict[str, str] | None = None) -> None:
        self._as = [] if user == "root" else ["setpriv", "--reuid", user, "--regid", user, "--init-groups", "--"]
        self._enter = [*bed.machine.enter, *self._as, "env", *(f"{k}={v}" for k, v in (environment or {}).items())]
        self._user = user

    @property
    def user(self):
        return self._user

    def open(self, argv):
        return super().open([*self._enter, *argv])


def quiet(event):
    """Nobody listens."""


def client_of(bed, release, ct="200", user="root", *, environment=None, root=ROOT, deployed=True):
    return AgentClient(
        Pct(ct, Login(bed, user, environment)),
        python="/usr/bin/python3",
        root=root,
        release=release.id if deployed else "",
        pyz=lambda: release.pyz,
    )


@pytest.fixture
def bed(real_proxmox: Proxmox) -> Proxmox:
    """Real containers: a shim of them neither freezes nor keeps a login's environment out."""
    return real_proxmox


@pytest.fixture
def release(standin_tree) -> Release:
    return build_release(standin_tree("--steps", "1000", "--pause", "0.05"))


def failure_of(client) -> DflashError:
    with pytest.raises(DflashError) as caught:
        client.status()
    return caught.value


def asked(bed):
    return [argv[0] for argv in bed.calls()]


@pytest.mark.parametrize("user", ["root", SUDO_USER])
@pytest.mark.parametrize("ct", ["200", "201"])
def test_a_container_that_runs_answers_in_one_call(bed, release, ct, user):
    client = client_of(bed, release, ct, user, deployed=False)
    client.deploy(release, selfcheck=False, on_event=quiet)
    client = client_of(bed, release, ct, user)
    assert client.status().state == "none"
    assert client.deploy(release, selfcheck=False, on_event=quiet).sent is False
    assert asked(bed) == ["exec"] * 3
    assert bed[ct].path(f"{ROOT}/current").readlink() == Path("releases", release.id)


@pytest.mark.parametrize("prefix", ["", "Error: "])
@pytest.mark.parametrize(
    ("ct", "sentence", "calls"),
    [
        ("202", f"container 202 on {HOST} is stopped", ["exec", "config"]),
        ("203", f"container 203 on {HOST} is stopped and locked (backup)", ["exec", "config"]),
        ("299", f"container 299 is on node pve2, not on {HOST}", ["exec"]),
        ("204", f"there is no container 204 on {HOST}", ["exec"]),
    ],
)
def test_a_container_that_does_not_says_why_once(bed, release, ct, sentence, calls, prefix):
    with bed.knobs(prefix=prefix):
        error = failure_of(client_of(bed, release, ct))
    assert (error.error, error.code) == (sentence, ExitCode.NO_ANSWER)
    assert asked(bed) == calls


@pytest.mark.parametrize("code", [0, 2, 25, 127, 255])
def test_no_exit_code_is_branched_on(bed, release, code):
    with bed.knobs(failure_code=code):
        assert "is stopped" in failure_of(client_of(bed, release, "202")).error


def test_who_is_not_root_may_not_look_for_it_on_other_nodes(bed, release):
    error = failure_of(client_of(bed, release, "299", SUDO_USER))
    assert error.error == f"there is no container 299 on {HOST}"
    assert "on another node of the cluster" in error.hint


def test_a_frozen_container_is_named_within_the_bound_of_status(bed, release):
    client = client_of(bed, release, deployed=False)
    bed["200"].freeze()
    began = time.monotonic()
    try:
        error = failure_of(client)
    finally:
        took = time.monotonic() - began
        bed["200"].thaw()
    assert error.error == f"container 200 on {HOST} does not answer: it is frozen or overloaded"
    assert took < STATUS_SECONDS + 0.5
    assert asked(bed) == ["exec", "status", "config"]


@pytest.mark.parametrize(
    ("python", "sentence"),
    [
        ("/opt/none/python3", f"container 200 on {HOST} has no /opt/none/python3"),
        ("/etc/passwd", f"/etc/passwd in container 200 on {HOST} is not executable"),
    ],
)
def test_a_python_that_is_none(bed, release, python, sentence):
    client = AgentClient(Pct(200, Login(bed)), python=python, root=ROOT, release=release.id, pyz=lambda: release.pyz)
    assert failure_of(client).error == sentence
    assert asked(bed) == ["exec"]


def test_an_old_python_says_so_itself(bed, release):
    # The same words that the loader says: the testbed has no Python of 2020.
    old = bed["200"].path("/opt/old")
    old.write_text("#!/bin/sh\necho 'agent: Python 3.11 or newer is needed, this is 3.9.2' >&2\nexit 1\n")
    old.chmod(0o755)
    try:
        client = AgentClient(Pct(200, Login(bed)), python="/opt/old", root=ROOT, release=release.id, pyz=bytes)
        error = failure_of(client)
        assert (error.code, "3.9.2" in error.error, "-m venv" in error.hint) == (ExitCode.PREFLIGHT, True, True)
        assert asked(bed) == ["exec"]
    finally:
        old.unlink()


def test_a_user_without_sudo_for_pct_is_told_the_line_that_allows_it(bed, release):
    error = failure_of(client_of(bed, release, user=OTHER_USER))
    assert error.error.startswith(f"sudo on {HOST} ")
    assert "NOPASSWD: /usr/sbin/pct" in error.hint
    assert asked(bed) == []


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_a_host_without_pct(bed, release, shell):
    class Shell(Login):
        def open(self, argv):
            return super().open([shell, "-c", shlex.join(argv)])

    client = client_of(bed, release)
    client.transport = Pct(200, Shell(bed))
    bed.machine.run("mv", "/usr/sbin/pct", "/usr/sbin/pct.away")
    try:
        assert failure_of(client).error == f"{HOST} has no pct: it is not a Proxmox host"
    finally:
        bed.machine.run("mv", "/usr/sbin/pct.away", "/usr/sbin/pct")


def test_the_command_line_on_the_host_itself(bed, tmp_path):
    settings = [f"DFLASHCTL_HOME={tmp_path}", f"PYTHONPATH={Path(__file__).parents[3]}"]
    command = ["env", *settings, sys.executable, "-m", "dflashctl", "status", "--host", "local", "--ct"]
    assert "no run yet on container 200 on local" in bed.machine.run(*command, "200", cwd="/").stdout
    stopped = bed.machine.run(*command, "202", cwd="/", check=False)
    assert stopped.returncode == ExitCode.NO_ANSWER
    assert "error: container 202 on this machine is stopped" in stopped.stderr


def test_a_container_that_is_stopped_under_a_verb_is_named(bed, release):
    client = client_of(bed, release, deployed=False)
    client.deploy(release, selfcheck=False, on_event=quiet)
    request = StartRequest(RunSpec(new_run_id(), (), {}, ("cpu",), release=release.id, config={}), 20.0)
    client_of(bed, release).start(request, quiet)
    with client_of(bed, release).call("logs", {"run": "", "file": "train", "follow": True}) as answer:
        next(iter(answer))
        bed["200"].stop()
        with pytest.raises(ConnectionLost) as caught:
            answer.drain()
    assert caught.value.cause == f"container 200 on {HOST} is stopped"
    assert "pct start 200" in caught.value.hint


def test_a_run_that_a_container_stop_ended_is_lost_and_the_next_one_starts(bed, release):
    client_of(bed, release, deployed=False).deploy(release, selfcheck=False, on_event=quiet)
    client = client_of(bed, release)
    first, second = (RunSpec(new_run_id(), (), {}, ("cpu",), release=release.id, config={}) for _ in range(2))
    client.start(StartRequest(first, 20.0), quiet)
    bed["200"].run("touch", "/dev/shm/model")
    bed["200"].restart()
    assert client.status(first.run_id).state == "lost"
    assert bed["200"].run("ls", "/dev/shm").stdout == ""
    assert client.start(StartRequest(second, 20.0), quiet).state == "running"
    client.stop("", now=True, grace=5.0, by="me", on_event=quiet)


class TestLeaks:
    """Nothing of the login on the host reaches a run."""

    @pytest.mark.parametrize(("ct", "leaks"), [("200", LEAKS), ("201", {"HOME": ""})], ids=["a login's", "none"])
    def test_the_environment_of_a_run_is_the_containers(self, bed, release, ct, leaks):
        client = client_of(bed, release, ct, environment=leaks, root="", deployed=False)
        # No --root: what is chosen must not depend on the login either.
        deployed = client.deploy(release, selfcheck=False, on_event=quiet)
        assert deployed.root == ROOT
        spec = RunSpec(new_run_id(), (), {}, ("cpu",), release=release.id, config={})
        client = client_of(bed, release, ct, environment=leaks)
        client.start(StartRequest(spec, 20.0), quiet)
        run = bed[ct].path(f"{ROOT}/runs/{spec.run_id}")
        stored = json.loads((run / "spec.json").read_text())["environment"]
        leader = (run / "trainer.pid").read_text().split()[0]
        there = bed[ct].run("cat", f"/proc/{leader}/environ").stdout.strip("\0").split("\0")
        assert dict(pair.split("=", 1) for pair in there) == stored
        assert (stored["HOME"], stored["LANG"], stored["DFLASH_ROOT"]) == ("/root", "C.UTF-8", ROOT)
        assert "/usr/local/bin" in stored["PATH"].split(":")
        assert set(stored) & set(LEAKS) == {"HOME", "DFLASH_ROOT", "PYTHONPATH"}
        assert stored["PYTHONPATH"] == f"{ROOT}/releases/{release.id}"
        assert "operator" not in json.dumps(stored)
        client.stop("", now=True, grace=5.0, by="me", on_event=quiet)

    def test_names_that_are_not_ascii_survive_a_c_locale(self, bed, release):
        root = "/workspace/läufe $(touch /workspace/bad)"
        client = client_of(bed, release, environment={"LC_ALL": "C"}, root=root, deployed=False)
        client.deploy(release, selfcheck=False, on_event=quiet)
        assert bed["200"].path(f"{root}/current/agent.pyz").is_file()
        assert not bed["200"].path("/workspace/bad").exists()


SMALL = "/mnt/small/dflashctl"


class TestUpload:
    """A release is what its hashes say, or it is refused and nothing of it stays."""

    @pytest.fixture
    def old(self, bed) -> Release:
        """A release that is deployed on the container's tmpfs of 4 MB; what comes after it may not fit or arrive."""
        files = build_release(Path(__file__).parents[3]).files
        small = Release({path: content for path, content in files.items() if path.startswith(("remote/", "agent"))})
        client_of(bed, small, root=SMALL, deployed=False).deploy(small, selfcheck=False, on_event=quiet)
        return small

    def new(self, old: Release, size: int) -> Release:
        return Release(dict(old.files) | {"trainer/weights.bin": bytes(range(256)) * (size // 256)})

    def unchanged(self, bed, old):
        listed = client_of(bed, old, root=SMALL).releases()
        left = bed["200"].run("ls", "-A", f"{SMALL}/releases", f"{SMALL}/locks").stdout
        return (listed.current, [entry.release for entry in listed.releases], ".tmp" in left) == (
            old.id,
            [old.id],
            False,
        )

    def test_a_full_disk(self, bed, old):
        new = self.new(old, 8 << 20)
        with pytest.raises(DflashError) as caught:
            client_of(bed, old, root=SMALL).deploy(new, selfcheck=False, on_event=quiet)
        assert (caught.value.code, caught.value.error) == (ExitCode.PREFLIGHT, f"no space left in {SMALL}")
        assert self.unchanged(bed, old)

    @pytest.mark.parametrize("damage", ["truncated", "a flipped bit"])
    def test_an_archive_that_is_not_what_was_promised(self, bed, old, damage):
        new = self.new(old, 64 << 10)
        good = new.archive()
        bad = good[:-3000] if damage == "truncated" else bytes([*good[:20_000], good[20_000] ^ 1, *good[20_001:]])
        new.__dict__["archive"] = lambda: bad
        with pytest.raises(DflashError) as caught:
            client_of(bed, old, root=SMALL).deploy(new, selfcheck=False, on_event=quiet)
        assert (caught.value.code, caught.value.error) == (ExitCode.FAILED, "the release was refused")
        assert self.unchanged(bed, old)

    @pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
    def test_a_client_that_is_cut_off_in_mid_upload(self, bed, old, part):
        new = self.new(old, 64 << 10)
        whole = new.archive()
        client = client_of(bed, old, root=SMALL)
        request = {"release": new.id, "manifest": new.manifest, "python": "/usr/bin/python3", "selfcheck": False}
        with client.call("deploy", request, more=True) as answer:
            assert next(iter(answer)) == {"need": True}
            answer.upload(whole[: int(len(whole) * part)])
        # Its connection is gone; the next verb finds nothing of it, at the latest when its agent has seen that.
        deadline = time.monotonic() + 10
        while not self.unchanged(bed, old) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.unchanged(bed, old)
        assert client.deploy(new, selfcheck=False, on_event=quiet).previous == old.id

    @pytest.mark.parametrize(
        ("sent", "words"),
        [
            (b"", "standard input ended before the agent was complete"),
            (b"1000\nPK", "standard input ended before the agent was complete"),
            (b"not a length\n", "invalid literal for int()"),
            (b"12345678901234567890\n", "standard input ended before the agent was complete"),
        ],
    )
    def test_an_agent_that_arrives_in_part_runs_nothing(self, bed, release, sent, words):
        client = client_of(bed, release, deployed=False)

        class Torn(Login):
            def open(self, argv):
                channel = super().open(argv)
                channel.send(sent, 5.0)
                channel.finish()
                return channel

        client.transport = Pct(200, Torn(bed))
        with pytest.raises(NoAnswer) as caught:
            client.status()
        assert words in caught.value.cause
        assert not bed["200"].path(ROOT).exists()

    def test_nothing_is_pushed_so_a_push_that_fails_with_exit_0_is_no_matter(self, bed, release):
        with bed.knobs(push="No space left on device"):
            client_of(bed, release, deployed=False).deploy(release, selfcheck=False, on_event=quiet)
        assert asked(bed) == ["exec"]
        assert bed["200"].run("ls", f"{ROOT}/releases").stdout.split() == [release.id]
