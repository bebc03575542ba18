"""`logs --follow` through ssh and pct: whatever happens to the wire, the sshd or the container, each byte comes once."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from system.faults.laptop import Laptop, make_tree
from testbed.proxmox import HOST, Proxmox

from dflashctl.agent_client import AgentClient
from dflashctl.follow import Follower, LogRequest, Notice
from dflashctl.results import LogEnd, Position
from dflashctl.transport.pct import Pct
from dflashctl.transport.ssh import Ssh

LAST = b"the last line\n"
# Each example goes on with the log that the one before left.
anywhere = settings(
    max_examples=8,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Scissors:
    """A relay on loopback: its n-th connection is cut once `cuts[n]` bytes of the server went through, the rest never."""

    def __init__(self, target: int) -> None:
        self.cuts: list[int] = []
        self.done = 0
        self._target = target
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._begin(self._accept)

    def _begin(self, work: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._ends += [client, server]
                limit = self.cuts.pop(0) if self.cuts else None
                self._begin(self._pass_on, client, server, None)
                self._begin(self._pass_on, server, client, limit)

    def _pass_on(self, source: socket.socket, sink: socket.socket, left: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14 if left is None else min(left, 1 << 14)):
                sink.sendall(data)
                if left is not None and not (left := left - len(data)):
                    self.done += 1
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for end in self._ends:
            end.close()


@dataclass
class Following:
    """A run that lives and writes nothing more by itself, its log, and a way to it through `scissors`."""

    laptop: Laptop
    run: str
    log: Path
    scissors: Scissors
    release: str
    notices: list[str] = field(default_factory=list)
    received: bytearray = field(default_factory=bytearray)
    written: bytes = b""

    @contextlib.contextmanager
    def follower(self, kind: type[Follower] = Follower, *, silence: float = 10.0) -> Iterator[Follower]:
        """Yield a follower of the whole log with a client of its own; `silence` in seconds."""
        known_as = f"[127.0.0.1]:{self.laptop.bed.sshd.port}"
        config = self.laptop.bed.ssh_config(extra=f"Port {self.scissors.port}\nHostKeyAlias {known_as}")
        transport = Pct(self.laptop.ct, Ssh(HOST, config_file=str(config)))
        python = "/usr/bin/python3" if self.laptop.bed.real else self.laptop.bed["200"].python
        client = AgentClient(
            transport, python=python, root=self.laptop.root, release=self.release, pyz=bytes, silence=silence
        )
        try:
            yield kind(client, LogRequest(self.run, follow=True), sleep=lambda seconds: time.sleep(0.02))
        finally:
            transport.close()

    def while_(self, work: Callable[[Writer], object], kind: type[Follower] = Follower, **more: float) -> bytes:
        """Follow while `work` writes to an empty log; return what came up to the last line.

        `notices` are then what was said on the way, `written` all that `work` wrote.
        """
        self.notices.clear()
        self.log.write_bytes(b"")
        with contextlib.closing(Writer(self.log)) as writer, self.follower(kind, **more) as follower:
            thread = threading.Thread(target=writer.write_all, args=[work])
            self.received = received = bytearray()
            # Before its first byte, a client that fails gives up at once.
            writer.lines(1)
            for item in follower:
                if isinstance(item, Notice):
                    self.notices.append(item.text)
                    continue
                assert not isinstance(item, LogEnd), item
                if not received:
                    thread.start()
                received += item
                if received.endswith(LAST):
                    break
            thread.join()
            self.written = writer.written
            return bytes(received)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Writer:
    """Writes numbered lines as a trainer does, O_APPEND; `written` are all of them."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.written = b""
        self._number = 0
        self.open()

    def open(self) -> None:
        self._file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def rotate(self) -> None:
        """Rename the log away and go on in a new one."""
        self.close()
        self.log.rename(self.log.with_name(f"{self.log.name}.{self._number}"))
        self.open()

    def write(self, data: bytes) -> None:
        os.write(self._file, data)
        self.written += data

    def write_all(self, work: Callable[[Writer], object]) -> None:
        work(self)
        self.write(LAST)

    def lines(self, count: int, pause: float = 0.0) -> None:
        for _ in range(count):
            self._number += 1
            self.write(b"line %06d %s\n" % (self._number, b"x" * (self._number * 7 % 90)))
            time.sleep(pause)

    def close(self) -> None:
        os.close(self._file)


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trainer that takes one step and then stands still."""
    return make_tree(tmp_path_factory.mktemp("follow") / "tree", "--pause", "0.02", "--hang-after", "1")


@pytest.fixture
def following(proxmox: Proxmox, tmp_path: Path, tree: Path) -> Iterator[Following]:
    laptop = Laptop(proxmox, tmp_path / "laptop")
    release = laptop.deploy(tree)
    run = laptop.start()
    log = proxmox["200"].path(f"{laptop.root}/runs/{run}/train.log")
    made = Following(laptop, run, log, Scissors(proxmox.sshd.port), release)
    yield made
    made.scissors.close()
    laptop("stop", "--now")


@anywhere
@given(
    first=st.integers(4500, 20000),
    cuts=st.lists(st.integers(1, 12000), min_size=1, max_size=4),
    burst=st.integers(1, 200),
)
def test_the_wire_is_cut_at_any_byte(following, first, cuts, burst):
    following.scissors.cuts, following.scissors.done = [first, *cuts], 0

    def work(writer: Writer) -> None:
        for _ in range(500 // burst + 1):
            writer.lines(burst)
            time.sleep(0.005)
        # A cut behind the last byte would be none.
        while following.scissors.cuts:
            writer.lines(10, 0.002)

    received = following.while_(work)
    assert received == following.log.read_bytes()
    assert following.scissors.done >= 1
    assert any("reconnecting" in notice for notice in following.notices)


@pytest.mark.parametrize("error", [-1, 1, None])
def test_a_follower_that_comes_back_at_another_byte_is_caught(following, error):
    """The negative of the above: one byte too early, too late, or from the beginning."""

    class Forgetful(Follower):
        def _one_connection(self):
            position = self._position
            if position is not None:
                self._position = position.after(error) if error else Position(position.device, position.inode, 0)
            return super()._one_connection()

    following.scissors.cuts = [6000, 6000]
    received = following.while_(lambda writer: writer.lines(500), Forgetful)
    assert following.notices
    assert received != following.log.read_bytes()


def test_the_sshd_of_the_session_is_killed_again_and_again(following):
    def work(writer: Writer) -> None:
        for _ in range(5):
            writer.lines(100)
            following.laptop.bed.sshd.kill_sessions()
            writer.lines(100)
            wait_for(lambda: following.received == writer.written)

    assert following.while_(work) == following.log.read_bytes()
    assert sum("reconnecting" in notice for notice in following.notices) >= 5


@pytest.mark.parametrize(("seconds", "lost"), [(1.0, False), (6.0, True)])
def test_the_container_is_frozen_and_thawed(following, real_proxmox, seconds, lost):
    """For less than the silence that a client bears, and for longer: then it asks why, and comes back."""
    container = real_proxmox["200"]

    def work(writer: Writer) -> None:
        writer.lines(100)
        container.freeze()
        try:
            writer.lines(100)
            time.sleep(seconds)
        finally:
            container.thaw()
        writer.lines(100, 0.01)

    assert following.while_(work, silence=3.0) == following.log.read_bytes()
    assert any("frozen" in notice for notice in following.notices) == lost


def test_the_sshd_is_frozen_and_thawed(following):
    sshd = following.laptop.bed.sshd

    def work(writer: Writer) -> None:
        writer.lines(100)
        sshd.freeze()
        try:
            writer.lines(100)
            time.sleep(4.0)
        finally:
            sshd.thaw()
        writer.lines(100, 0.01)

    assert following.while_(work, silence=3.0) == following.log.read_bytes()
    assert any("reconnecting" in notice for notice in following.notices)


def test_the_log_is_rotated_truncated_and_deleted(following):
    """Each is said, and following goes on with what the name means from then on."""

    def work(writer: Writer) -> None:
        writer.lines(100)
        writer.rotate()
        writer.lines(50)
        # What is not read when a log is truncated is gone for everybody.
        wait_for(lambda: following.received == writer.written)
        os.truncate(writer.log, 0)
        wait_for(lambda: "truncated" in following.notices)
        writer.lines(50)
        wait_for(lambda: following.received == writer.written)
        writer.log.unlink()
        wait_for(lambda: len(following.notices) == 3)
        writer.lines(50)

    assert following.while_(work) == following.written
    assert following.notices == ["rotated", "truncated", "deleted: what is still written to it is shown"]


@settings(anywhere, max_examples=5)
@given(first=st.integers(4500, 9000), cuts=st.lists(st.integers(1, 9000), min_size=1, max_size=2))
def test_the_log_is_rotated_while_the_wire_is_cut(following, first, cuts):
    following.scissors.cuts = [first, *cuts]

    def work(writer: Writer) -> None:
        writer.lines(150)
        writer.rotate()
        writer.lines(100)
        while following.scissors.cuts:
            writer.lines(10, 0.002)

    assert following.while_(work) == following.written
    assert "rotated" in following.notices


def test_the_command_itself_with_a_killed_sshd(following):
    """What a person sees: the log and how the run ended on stdout, what happened on the way on stderr."""
    following.log.write_bytes(b"")
    command = following.laptop.begin("logs", "--follow", "--tail", "1000000")
    with contextlib.closing(Writer(following.log)) as writer:
        writer.lines(1)
        assert command.stdout is not None
        shown = command.stdout.readline()
        for _ in range(3):
            writer.lines(200)
            following.laptop.bed.sshd.kill_sessions()
            writer.lines(200)
            time.sleep(1.0)
    assert following.laptop("stop", "--now").returncode == 0
    rest, said = command.communicate(timeout=30)
    *lines, end = (shown + rest).splitlines(keepends=True)
    assert "".join(lines).encode() == following.log.read_bytes()
    assert re.fullmatch(rf"run {following.run} stopped at step 1\n", end)
    assert command.returncode == 0
    assert "reconnecting" in said
