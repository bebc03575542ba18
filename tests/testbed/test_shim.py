"""The fallback without root or LXC, here run by whoever runs the tests."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from testbed.shim import ShimProxmox
from testbed.sshd import missing_sshd

from remote.protocol.identity import read_stat

pytestmark = pytest.mark.skipif(bool(missing_sshd()), reason=missing_sshd())


@pytest.fixture(scope="module")
def host():
    made = ShimProxmox()
    yield made
    made.close()


def test_an_ordinary_user_without_containers_runs_these_very_tests(real_proxmox):
    machine, tree = real_proxmox.machine, real_proxmox.state / "source" / "tree"
    tree.mkdir()
    machine.run("mount", "--bind", str(Path(__file__).parents[2]), str(tree))
    python = f"{real_proxmox.state}/source/venv/bin/python"
    argv = [
        python,
        "-B",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not ordinary",
        "tests/testbed/test_shim.py",
    ]
    command = f"cd {tree} && umask 077 && exec {shlex.join(argv)}"
    done = machine.run("/usr/sbin/runuser", "-u", "ops", "--", "sh", "-c", command, check=False)
    assert done.returncode == 0, done.stdout
    assert "failed" not in done.stdout
    assert "skipped" not in done.stdout


@pytest.fixture
def shim(host):
    yield host
    host.reset()


@pytest.mark.parametrize("pct", ["/usr/sbin/pct", "sudo -n /usr/sbin/pct"])
def test_a_command_runs_in_the_directory(shim, pct):
    done = shim.ssh(f"{pct} exec 200 -- sh -c 'pwd; echo $HOME; cat'", input="data")
    assert done.stdout == f"{shim['200'].rootfs}\n{shim['200'].rootfs}\ndata"
    assert shim.ssh(f"{pct} exec 200 -- sh -c 'exit 7'").returncode == 7
    assert shim.calls()[0][:2] == ["exec", "200"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/usr/sbin/pct exec 202 -- true", "container '202' not running!\n"),
        ("/usr/sbin/pct exec 299 -- true", "Configuration file 'nodes/pve/lxc/299.conf' does not exist\n"),
        ("/usr/sbin/pct start 203", "CT is locked (backup)\n"),
        ("/usr/sbin/pct push 200 /etc/hostname /none/x", "failed to create file: /none/x: No such file or directory\n"),
        ("sudo -n /usr/bin/id", "sudo: a password is required\n"),
    ],
)
def test_it_says_what_the_real_one_says(shim, command, said):
    assert shim.ssh(command).stderr == said


@pytest.mark.parametrize(("command", "code"), [("/none/python", 127), ("/etc/hosts", 126)])
def test_a_command_that_cannot_be_run(shim, command, code):
    done = shim.ssh(f"/usr/sbin/pct exec 200 -- {command}")
    assert done.returncode == code
    assert done.stderr.startswith("lxc-attach: 200: ../src/lxc/attach.c: ")
    assert done.stderr.endswith(f'Failed to exec "{command}"\n')


def test_a_stop_ends_what_runs_in_it_and_nothing_else(shim):
    start = "sh -c 'sleep 20 </dev/null >/dev/null 2>&1 & echo $!'"
    first, second = (int(shim.ssh(f"/usr/sbin/pct exec {ct} -- {start}").stdout) for ct in ("200", "201"))
    assert shim.pct("stop", "200").returncode == 0
    assert shim.pct("status", "200").stdout == "status: stopped\n"
    # A zombie, which waits for this machine's process 1 to reap it, is as good as gone.
    ended, lives = read_stat(first), read_stat(second)
    assert ended is None or ended.state == "Z"
    assert lives is not None
    assert lives.state == "S"


def test_push_and_pull_stay_below_the_directory(shim):
    source = shim.state / "pushed"
    source.write_bytes(b"\0\xff")
    assert shim.pct("push", "200", str(source), "/workspace/it").returncode == 0
    assert shim["200"].path("/workspace/it").read_bytes() == b"\0\xff"
    assert shim.pct("pull", "200", "/workspace/it", f"{source}.back").returncode == 0
    assert (shim.state / "pushed.back").read_bytes() == b"\0\xff"


def test_a_directory_of_this_machine_is_there_until_the_reset(shim, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    shim["200"].bind(tmp_path, "/opt/model")
    assert shim.ssh("/usr/sbin/pct exec 200 -- cat opt/model/config.json").stdout == "{}"
    shim.reset()
    assert "No such file" in shim.ssh("/usr/sbin/pct exec 200 -- cat opt/model/config.json").stderr
    assert (tmp_path / "config.json").exists()
