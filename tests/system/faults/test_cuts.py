"""The connection cut at any byte of deploy, start and restart, then the command again: one release, one run, nothing half-done."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from system.faults.laptop import Done, Laptop, other_pct, wait_for
from system.faults.relay import Relay

from remote.protocol.errors import ExitCode
from remote.protocol.layout import RootLayout

LOST = (0, ExitCode.NO_ANSWER)

# Each example has a testbed as the one before left it: by design, for that is what a retry finds.
anywhere = settings(
    max_examples=60,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@contextlib.contextmanager
def cut(laptop: Laptop, at: int | None, *, dead: bool = False) -> Iterator[Relay]:
    """Have a laptop's first connection cut after `at` bytes; with `dead` it gets no other one either."""
    with Relay(laptop.bed.sshd.port, at, dead=dead) as relay:
        alias = f"[{laptop.bed.sshd.address}]:{laptop.bed.sshd.port}"
        laptop.ssh_config = laptop.bed.ssh_config(laptop.user, extra=f"Port {relay.port}\nHostKeyAlias {alias}")
        try:
            yield relay
        finally:
            laptop.ssh_config = None


def length(laptop: Laptop, *words: str) -> int:
    """Return how many bytes a command line takes that nobody disturbs."""
    with cut(laptop, None) as relay:
        laptop.answer(*words)
    return relay.passed


def ends_sensibly(done: Done) -> None:
    assert done.returncode in LOST, done.stderr
    assert ("error: " in done.stderr) == (done.returncode != 0)
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr
    # Nothing is wrong with the Python over there.
    assert "--python" not in done.stderr


def root_of(laptop: Laptop) -> RootLayout:
    """Return ROOT as the test sees it."""
    return RootLayout(laptop.bed[laptop.ct].path(laptop.root))


def whole_releases(laptop: Laptop) -> list[str]:
    """Return the releases that are there; each is what its manifest says."""
    root = root_of(laptop)
    found = (
        sorted(path for path in root.releases.glob("*") if not path.name.startswith(".")) if root.path.is_dir() else []
    )
    for release in found:
        for line in (release / "MANIFEST").read_text().splitlines():
            digest, path = line.split(maxsplit=1)
            assert hashlib.sha256((release / path).read_bytes()).hexdigest() == digest, path
    return [release.name for release in found]


def leftovers(laptop: Laptop) -> list[Path]:
    """Return what an upload or a start that was given up has left."""
    root = root_of(laptop)
    folders = (root.path, root.releases, root.runs, root.start_lock.parent, *root.runs.glob("*"))
    return [path for folder in folders for path in folder.glob("*tmp*")]


def living(laptop: Laptop) -> list[str]:
    return [run["run_id"] for run in runs(laptop) if run["state"] in ("starting", "running", "stopping", "orphaned")]


def runs(laptop: Laptop) -> list[dict]:
    return laptop.answer("runs", "--limit", "1000")["runs"]


class TestDeploy:
    def check(self, laptop: Laptop, tree: Path, at: int, *, dead: bool = False) -> None:
        """Cut a first deploy, then deploy again."""
        laptop.bed[laptop.ct].clean()
        with cut(laptop, at, dead=dead) as relay:
            done = laptop("deploy", "--source", str(tree))
        assert relay.was_cut
        ends_sensibly(done)
        # What is there is whole, and current is nothing else.
        current = root_of(laptop).current
        assert not current.is_symlink() or [current.readlink().name] == whole_releases(laptop)
        release = laptop.deploy(tree)
        assert whole_releases(laptop) == [release]
        assert current.readlink().name == release
        assert leftovers(laptop) == []

    def test_at_its_phases(self, laptop, tree):
        whole = length(laptop, "deploy", "--source", str(tree))
        # Keys agreed, command begun, agent half there, upload begun, nearly done, checked.
        for at in (2000, 4000, int(0.1 * whole), int(0.5 * whole), int(0.97 * whole), whole - 300):
            self.check(laptop, tree, at)

    @pytest.mark.long
    @anywhere
    @given(part=st.floats(0, 1), dead=st.booleans())
    def test_anywhere(self, laptop, tree, part, dead):
        laptop.bed[laptop.ct].clean()
        whole = length(laptop, "deploy", "--source", str(tree))
        self.check(laptop, tree, 1 + int(part * (whole - 2)), dead=dead)


class TestStart:
    @pytest.fixture
    def deployed(self, laptop, tree):
        laptop.deploy(tree)
        return laptop

    def check(self, laptop: Laptop, at: int, *, dead: bool) -> None:
        """Cut a start, start again, stop."""
        before = len(runs(laptop))
        with cut(laptop, at, dead=dead):
            done = laptop("start", "--json")
        ends_sensibly(done)
        again = laptop("start", "--json")
        alive = living(laptop)
        assert len(alive) == 1, done.stderr
        if again.returncode == 0:
            assert json.loads(again.stdout)["run_id"] == alive[0]
        else:
            assert again.returncode == ExitCode.ALREADY_RUNNING, again.stderr
            assert alive[0] in again.stderr
        # Whoever was told of a run was told of this one.
        if done.returncode == 0:
            assert json.loads(done.stdout)["run_id"] == alive[0]
        assert len(runs(laptop)) == before + 1
        assert leftovers(laptop) == []
        assert laptop.answer("stop")["status"]["state"] == "stopped"

    @pytest.mark.parametrize("dead", [False, pytest.param(True, marks=pytest.mark.long)], ids=["reconnects", "dead"])
    def test_at_its_phases(self, deployed, dead):
        whole = length(deployed, "start")
        deployed.answer("stop")
        # Login, request, preflight, launched, loading.
        for missing in (3800, 2900, 2300, 1500, 500) if not dead else (2600, 1500):
            self.check(deployed, whole - missing, dead=dead)

    def test_a_network_that_is_away_for_a_moment_is_waited_for(self, deployed):
        whole = length(deployed, "start")
        deployed.answer("stop")
        with cut(deployed, whole - 1500, dead=True) as relay:
            going = deployed.begin("start", "--json")
            wait_for(lambda: relay.refused)
            relay.mend()
            out, err = going.communicate(timeout=60)
        assert going.returncode == 0, err
        assert "asking again" in err
        assert living(deployed) == [json.loads(out)["run_id"]]

    @pytest.mark.long
    @anywhere
    @given(at=st.integers(1, 7800), dead=st.booleans())
    def test_anywhere(self, deployed, at, dead):
        self.check(deployed, at, dead=dead)


class TestRollback:
    """The one verb that does another thing the second time: it is never sent twice behind the operator's back."""

    def check(self, laptop: Laptop, at: int) -> None:
        root = root_of(laptop)
        before = root.current.readlink().name
        with cut(laptop, at):
            done = laptop("rollback", "--json")
        ends_sensibly(done)
        after = root.current.readlink().name
        if done.returncode == 0:
            answer = json.loads(done.stdout)
            assert (answer["release"], answer["previous"]) == (after, before)
            assert after != before
        elif after != before:
            # Who cannot know says so.
            assert "dflashctl releases" in done.stderr, done.stderr

    def test_around_its_request_and_its_answer(self, laptop, tree, other_tree):
        laptop.deploy(tree)
        laptop.deploy(other_tree)
        whole = length(laptop, "rollback")
        for missing in (650, 575, 500, 425, 350, 275, 200, 125):
            self.check(laptop, whole - missing)

    def test_a_pct_that_was_killed_has_been_asked_once(self, laptop, real_proxmox, tree, other_tree):
        """What runs inside goes on when pct is killed on the host: no hop is broken, and no answer comes."""
        first = laptop.deploy(tree)
        laptop.deploy(other_tree)
        # The answer goes nowhere, and pct ends as one that was killed.
        with other_pct(
            real_proxmox,
            '[ "$1" = exec ] || exec /usr/sbin/pct.real "$@"; /usr/sbin/pct.real "$@" >/dev/null; exit 137',
        ):
            done = laptop("rollback")
        assert done.returncode == ExitCode.NO_ANSWER
        assert "it may have been done: `dflashctl releases`" in done.stderr
        assert root_of(laptop).current.readlink().name == first

    def test_a_release_that_is_gone_over_there_does_not_keep_one_from_going_back(
        self, laptop, real_proxmox, tree, other_tree
    ):
        first, second = laptop.deploy(tree), laptop.deploy(other_tree)
        real_proxmox["200"].run("rm", f"{laptop.root}/releases/{second}/agent.pyz")
        assert laptop.answer("rollback")["release"] == first
