from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from dflashctl.cli import run
from remote.agent.processes import carriers, recorded
from remote.protocol.identity import read_pidfile
from remote.protocol.layout import RunLayout

sys.path.insert(0, str(Path(__file__).parent))
REPOSITORY = Path(__file__).resolve().parents[2]

STANDIN_MAIN = """\
import sys
from pathlib import Path

verb = sys.argv[1]
here = Path(__file__).parent
if verb == "selfcheck":
    print((here / "selfcheck.json").read_text())
    sys.exit(0 if (here / "selfcheck.json").read_text() == "{}" else 7)
if verb == "preflight":
    print((here / "preflight.json").read_text())
    sys.exit(0 if (here / "preflight.json").read_text() == "{}" else 7)
sys.argv = ["standin", *(here / "switches.txt").read_text().split()]
from trainer.standin import main

sys.exit(main())
"""


@dataclass
class Cli:
    """`dflashctl` as a user runs it: its own home, a directory of its own."""

    home: Path
    directory: Path
    root: Path

    def environment(self, **extra: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DFLASHCTL_")}
        # What a terminal, or a test runner, may have set.
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            kept.pop(name, None)
        return kept | {"DFLASHCTL_HOME": str(self.home), "PYTHONPATH": str(REPOSITORY)} | extra

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "dflashctl", *arguments]

    def process(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a command line in a process of its own."""
        return subprocess.run(
            self.command(*arguments),
            cwd=self.directory,
            env=self.environment(**extra),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def __call__(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a command line in this process: the same, without 0.3 s of imports (typer's pydantic) each time."""
        streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", write_through=True) for _ in "oe"]
        environment = self.environment(**extra)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
            stack.enter_context(contextlib.chdir(self.directory))
            stack.enter_context(contextlib.redirect_stdout(streams[0]))
            stack.enter_context(contextlib.redirect_stderr(streams[1]))
            code = run(arguments)
        out, err = (stream.buffer.getvalue().decode("utf-8") for stream in streams)
        return subprocess.CompletedProcess(arguments, code, out, err)

    def run_layout(self) -> RunLayout:
        """The newest run."""
        return RunLayout(max((self.root / "runs").iterdir()))

    def close(self) -> None:
        """End what a test left, by identity."""
        for path in (self.root / "runs").glob("*"):
            run = RunLayout(path)
            supervisor = read_pidfile(run.supervisor_pid)
            for identity in (*([supervisor] if supervisor else []), *recorded(run).values(), *carriers(run.run_id)):
                identity.send(signal.SIGKILL)


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    directory = tmp_path / "work"
    directory.mkdir()
    made = Cli(tmp_path / "home", directory, tmp_path / "root")
    yield made
    made.close()


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a small source tree: real remote/, a trainer/ of the given files, templates/."""

    def make(name: str = "tree", *, trainer: dict[str, str] | None = None) -> Path:
        tree = tmp_path / name
        shutil.copytree(REPOSITORY / "remote", tree / "remote", ignore=shutil.ignore_patterns("__pycache__"))
        (tree / "templates").mkdir()
        (tree / "templates" / "demo.toml").write_text('device = "cpu"\nmax_steps = 5\n')
        (tree / "trainer").mkdir()
        for file, text in (trainer or {"__init__.py": "", "__main__.py": "print('trainer')\n"}).items():
            (tree / "trainer" / file).write_text(text)
        return tree

    return make


@pytest.fixture
def standin_tree(make_tree: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that makes a source tree whose trainer is the stand-in of tests/remote with these switches."""

    def make(*switches: str, name: str = "tree", selfcheck: str = "{}", preflight: str = "{}") -> Path:
        standin = REPOSITORY / "tests" / "remote" / "standin.py"
        files = {"__init__.py": "", "__main__.py": STANDIN_MAIN, "standin.py": standin.read_text()}
        files |= {"switches.txt": " ".join(switches), "selfcheck.json": selfcheck, "preflight.json": preflight}
        return make_tree(name, trainer=files)

    return make
