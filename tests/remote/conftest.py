"""A far end on this machine: a real agent.pyz, real releases, real runs of the stand-in trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remote.agent.processes import carriers, recorded
from remote.protocol.frames import MAX_DATA, Frame, FrameParser, Kind, json_frame, new_nonce
from remote.protocol.identity import read_pidfile
from remote.protocol.layout import RootLayout, RunLayout, is_run_id, new_run_id
from remote.protocol.manifest import release_id

REPOSITORY = Path(__file__).parents[2]
STANDIN = Path(__file__).with_name("standin.py")
MAIN = b"from remote.agent.main import main\n\nraise SystemExit(main())\n"


@dataclasses.dataclass
class Reply:
    """One answer of the agent, taken apart."""

    frames: list[Frame]
    returncode: int | None
    stderr: str

    def _of(self, kind: Kind) -> list[dict[str, Any]]:
        return [frame.json() for frame in self.frames if frame.kind is kind]

    @property
    def hello(self) -> dict[str, Any]:
        return self._of(Kind.HELLO)[0]

    @property
    def events(self) -> list[dict[str, Any]]:
        return self._of(Kind.EVENT)

    @property
    def data(self) -> bytes:
        return b"".join(frame.payload for frame in self.frames if frame.kind is Kind.DATA)

    @property
    def result(self) -> dict[str, Any]:
        assert not self._of(Kind.ERROR), (self._of(Kind.ERROR), self.stderr)
        return self._of(Kind.RESULT)[0]

    @property
    def error(self) -> dict[str, Any]:
        assert not self._of(Kind.RESULT), self._of(Kind.RESULT)
        assert self._of(Kind.ERROR), self.stderr
        return self._of(Kind.ERROR)[0]


class Call:
    """A running verb."""

    def __init__(self, command: list[str], before: bytes, request: dict[str, Any], environment: dict[str, str]) -> None:
        self.nonce = new_nonce()
        self.frames: list[Frame] = []
        self._parser = FrameParser(self.nonce)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        assert self.process.stdin is not None
        self.process.stdin.write(before + json_frame(self.nonce, Kind.REQUEST, request).encode())
        self.process.stdin.flush()

    def send(self, payload: bytes, *, end: bool = True) -> None:
        assert self.process.stdin is not None
        try:
            for at in range(0, len(payload), MAX_DATA):
                self.process.stdin.write(Frame(self.nonce, Kind.DATA, payload[at : at + MAX_DATA]).encode())
            if end:
                self.process.stdin.write(Frame(self.nonce, Kind.END).encode())
            self.process.stdin.flush()
        except BrokenPipeError:  # refused before it was read whole: the answer says why
            pass

    def until(self, wanted: Callable[[Frame], bool]) -> Frame:
        """Read frames up to one that is wanted."""
        assert self.process.stdout is not None
        for frame in self.frames:
            if wanted(frame):
                return frame
        while data := os.read(self.process.stdout.fileno(), 1 << 16):
            new = list(self._parser.feed(data))
            self.frames += new
            for frame in new:
                if wanted(frame):
                    return frame
        raise AssertionError(f"the answer ended: {self.frames} {self.process.stderr.read()!r}")

    def reply(self) -> Reply:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdin = None
        stdout, stderr = self.process.communicate(timeout=60)
        self.frames += self._parser.feed(stdout)
        return Reply(self.frames, self.process.returncode, stderr.decode())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def zip_agent() -> bytes:
    """Return agent.pyz as dflashctl builds it: remote/ and a __main__.py."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("__main__.py", MAIN)
        for path in sorted((REPOSITORY / "remote").rglob("*.py")):
            archive.write(path, path.relative_to(REPOSITORY).as_posix())
    return buffer.getvalue()


def release_files(agent: bytes, extra: dict[str, bytes] | None = None) -> dict[str, bytes]:
    """Return what a release holds: the agent, remote/ and whatever else a test wants."""
    files = {"agent.pyz": agent, **(extra or {})}
    for path in sorted((REPOSITORY / "remote" / "protocol").rglob("*.py")):
        files[path.relative_to(REPOSITORY).as_posix()] = path.read_bytes()
    files["remote/__init__.py"] = b""
    return files


def manifest_of(files: dict[str, bytes]) -> dict[str, str]:
    return {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}


def tar_of(files: dict[str, bytes], *more: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in (*files.items(), *more):
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


class FarEnd:
    """One ROOT with the agent to talk to."""

    def __init__(self, root: Path, agent: bytes, pyz: Path) -> None:
        self.root = RootLayout(root)
        self.agent = agent
        self.pyz = pyz
        self.environment: dict[str, str] = {}
        self.prefix: list[str] = []
        self.release = ""

    def begin(self, verb: str, **request: Any) -> Call:
        command = [*self.prefix, sys.executable, "-I", str(self.pyz), verb]
        return Call(command, b"", {"root": str(self.root.path), **request}, self.environment)

    def call(self, verb: str, **request: Any) -> Reply:
        return self.begin(verb, **request).reply()

    def deploy(self, files: dict[str, bytes] | None = None, *, upload: bytes | None = None, **request: Any) -> Reply:
        files = release_files(self.agent) if files is None else files
        manifest = manifest_of(files)
        call = self.begin(
            "deploy", **{"release": release_id(manifest), "manifest": manifest, "selfcheck": False, **request}
        )
        first = call.until(lambda frame: frame.kind in (Kind.EVENT, Kind.ERROR))
        if first.kind is Kind.EVENT and first.json()["need"]:
            call.send(tar_of(files) if upload is None else upload)
        return call.reply()

    def files(self, **extra: str) -> dict[str, bytes]:
        """Return the files of a release; `extra` adds trainer modules by name, e.g. __main__="..."."""
        modules = {f"trainer/{name}.py": text.encode() for name, text in extra.items()}
        return release_files(self.agent, {"trainer/__init__.py": b"", **modules} if extra else {})

    def request(self, *switches: str, run_id: str = "", **request: Any) -> dict[str, Any]:
        """Return a start request for the stand-in, with short waits."""
        spec = {
            "run_id": run_id or new_run_id(),
            "devices": ["cpu"],
            "by": "tester@laptop",
            "stop_grace": 5.0,
            "kill_grace": 0.5,
            **request.pop("spec", {}),
        }
        argv = [sys.executable, "-u", str(STANDIN), *switches]
        return {"spec": spec, "argv": argv, "preflight": False, "limit": 10.0, **request}

    def start(self, *switches: str, run_id: str = "", **request: Any) -> Reply:
        return self.call("start", **self.request(*switches, run_id=run_id, **request))

    def running(self, *switches: str, **request: Any) -> dict[str, Any]:
        """Start a run that has to come to its first step; returns its status."""
        status: dict[str, Any] = self.start(*switches, **request).result["status"]
        return status

    def ok(self, verb: str, **request: Any) -> dict[str, Any]:
        """Call a verb that has to succeed; returns its result."""
        return self.call(verb, **request).result

    @property
    def run(self) -> RunLayout:
        """The newest run."""
        return self.root.run(max(path.name for path in self.root.runs.iterdir() if is_run_id(path.name)))

    def kill_supervisor(self) -> None:
        identity = read_pidfile(self.run.supervisor_pid)
        assert identity is not None
        assert identity.send(signal.SIGKILL)
        wait_for(lambda: not identity.is_alive())

    def close(self) -> None:
        """End what a test left, by identity."""
        for path in self.root.runs.glob("*") if self.root.runs.is_dir() else ():
            run = RunLayout(path)
            supervisor = read_pidfile(run.supervisor_pid)
            for identity in (*([supervisor] if supervisor else []), *recorded(run).values(), *carriers(run.run_id)):
                identity.send(signal.SIGKILL)


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Wait until `condition` holds; fails loudly instead of for ever."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return value


@pytest.fixture(scope="session")
def agent_pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "agent.pyz"
    path.write_bytes(zip_agent())
    return path


@pytest.fixture
def bare(tmp_path: Path, agent_pyz: Path) -> Iterator[FarEnd]:
    """A far end to which nothing was deployed."""
    far = FarEnd(tmp_path / "root", agent_pyz.read_bytes(), agent_pyz)
    yield far
    far.close()


@pytest.fixture(scope="session")
def deployed(tmp_path_factory: pytest.TempPathFactory, agent_pyz: Path) -> FarEnd:
    """A far end that a release was deployed to once; tests get copies, a deploy each would be a third of their time."""
    far = FarEnd(tmp_path_factory.mktemp("deployed") / "root", agent_pyz.read_bytes(), agent_pyz)
    far.release = far.deploy().result["release"]
    return far


@pytest.fixture
def far(bare: FarEnd, deployed: FarEnd) -> FarEnd:
    """A far end with a release."""
    shutil.copytree(deployed.root.path, bare.root.path, symlinks=True)
    bare.release = deployed.release
    return bare


@pytest.fixture(name="wait_for")
def _wait_for() -> Callable[..., Any]:
    return wait_for
