"""An sshd that stops in its tracks: every verb ends by itself, with exit code 8 and a sentence."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
from testbed.proxmox import HOST, Proxmox

from remote.protocol.errors import ExitCode

# What a verb may take: 10 s of silence and 10 s to connect anew, each with 3 s to explain it, and as much for this machine.
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


def test_every_verb_ends_at_an_sshd_that_was_frozen_before(laptop, proxmox, tree):
    laptop.deploy(tree)
    with frozen(proxmox):
        going = [laptop.begin(*words) for words in (*VERBS, ("deploy", "--source", str(tree)))]
        # All at once: each waits its 10 s for a banner.
        for process in going:
            assert "accepts connections but does not answer" in ended(process), process.args
    assert laptop.state() == "none"


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("verb", ["status", "stop"])
def test_a_verb_under_way_ends_when_the_sshd_freezes(laptop, proxmox, tree, verb):
    """Frozen while pct is asked: the request is out, and no answer comes back."""
    laptop.deploy(tree)
    proxmox.set_knobs(delay=1.0)
    before = len(proxmox.calls())
    going = laptop.begin(verb)
    wait_for(lambda: len(proxmox.calls()) > before)
    with frozen(proxmox):
        assert f"{HOST} does not answer" in ended(going)


@pytest.mark.long
@pytest.mark.parametrize("words", [("start",), ("logs", "--follow")])
def test_what_reconnects_gives_up_in_the_end(laptop, proxmox, tree, words):
    """`start` asks again under its run id, `logs --follow` reconnects for a good minute."""
    laptop.deploy(tree)
    if words[0] == "logs":
        laptop.start()
    going = laptop.begin(*words)
    assert going.stdout.readline()
    with frozen(proxmox):
        ended(going, 300)
    assert laptop.state() == "running"
