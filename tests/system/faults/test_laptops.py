"""Two people at one container, odd logins on its host, and a run that outlives everything that started it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from system.faults.laptop import Laptop, make_tree, other_pct, wait_for
from testbed.machine import SUDO_USER

from remote.protocol.errors import ExitCode


@pytest.fixture
def other(proxmox, tmp_path) -> Iterator[Laptop]:
    """Somebody else's laptop, who reaches the same container."""
    made = Laptop(proxmox, tmp_path / "other")
    yield made
    made.close()


def answers(laptop: Laptop, processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    return [(process.returncode, out, err) for process in processes for out, err in [process.communicate(timeout=60)]]


class TestTwoAtOnce:
    def test_of_two_starts_one_wins(self, laptop, other, tree):
        laptop.deploy(tree)
        other.deploy(tree)
        both = [each.begin("start", "--json", "--name", name) for each, name in ((laptop, "mine"), (other, "theirs"))]
        done = answers(laptop, both)
        assert sorted(code for code, _, _ in done) == [0, ExitCode.ALREADY_RUNNING], done
        won = next(json.loads(out)["run_id"] for code, out, _ in done if code == 0)
        lost = next(json.loads(out) for code, out, _ in done if code != 0)
        assert won in lost["cause"]
        assert [run["run_id"] for run in other.answer("runs")["runs"]] == [won]

    def test_of_two_deploys_each_is_whole_and_one_is_current(self, laptop, other, tree, other_tree):
        trees = ((laptop, tree), (other, other_tree))
        done = answers(laptop, [each.begin("deploy", "--json", "--source", str(which)) for each, which in trees])
        assert [code for code, _, _ in done] == [0, 0], done
        releases = {json.loads(out)["release"] for _, out, _ in done}
        there = laptop.answer("releases")
        assert {entry["release"] for entry in there["releases"]} == releases
        assert there["current"] in releases

    def test_the_same_tree_deployed_by_two_is_one_release(self, laptop, other, tree):
        done = answers(laptop, [each.begin("deploy", "--json", "--source", str(tree)) for each in (laptop, other)])
        assert [code for code, _, _ in done] == [0, 0], done
        assert len(laptop.answer("releases")["releases"]) == 1

    def test_a_stop_while_the_other_starts(self, laptop, other, tmp_path):
        laptop.deploy(make_tree(tmp_path / "slow", "--load", "4"))
        starting = laptop.begin("start")
        wait_for(lambda: "loading" in starting.stderr.readline())
        stopped = other.answer("stop")
        assert stopped["status"]["state"] == "stopped"
        out, err = starting.communicate(timeout=60)
        assert starting.returncode == ExitCode.FAILED, (out, err)
        assert "was stopped before its first step" in err

    def test_what_one_deploys_the_other_does_not_start_unknowingly(self, laptop, other, tree, other_tree):
        mine, theirs = laptop.deploy(tree), other.deploy(other_tree)
        started = laptop("start", "--json")
        assert (started.returncode, json.loads(started.stdout)["release"]) == (0, theirs), started.stderr
        assert f"release {theirs} is current there and is launched, not {mine}" in started.stderr
        laptop.answer("stop")


@contextmanager
def login_script(bed, user: str, text: str) -> Iterator[None]:
    """Have the login shell of a user read `text` before each command, as bash does when sshd runs it."""
    path = bed.state / "home" / user / ".bashrc"
    path.write_text(text)
    path.chmod(0o644)
    try:
        yield
    finally:
        path.unlink()


NOISE = r"""
echo "Welcome to $(uname -n)!"
printf 'no newline at its end, \000\377 and what looks like a frame: 0123456789abcdef result 2\n{}'
for i in $(seq 2000); do echo "noise $i: 0123456789abcdef hello 12"; done
echo "motd: 3 updates can be applied" >&2
"""
PERL = """\
echo 'perl: warning: Setting locale failed.' >&2
echo 'perl: warning: Falling back to the standard locale ("C").' >&2
echo 'a line on stdout'
exec /usr/sbin/pct.real "$@"
"""


def four_commands(laptop: Laptop, tree: Path) -> None:
    release = laptop.deploy(tree)
    run = laptop.start()
    status = laptop.answer("status")
    assert (status["run_id"], status["state"], status["release"]) == (run, "running", release)
    assert "run_started" in laptop("logs", "--tail", "100000").stdout
    assert laptop.answer("stop")["status"]["state"] == "stopped"


@pytest.mark.parametrize("user", ["root", SUDO_USER])
def test_a_noisy_login_is_skipped(laptop, real_proxmox, tree, user):
    laptop.user = user
    with login_script(real_proxmox, user, NOISE), other_pct(real_proxmox, PERL):
        four_commands(laptop, tree)


def test_noise_does_not_hide_why_there_was_no_answer(laptop, real_proxmox):
    laptop.ct = "202"
    with login_script(real_proxmox, "root", NOISE), other_pct(real_proxmox, PERL):
        done = laptop("status")
    assert done.returncode == ExitCode.NO_ANSWER
    assert done.stderr.startswith("error: container 202 on 10.1.2.6 is stopped\n")


@pytest.mark.parametrize("verb", ["status", "deploy"])
def test_a_login_that_never_stops_talking(laptop, proxmox, tree, verb):
    with login_script(proxmox, "root", "yes this is no answer\n"):
        done = laptop(verb, *(("--source", str(tree)) if verb == "deploy" else ()))
    assert done.returncode == ExitCode.NO_ANSWER
    assert "error: no sensible answer from container 200 on 10.1.2.6" in done.stderr
    assert "this is no answer" in done.stderr
    assert "login script" in done.stderr
    assert len(done.stderr) < 1000


@pytest.mark.parametrize("ct", ["200", pytest.param("201", marks=pytest.mark.long)])
def test_a_umask_of_077_on_the_host(laptop, real_proxmox, tree, ct):
    laptop.ct = ct
    with login_script(real_proxmox, "root", "umask 077\n"):
        four_commands(laptop, tree)
    root = real_proxmox[ct].path(laptop.root)
    release = (root / "current").resolve() if ct == "200" else root / "releases" / (root / "current").readlink().name
    # Whoever runs the trainer over there has to be able to read it.
    for path in (release, release / "trainer", release / "trainer" / "__main__.py"):
        assert path.stat().st_mode & 0o044 == 0o044, path
    assert stat.S_IMODE((release / "agent.pyz").stat().st_mode) & 0o222 == 0


def test_a_run_outlives_ssh_sshd_and_pct(laptop, real_proxmox, tmp_path):
    laptop.deploy(make_tree(tmp_path / "slow", "--load", "2", "--pause", "0.02"))
    starting = laptop.begin("start")
    wait_for(lambda: "loading" in starting.stderr.readline())
    # The laptop, the sshd that served it, and what lxc-attach left on the host: one after the other.
    starting.send_signal(signal.SIGKILL)
    real_proxmox.sshd.kill_sessions()
    for pid in attached(real_proxmox):
        os.kill(pid, signal.SIGKILL)
    run = laptop.answer("status")["run_id"]
    wait_for(lambda: laptop.answer("status")["state"] == "running")
    following = laptop.begin("logs", "--follow")
    following.stdout.readline()
    real_proxmox.sshd.stop()
    real_proxmox.sshd.start()
    step = laptop.answer("status")["step"]
    wait_for(lambda: laptop.answer("status")["step"] > step)
    stopped = laptop.answer("stop")
    assert (stopped["status"]["run_id"], stopped["status"]["state"]) == (run, "stopped")
    out, err = following.communicate(timeout=60)
    assert following.returncode == 0, err
    assert "reconnecting" in err
    assert out.splitlines()[-1].startswith("run ")


def attached(bed) -> list[int]:
    """Return the pids of the lxc-attach that live, as this machine sees them."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"lxc-attach") and str(bed.state / "lxc").encode() in words:
            found.append(int(entry.name))
    return found


ODD = "Läufe für Ünïcode ✓ 日本 'quoted' \"$(touch /tmp/bad)\" `id` --x ; &"


@pytest.mark.parametrize("user", [pytest.param("root", marks=pytest.mark.long), SUDO_USER])
def test_names_and_notes_get_through_both_hops(laptop, proxmox, tree, user):
    laptop.user = user
    laptop.environment = {"LC_ALL": "C.UTF-8"}
    laptop.deploy(tree)
    laptop.start("--name", ODD, "--note", f"-{ODD}")
    spec = proxmox["200"].path(f"{laptop.root}/runs/{laptop.answer('status')['run_id']}/spec.json")
    stored = json.loads(spec.read_text())
    assert (stored["name"], stored["note"]) == (ODD, f"-{ODD}")
    assert laptop.answer("status")["name"] == ODD
    assert "Läufe" in laptop("runs").stdout
    assert not proxmox["200"].path("/tmp/bad").exists()
    assert not Path("/tmp/bad").exists()
