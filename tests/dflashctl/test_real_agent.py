"""The client against the real agent on this machine: counted calls, retries, bad uploads, cut connections."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dflashctl.agent_client import AgentClient, StartRequest
from dflashctl.errors import ConnectionLost, NoAnswer
from dflashctl.follow import Follower, LogRequest, Notice
from dflashctl.release import Release, build_release
from dflashctl.results import LogEnd
from dflashctl.transport import Transport
from dflashctl.transport.local import Local
from remote.protocol.errors import DflashError
from remote.protocol.layout import new_run_id
from remote.protocol.records import RunSpec


def quiet(event):
    """Nobody listens."""


class Far:
    """A destination with a root of its own, as a session sees it after `deploy`."""

    def __init__(self, root: Path, tree: Path) -> None:
        self.root = root
        self.release = build_release(tree)

    def client(self, transport: Transport | None = None, **options) -> AgentClient:
        return AgentClient(
            transport or Local(),
            python=sys.executable,
            root=str(self.root),
            release=self.release.id,
            pyz=lambda: self.release.pyz,
            **options,
        )

    def deploy(self) -> AgentClient:
        self.client().deploy(self.release, selfcheck=False, on_event=quiet)
        return self.client()

    def request(self, limit: float = 20.0) -> StartRequest:
        spec = RunSpec(new_run_id(), (), {}, ("cpu",), release=self.release.id, config={}, stop_grace=5.0)
        return StartRequest(spec, limit)

    @property
    def run_ids(self) -> list[str]:
        return sorted(path.name for path in (self.root / "runs").iterdir())


@pytest.fixture
def far(cli, standin_tree):
    """Return a function that makes a destination whose trainer is the stand-in; `cli` ends its runs."""
    return lambda *switches: Far(cli.root, standin_tree(*switches))


class Cut:
    """A hop over a wire that breaks after so many bytes, each time it is opened, until it has broken `times` times."""

    name = "a bad wire"

    def __init__(self, after: int, times: int, via: Transport) -> None:
        self._after, self._via, self.left = after, via, times

    def open(self, argv):
        channel = self._via.open(argv)
        if self.left > 0:
            self.left -= 1
            channel.receive = self._breaking(channel.receive)
        return channel

    def _breaking(self, receive):
        passed = 0

        def broken(timeout):
            nonlocal passed
            data = receive(timeout)
            kept = data[: max(self._after - passed, 0)]
            passed += len(data)
            return kept

        return broken

    def explain(self, said, *, silent=False):
        return self._via.explain(said, silent=silent)

    def close(self):
        self._via.close()


def test_each_short_verb_is_one_remote_call(far):
    far = far()
    client = far.deploy()
    assert client.status().state == "none"
    assert client.calls == 1
    assert not client.deploy(far.release, selfcheck=False, on_event=quiet).sent
    assert client.calls == 2
    run = client.start(far.request(), quiet)
    assert client.calls == 3
    assert client.stop(run.run_id, now=False, grace=5.0, by="me", on_event=quiet).status.state == "stopped"
    assert client.calls == 4
    resumed = client.spec("last")
    assert client.calls == 5
    assert (resumed.spec.run_id, resumed.name) == (run.run_id, f"{run.run_id}@{resumed.step}")
    assert resumed.checkpoint == client.status().last_checkpoint
    assert [entry.run_id for entry in client.runs(5)] == [run.run_id]
    assert client.releases().current == far.release.id


def test_an_unchanged_deploy_sends_the_request_and_nothing_else(far):
    far = far()
    sent = []

    class Counting(Local):
        def open(self, argv):
            channel = super().open(argv)
            send = channel.send
            channel.send = lambda data, timeout: (sent.append(len(data)), send(data, timeout))
            return channel

    far.client(Counting()).deploy(far.release, selfcheck=False, on_event=quiet)
    first, total = len(sent), sum(sent)
    assert total > len(far.release.archive())
    sent.clear()
    far.client(Counting()).deploy(far.release, selfcheck=False, on_event=quiet)
    assert (len(sent) < first, sum(sent) < 20_000) == (True, True)


def test_a_client_killed_in_mid_start_asks_again_and_finds_its_run(far):
    far = far("--load", "0.5")
    client, request = far.deploy(), far.request()
    with pytest.raises(ConnectionLost):
        far.client(Cut(500, 1, Local())).start(request, quiet)
    run = client.start(request, quiet)
    assert run.run_id == request.spec.run_id
    assert far.run_ids == [run.run_id]
    assert client.start(request, quiet).run_id == run.run_id


def damaged(release: Release, archive: bytes) -> Release:
    """Return a release that promises one content and ships another."""
    broken = Release(release.files)
    broken.__dict__["archive"] = lambda: archive
    return broken


@pytest.mark.parametrize("damage", ["truncated", "another file's bytes", "no tar at all"])
def test_a_bad_upload_is_refused_and_nothing_of_it_stays(far, damage):
    far = far()
    client = far.deploy()
    files = dict(far.release.files) | {"trainer/new.py": b"x = 1\n"}
    good = Release(files)
    archives = {
        "truncated": good.archive()[:-2000],
        "another file's bytes": Release(files | {"trainer/new.py": b"x = 2\n"}).archive(),
        "no tar at all": b"\x00" * 100,
    }
    with pytest.raises(DflashError) as caught:
        client.deploy(damaged(good, archives[damage]), selfcheck=False, on_event=quiet)
    assert caught.value.error == "the release was refused"
    assert [entry.release for entry in client.releases().releases] == [far.release.id]
    assert [path.name for path in (far.root / "releases").glob("[!.]*")] == [far.release.id]
    assert list((far.root / "releases").glob(".tmp*")) == []
    assert client.deploy(good, selfcheck=False, on_event=quiet).previous == far.release.id


@pytest.mark.parametrize("after", [400, 2_000, 9_000])
def test_a_followed_log_comes_whole_over_a_wire_that_breaks(far, after):
    far = far("--steps", "120", "--pause", "0.002")
    client = far.deploy()
    run = client.start(far.request(), quiet)
    wire = Cut(after, 4, Local())
    follower = Follower(far.client(wire), LogRequest(run.run_id, follow=True), sleep=lambda pause: None)
    items = list(follower)
    seen = b"".join(item for item in items if isinstance(item, bytes))
    assert seen == (far.root / "runs" / run.run_id / "train.log").read_bytes()
    assert isinstance(items[-1], LogEnd)
    assert items[-1].state == "finished"
    assert wire.left < 4
    assert any(isinstance(item, Notice) for item in items)


def test_a_far_end_that_hangs_is_given_up(far, tmp_path):
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\necho Last login: yesterday\nexec sleep 60\n")
    hanging.chmod(0o755)
    client = AgentClient(Local(), python=str(hanging), pyz=lambda: b"", silence=2.0)
    with pytest.raises(NoAnswer) as caught:
        client.status()
    assert "Last login: yesterday" in caught.value.cause


def test_a_noisy_login_shell_is_no_trouble(far, tmp_path):
    far = far()
    noisy = tmp_path / "python"
    noisy.write_text(f'#!/bin/sh\necho "$$ motd 0123456789abcdef hello 5"\nexec {sys.executable} "$@"\n')
    noisy.chmod(0o755)
    client = AgentClient(Local(), python=str(noisy), root=str(far.root), pyz=lambda: far.release.pyz)
    assert client.status().state == "none"


def test_an_old_python_is_named_in_the_cause(far, tmp_path):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 'SyntaxError: invalid syntax (python 2.7)' >&2\nexit 1\n")
    old.chmod(0o755)
    with pytest.raises(NoAnswer) as caught:
        AgentClient(Local(), python=str(old), pyz=lambda: b"").status()
    assert "python 2.7" in caught.value.cause
    assert "3.11" in caught.value.hint
