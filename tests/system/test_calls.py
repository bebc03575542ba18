"""How often the far end is asked: each call of pct takes 0.5 to 1 s on a real host. Its own log of calls is the witness."""

from __future__ import annotations

from pathlib import Path

import pytest
from system.faults.laptop import Laptop, make_tree
from testbed.proxmox import Proxmox

WAYS = [("200", "root"), ("201", "ops")]


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("calls") / "tree", "--pause", "0.05")


@pytest.fixture(params=WAYS, ids="-".join)
def laptop(request: pytest.FixtureRequest, proxmox: Proxmox, tmp_path: Path) -> Laptop:
    ct, user = request.param
    return Laptop(proxmox, tmp_path / "laptop", ct=ct, user=user)


def asked(laptop: Laptop, *words: str, code: int = 0) -> list[str]:
    """Run a command line; return the verb of each call of pct that it made, or what else was asked of pct."""
    before = len(laptop.bed.calls())
    logins = laptop.bed.sshd.log().count("Accepted publickey")
    done = laptop(*words)
    assert done.returncode == code, done.stderr
    # However many calls: one connection, one login.
    assert laptop.bed.sshd.log().count("Accepted publickey") - logins == 1
    return [call[-1] if call[0] == "exec" else call[0] for call in laptop.bed.calls()[before:]]


def test_each_verb_asks_once(laptop, tree):
    deploy = ("deploy", "--source", str(tree))
    assert asked(laptop, *deploy) == ["deploy"]
    assert asked(laptop, *deploy) == ["deploy"]
    assert asked(laptop, "status") == ["status"]
    assert asked(laptop, "start") == ["start"]
    assert asked(laptop, "status") == ["status"]
    assert asked(laptop, "status", "--json") == ["status"]
    assert asked(laptop, *deploy) == ["deploy"]
    assert asked(laptop, "logs") == ["logs"]
    assert asked(laptop, "runs") == ["runs"]
    assert asked(laptop, "releases") == ["releases"]
    assert asked(laptop, "stop") == ["stop"]
    assert asked(laptop, "stop") == ["stop"]
    # Stalls stand in no log: how the run ended is asked for once more.
    assert asked(laptop, "logs", "--follow") == ["logs", "status"]
    # What the old run was started with has to be known before the new one is judged.
    assert asked(laptop, "restart") == ["spec", "restart"]
    assert asked(laptop, "stop", "--now") == ["stop"]


@pytest.mark.parametrize("laptop", WAYS[1:], indirect=True, ids="-".join)
def test_only_what_is_missing_over_there_costs_a_second_call(laptop, tree):
    release = laptop.deploy(tree)
    container = laptop.bed[laptop.ct]
    container.run("/bin/sh", "-c", f"chmod -R u+w {laptop.root} && rm -r {laptop.root}/releases/{release}")
    # The agent that was deployed is asked first, then one travels along.
    assert asked(laptop, "status") == ["status", "status"]
    assert asked(laptop, "deploy", "--source", str(tree)) == ["deploy", "deploy"]
    assert asked(laptop, "status") == ["status"]


@pytest.mark.parametrize("laptop", WAYS[1:], indirect=True, ids="-".join)
def test_why_there_is_no_answer_is_asked_only_then(laptop, tree):
    laptop.deploy(tree)
    laptop.bed[laptop.ct].stop()
    assert asked(laptop, "status", code=8) == ["status", "config"]
