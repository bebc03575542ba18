"""A laptop: `dflashctl` with a home and an ssh configuration of its own, and stand-in trees to ship from it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from testbed.proxmox import HOST, Proxmox

from dflashctl.cli import run

REPOSITORY = Path(__file__).resolve().parents[3]
ROOT = "/workspace/dflashctl"
Done = subprocess.CompletedProcess[str]

# The stand-in for the trainer of tests/remote behind the trainer's own command line.
_TRAINER = """\
import sys
from pathlib import Path

if sys.argv[1] in ("selfcheck", "preflight"):
    print("{}")
    sys.exit(0)
sys.argv = ["standin", *(Path(__file__).parent / "switches.txt").read_text().split()]
from trainer.standin import main

sys.exit(main())
"""


def make_tree(place: Path, *switches: str, weights: bytes = b"") -> Path:
    """Make a source tree at `place`: remote/ as it is, a stand-in trainer with these switches, `weights` to ship."""
    shutil.copytree(REPOSITORY / "remote", place / "remote", ignore=shutil.ignore_patterns("__pycache__"))
    (place / "templates").mkdir()
    for preset in ("demo", "qwen3.6-27b-8gpu"):
        (place / "templates" / f"{preset}.toml").write_text('device = "cpu"\n')
    trainer = place / "trainer"
    trainer.mkdir()
    (trainer / "__init__.py").touch()
    (trainer / "__main__.py").write_text(_TRAINER)
    (trainer / "standin.py").write_text((REPOSITORY / "tests" / "remote" / "standin.py").read_text())
    (trainer / "switches.txt").write_text(" ".join(switches))
    if weights:
        (trainer / "weights.bin").write_bytes(weights)
    return place


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until something holds; fail when it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come about"
        time.sleep(0.02)


@contextlib.contextmanager
def other_pct(bed: Proxmox, script: str) -> Iterator[None]:
    """Put a shell script in the place of pct; the real one stays beside it as pct.real."""
    # By rename: the file is busy while somebody runs it.
    place = "mv /usr/sbin/pct /usr/sbin/pct.real && cat > /usr/sbin/pct && chmod 755 /usr/sbin/pct"
    bed.machine.run("sh", "-c", place, input=f"#!/bin/sh\n{script}\n", stdin=None)
    try:
        yield
    finally:
        bed.machine.run("mv", "/usr/sbin/pct.real", "/usr/sbin/pct")


@dataclass
class Laptop:
    """`way` are the options that name the destination; they are left out where a test gives its own."""

    bed: Proxmox
    folder: Path
    ct: str = "200"
    user: str = "root"
    root: str = ROOT
    ssh_config: Path | None = None
    python: str = "/usr/bin/python3"
    environment: dict[str, str] = field(default_factory=dict)
    _begun: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "work").mkdir(parents=True)
        if self.root == ROOT:
            self.root = f"{self.bed[self.ct].workspace}/dflashctl" if self.ct in self.bed.containers else ROOT

    @property
    def way(self) -> list[str]:
        config = self.ssh_config or self.bed.ssh_config(self.user)
        python = self.python if self.bed.real else self.bed["200"].python
        where = ["--ssh-config", str(config), "--root", self.root, "--python", python]
        return ["--host", HOST, *(["--ct", self.ct] if self.ct else []), *where]

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DFLASHCTL_")}
        kept.pop("NO_COLOR", None)
        return kept | {"DFLASHCTL_HOME": str(self.folder / "home"), "PYTHONPATH": str(REPOSITORY)} | self.environment

    def __call__(self, *words: str) -> Done:
        """Run a command line in this process: the same, without 0.3 s of imports."""
        streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", write_through=True) for _ in "oe"]
        arguments = self.arguments(*words)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, self._environment(), clear=True))
            stack.enter_context(contextlib.chdir(self.folder / "work"))
            stack.enter_context(contextlib.redirect_stdout(streams[0]))
            stack.enter_context(contextlib.redirect_stderr(streams[1]))
            code = run(arguments)
        out, err = (stream.buffer.getvalue().decode("utf-8") for stream in streams)
        return Done(arguments, code, out, err)

    def arguments(self, *words: str) -> list[str]:
        # Behind the verb, which may have two words.
        count = 2 if words[0] == "hosts" else 1
        return [*words[:count], *self.way, *words[count:]]

    def begin(self, *words: str, **settings: Any) -> subprocess.Popen[str]:
        """Begin a command line in a process of its own."""
        process = subprocess.Popen(
            [sys.executable, "-m", "dflashctl", *self.arguments(*words)],
            cwd=self.folder / "work",
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **settings,
        )
        self._begun.append(process)
        return process

    def close(self) -> None:
        """End what a failed test has left."""
        for process in self._begun:
            process.kill()
            process.communicate()

    def deploy(self, tree: Path, *more: str) -> str:
        """Ship a tree and return its release."""
        return self.answer("deploy", "--source", str(tree), *more)["release"]

    def start(self, *more: str) -> str:
        """Start a run and return its id."""
        return self.answer("start", *more)["run_id"]

    def answer(self, *words: str) -> dict[str, Any]:
        """Run a verb that must succeed and return what --json printed."""
        done = self(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def state(self) -> str:
        return self.answer("status")["state"]
