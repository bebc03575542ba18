"""restart through ssh and pct while the wire is cut and the laptop dies: at its end one run lives, and it is the new one."""

from __future__ import annotations

import signal
import time

import pytest
from system.faults.laptop import make_tree
from system.faults.relay import Relay

from remote.protocol.errors import ExitCode


@pytest.fixture
def training(laptop, tmp_path):
    """A laptop whose container trains: returns (laptop, run); the checkpoint of a stop takes a second."""
    laptop.deploy(make_tree(tmp_path / "slow", "--save", "1"))
    return laptop, laptop.start()


def through(relay, proxmox):
    """Return an ssh configuration that takes the way through `relay`, with the host's own key."""
    return proxmox.ssh_config(extra=f"Port {relay.port}\nHostKeyAlias [127.0.0.1]:{proxmox.sshd.port}")


def until(condition):
    """Wait until `condition` holds, at most 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def runs(laptop):
    return {run["run_id"]: run["state"] for run in laptop.answer("runs")["runs"]}


def test_restart_takes_two_calls_and_links_the_runs(training, proxmox):
    laptop, old = training
    before = len(proxmox.calls())
    new = laptop.answer("restart", "--seed", "7")
    assert [call[-1] for call in proxmox.calls()[before:]] == ["spec", "restart"]
    assert new["restarted_from"] == old
    assert new["seconds"]["stop"] >= 1
    assert runs(laptop) == {old: "stopped", new["run_id"]: "running"}
    assert laptop("stop", "--now").returncode == 0


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
def test_a_wire_that_is_cut_is_asked_again_and_there_is_one_run(training, proxmox, share):
    """The whole restart passes some bytes; the first connection ends after a share of them."""
    laptop, old = training
    with Relay(proxmox.sshd.port) as whole:
        laptop.ssh_config = through(whole, proxmox)
        first = laptop.answer("restart", "--now")["run_id"]
        length = whole.passed
    with Relay(proxmox.sshd.port, int(length * share)) as relay:
        laptop.ssh_config = through(relay, proxmox)
        done = laptop("restart", "--json")
        assert relay.was_cut
    laptop.ssh_config = None
    # Cut before the agent's first word the command ends with 8; asked by hand, it restarts all the same.
    assert done.returncode == (ExitCode.NO_ANSWER if share < 0.5 else ExitCode.OK), done.stderr
    if done.returncode == ExitCode.NO_ANSWER:
        assert laptop("restart").returncode == 0
    else:
        assert "asking again" in done.stderr
    states = runs(laptop)
    assert len(states) == 3
    assert (states.pop(old), states.pop(first)) == ("stopped", "stopped")
    assert list(states.values()) == ["running"]
    assert laptop("stop", "--now").returncode == 0


@pytest.mark.parametrize("words", ["preflight", "stopping"])
def test_a_laptop_that_dies_leaves_the_old_run_or_the_new_one(training, words):
    laptop, old = training
    process = laptop.begin("restart")
    while words not in (line := process.stderr.readline()):
        assert line, process.wait()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    if words == "preflight":
        # The agent finds nobody at its next word: before the stop was asked for nothing is touched.
        assert laptop.answer("restart")["restarted_from"] == old
    until(lambda: sorted(runs(laptop).values()) == ["running", "stopped"])
    assert laptop.answer("status")["restarted_from"] == old
    assert laptop("stop", "--now").returncode == 0
