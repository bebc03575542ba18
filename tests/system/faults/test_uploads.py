"""A release that does not arrive as it was sent is refused; what was current stays, and the next deploy works."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from system.faults.laptop import Laptop, make_tree, other_pct

from dflashctl.release import build_release
from remote.protocol.errors import ExitCode

SMALL = "/mnt/small/dflashctl"
"""On a tmpfs of 4 MiB."""

# pct exec with a hand on its input: from the byte `at` on one bit is flipped, or nothing follows.
HAND = """\
import subprocess, sys
how, at, argv = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
child = subprocess.Popen(argv, stdin=subprocess.PIPE)
seen = 0
try:
    while data := sys.stdin.buffer.read1(65536):
        if seen <= at < seen + len(data):
            data = bytearray(data)
            if how == "flip":
                data[at - seen] ^= 1
            else:
                del data[at - seen:]
        seen += len(data)
        child.stdin.write(data)
        child.stdin.flush()
        if how == "cut" and seen >= at:
            break
    child.stdin.close()
except BrokenPipeError:
    pass
sys.exit(child.wait())
"""


def tampering(bed, how: str, at: int):
    """Put a hand between pct exec and the container; other commands are let through."""
    (bed.state / "hand.py").write_text(HAND)
    hand = f"/usr/bin/python3 -IS {bed.state}/hand.py {how} {at} /usr/sbin/pct.real"
    return other_pct(bed, f'[ "$1" = exec ] && exec {hand} "$@"; exec /usr/sbin/pct.real "$@"')


class Shelf:
    """ROOT of a laptop's container, looked at from inside: it may be on a tmpfs that is seen from nowhere else."""

    def __init__(self, laptop: Laptop) -> None:
        self._laptop = laptop

    def __call__(self) -> tuple[str, list[str], list[str]]:
        """Return what current points to, the releases, and what is half-done."""
        root = self._laptop.root
        script = f"readlink {root}/current; ls -A {root}/releases; echo; ls -A {root} {root}/locks {root}/releases"
        said = self._laptop.bed[self._laptop.ct].run("sh", "-c", script).stdout
        listed, _, everything = said.partition("\n\n")
        current, *names = listed.split()
        half_done = [name for name in everything.split() if "tmp" in name]
        return current, sorted(name for name in names if not name.startswith(".")), half_done


@pytest.fixture
def settled(laptop, real_proxmox, tree):
    """A laptop that has deployed, and what its container looks like."""
    laptop.deploy(tree)
    return laptop, Shelf(laptop)


class TestFullDisk:
    @pytest.fixture
    def small(self, laptop, real_proxmox, tree):
        laptop.root = SMALL
        laptop.deploy(tree)
        return laptop, Shelf(laptop)

    def test_a_release_that_finds_no_room(self, small, tmp_path):
        laptop, shelf = small
        before = shelf()
        large = make_tree(tmp_path / "large", weights=os.urandom(8 << 20))
        done = laptop("deploy", "--source", str(large))
        assert done.returncode == ExitCode.PREFLIGHT
        assert f"error: no space left in {SMALL}" in done.stderr
        assert shelf() == before
        # Nothing of it takes room either.
        assert laptop.deploy(make_tree(tmp_path / "fits", "--pause", "0.05", weights=os.urandom(1 << 20))) in shelf()[0]

    def test_a_start_that_finds_no_room_leaves_no_run(self, small):
        laptop, _ = small
        fill = f"head -c 8M /dev/zero > {SMALL}/filler; ls {SMALL}/filler"
        laptop.bed["200"].run("sh", "-c", fill)
        done = laptop("start")
        assert done.returncode == ExitCode.PREFLIGHT, done.stderr
        assert "No space left on device" in done.stderr
        assert laptop.answer("runs")["runs"] == []
        laptop.bed["200"].run("rm", f"{SMALL}/filler")
        laptop.start()

    # The supervisor tries for half a minute to write how it ended.
    @pytest.mark.long
    def test_a_run_whose_disk_fills_up_is_stopped_and_told_of(self, small):
        laptop, _ = small
        run = laptop.start()
        laptop.bed["200"].run("sh", "-c", f"head -c 8M /dev/zero > {SMALL}/filler; true")
        # stop.json needs room; without any, the way that needs none is named.
        done = laptop("stop")
        assert done.returncode == ExitCode.STOP_INCOMPLETE, done.stderr
        assert "`dflashctl stop --now`, which needs none" in done.stderr
        assert laptop("stop", "--now").returncode == 0
        laptop.bed["200"].run("rm", f"{SMALL}/filler")
        status = laptop.answer("status")
        assert status["run_id"] == run
        # Without a word on the disk there is none to be had.
        assert status["state"] in ("failed", "lost")
        assert laptop.start() != run


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_an_upload_that_is_damaged_on_its_way(settled, other_tree, how):
    laptop, shelf = settled
    before = shelf()
    size = len(build_release(other_tree).archive())
    # The request with its manifest comes first: in it, then in the first and in the last files.
    for at in (2_000, 20_000, size // 2, size - 5_000):
        with tampering(laptop.bed, how, at):
            done = laptop("deploy", "--source", str(other_tree))
        assert done.returncode in (ExitCode.FAILED, ExitCode.USAGE, ExitCode.NO_ANSWER), (at, done.stderr)
        assert "Traceback" not in done.stderr
        assert shelf() == before
    # The last one was damaged in its files.
    assert "error: the release was refused" in done.stderr
    assert "hint: deploy again; `current` is unchanged" in done.stderr
    assert laptop.deploy(other_tree) in shelf()[0]


@pytest.mark.long
@settings(
    max_examples=100,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(how=st.sampled_from(["flip", "cut"]), part=st.floats(0, 1))
def test_an_upload_that_is_damaged_anywhere(settled, other_tree, how, part):
    laptop, shelf = settled
    size = 10_000 + len(build_release(other_tree).archive())
    release = shelf()
    with tampering(laptop.bed, how, int(part * size)):
        done = laptop("deploy", "--source", str(other_tree))
    # What lies behind the last byte that counts (the padding of a tar) may be anything.
    if done.returncode == 0:
        assert laptop.answer("releases")["current"] in done.stdout
        assert laptop("rollback").returncode == 0
    else:
        current, names, half_done = shelf()
        assert (names, half_done) == (release[1], [])
        # A nonce that was damaged is answered with another one, which the client cannot hear: then a release that lay
        # there already, verified, may have become the current one. One that was being sent never.
        assert current.removeprefix("releases/") in names
    assert "Traceback" not in done.stderr
