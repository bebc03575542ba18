from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from testbed.containers import MEMORY_MB, memory_limit
from testbed.proxmox import Proxmox

TESTS = Path(__file__).parents[1]
HOLD = """
import sys, time
sys.path[:0] = [{tests!r}, {tree!r}]
from testbed.proxmox import Proxmox
made = Proxmox()
print(made.state, made.machine._init, flush=True)
time.sleep(60)
"""


def control_groups(name):
    return list(Path("/sys/fs/cgroup").glob(f"**/{name}"))


def mentioned(text):
    """Return the pids of processes whose command line holds `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and text.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_the_readme_s_address_means_the_testbed(proxmox):
    assert proxmox.ssh("/usr/sbin/pct status 200").stdout == "status: running\n"


def test_nothing_of_it_shows_on_this_machine(real_proxmox):
    assert not Path("/usr/sbin/pct").exists()
    assert not Path("/etc/pve").exists()
    assert not Path("/etc/sudoers.d/testbed").exists()
    assert "ops:x:4200" not in Path("/etc/passwd").read_text()
    mounts = Path("/proc/self/mounts").read_text()
    assert str(real_proxmox.state) not in mounts


@pytest.mark.parametrize("ct", ["200", "201"])
def test_a_container_has_the_environment_of_the_tests(real_proxmox, ct):
    container = real_proxmox[ct]
    script = "import sys, os, torch; print(sys.version_info[:2], os.geteuid(), torch.ones(2).sum().item())"
    out = container.run(container.python, "-I", "-c", script).stdout
    assert out == f"{sys.version_info[:2]} 0 2.0\n"
    assert container.run("ls", "-A", "/workspace").stdout == ""
    assert not container.run("sh", "-c", "ls -d /work /home/* 2>/dev/null", check=False).stdout
    assert container.run("sh", "-c", "command -v pct", check=False).returncode == 127


def test_a_container_sees_its_memory_limit(real_proxmox):
    files = "/sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max"
    limit = real_proxmox["201"].run("sh", "-c", f"cat {files} 2>/dev/null; true").stdout
    assert limit.split() == ([str(MEMORY_MB << 20)] if memory_limit() else [])


def test_a_directory_reaches_a_container_whoever_may_enter_its_parents(real_proxmox, tmp_path):
    closed = tmp_path / "closed"
    (closed / "model").mkdir(parents=True)
    (closed / "model" / "config.json").write_text("{}")
    closed.chmod(0o700)
    container = real_proxmox["201"]
    container.bind(closed / "model", "/dev/shm/model")
    container.restart()
    assert container.run("cat", "/dev/shm/model/config.json").stdout == "{}"
    assert container.run("touch", "/dev/shm/model/x", check=False).returncode == 1
    real_proxmox.reset()
    assert container.run("ls", "-A", "/dev/shm").stdout == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_two_at_once_and_an_interrupted_one_leaves_nothing_that_runs(real_proxmox, number):
    script = HOLD.format(tests=str(TESTS), tree=str(TESTS.parent))
    other = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    state = Path(other.stdout.readline().split()[0])
    assert mentioned(str(state))
    assert real_proxmox.ssh("/usr/sbin/pct exec 200 -- hostname").stdout == "ct200\n"
    os.kill(other.pid, number)
    other.wait(10)
    other.stdout.close()
    deadline = time.monotonic() + 10
    while mentioned(str(state)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert mentioned(str(state)) == []
    # The next one clears the files and control groups away.
    with_owner_gone = Proxmox()
    assert with_owner_gone.state.exists()
    assert not state.exists()
    assert control_groups(state.name) == []
    with_owner_gone.close()
    assert not with_owner_gone.state.exists()
    assert control_groups(with_owner_gone.state.name) == []
    assert real_proxmox.state.exists()
