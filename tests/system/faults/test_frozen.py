"""An sshd that stops in its tracks: every verb ends by itself, with exit code 8 and a sentence."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
from system.faults.laptop import make_tree, wait_for
from testbed.proxmox import HOST, Proxmox

from remote.protocol.errors import ExitCode

# What a verb may take: 10 s of silence, 10 s to connect anew, each with 3 s to explain it; and as much for this machine.
BOUND = 60

VERBS = (
    ("status",),
    ("stop",),
    ("runs",),
    ("releases",),
    ("rollback",),
    ("logs",),
    ("logs", "--follow"),
    ("start",),
    ("restart",),
    ("doctor",),
    ("hosts", "trust"),
)


@contextlib.contextmanager
def frozen(bed: Proxmox) -> Iterator[None]:
    bed.sshd.freeze()
    try:
        yield
    finally:
        bed.sshd.thaw()


def ended(process, bound: float = BOUND) -> str:
    """Wait for a command line to end with exit code 8; return all that it said, on one line."""
    out, err = process.communicate(timeout=bound)
    assert process.returncode == ExitCode.NO_ANSWER, (process.args[3:], out, err)
    assert "Traceback" not in err
    return " ".join((out + err).split())


@pytest.mark.parametrize("patience", ["2", pytest.param("", marks=pytest.mark.long)])
def test_every_verb_ends_at_an_sshd_that_was_frozen_before(laptop, proxmox, tree, patience):
    laptop.deploy(tree)
    laptop.ssh_config = proxmox.ssh_config(extra=f"ConnectTimeout {patience}" if patience else "")
    with frozen(proxmox):
        # All at once: each waits for a banner.
        going = [laptop.begin(*words) for words in (*VERBS, ("deploy", "--source", str(tree)))]
        for process in going:
            said = ended(process)
            # status has less time than a connection may take.
            words = ("accepts connections but does not answer", "none came about in the time that this command has")
            assert any(each in said for each in words), said
    assert laptop.state() == "none"


@pytest.mark.long
def test_verbs_under_way_end_when_the_sshd_freezes(laptop, proxmox, tree, other_tree):
    """Frozen while pct is asked: the requests are out, and no answer comes back."""
    laptop.deploy(tree)
    laptop.ssh_config = proxmox.ssh_config(extra="ConnectTimeout 2")
    proxmox.set_knobs(delay=2.0)
    before = len(proxmox.calls())
    verbs = (["status"], ["stop"], ["rollback"], ["deploy", "--source", str(other_tree)])
    going = [laptop.begin(*words) for words in verbs]
    wait_for(lambda: len(proxmox.calls()) == before + len(verbs))
    with frozen(proxmox):
        for process in going:
            said = ended(process)
            words = (f"{HOST} does not answer", "accepts connections but does not answer", "fell silent")
            assert any(each in said for each in words), said
    proxmox.set_knobs()
    # An agent that was asked goes on, and finds nobody who reads its answer.
    laptop.deploy(other_tree)
    assert laptop.state() == "none"


@pytest.mark.long
def test_a_deploy_ends_when_the_sshd_freezes_in_mid_upload(laptop, proxmox, tree, tmp_path):
    old = laptop.deploy(tree)
    # More than all buffers on the way take, and nothing that can be packed.
    large = make_tree(tmp_path / "large", weights=os.urandom(64 << 20))
    going = laptop.begin("deploy", "--source", str(large))
    releases = proxmox["200"].path(laptop.root) / "releases"
    wait_for(lambda: list(releases.glob(".tmp-*")))
    with frozen(proxmox):
        assert "takes no more data" in ended(going, 120)
        # The agent gives up by itself: its upload stalls.
        wait_for(lambda: not list(releases.glob(".tmp-*")), 60)
    assert laptop.answer("releases")["current"] == old
    assert laptop.deploy(large) != old


@pytest.mark.long
@pytest.mark.parametrize("words", [("start",), ("logs", "--follow"), ("restart",)])
def test_what_asks_again_gives_up_in_the_end(laptop, proxmox, tmp_path, words):
    """start and restart under their run id, `logs --follow` for a good minute; what they were about goes on."""
    laptop.deploy(make_tree(tmp_path / "slow", "--load", "3", "--pause", "0.05"))
    if words[0] != "start":
        laptop.start()
    laptop.ssh_config = proxmox.ssh_config(extra="ConnectTimeout 2")
    going = laptop.begin(*words)
    if words[0] == "logs":
        assert going.stdout.readline()
    else:
        wait_for(lambda: "loading" in going.stderr.readline())
    with frozen(proxmox):
        ended(going, 300)
    assert laptop.state() in ("starting", "running")
