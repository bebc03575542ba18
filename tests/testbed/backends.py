"""What the testbed's pct drives: LXC, or without root and LXC a directory a container. Stands alone, like pct.py."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn, Protocol

MARK = "DFLASH_TESTBED_CONTAINER"


class Backend(Protocol):
    rootless: bool

    def running(self, ct: str) -> bool: ...

    def start(self, ct: str) -> int: ...

    def stop(self, ct: str) -> int:
        """End everything in the container at once."""
        ...

    def shutdown(self, ct: str, timeout: float) -> int:
        """Ask its init to end; returns non-zero when it did not within `timeout` seconds."""
        ...

    def path(self, ct: str, name: str) -> str:
        """Return how a command that runs inside calls the file `name`."""
        ...

    def command(self, ct: str, argv: list[str]) -> tuple[list[str], dict[str, Any]]:
        """Return the command that runs `argv` inside, and Popen's settings for it."""
        ...

    def execute(self, ct: str, argv: list[str], environment: dict[str, str]) -> NoReturn:
        """Become `argv` inside the container."""
        ...


def make_backend(state: Path) -> Backend:
    return Lxc(state / "lxc") if (state / "lxc").is_dir() else Directories(state)


class Lxc:
    """Real containers."""

    rootless = False

    def __init__(self, lxcpath: Path) -> None:
        self._path = str(lxcpath)

    def _run(self, program: str, ct: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        # Without --: the options of lxc's tools may follow the name.
        command = [program, "-P", self._path, "-n", ct, *arguments]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)

    def running(self, ct: str) -> bool:
        # A frozen container is a running one for pct.
        return self._run("lxc-info", ct, "-sH").stdout.strip() in ("RUNNING", "FROZEN", "FREEZING", "THAWED")

    def start(self, ct: str) -> int:
        return self._run("lxc-start", ct, "-d").returncode

    def stop(self, ct: str) -> int:
        return self._run("lxc-stop", ct, "-k").returncode

    def shutdown(self, ct: str, timeout: float) -> int:
        return self._run("lxc-stop", ct, "--nokill", "-t", str(int(timeout))).returncode

    def path(self, ct: str, name: str) -> str:
        return name

    def command(self, ct: str, argv: list[str]) -> tuple[list[str], dict[str, Any]]:
        return ["lxc-attach", "-P", self._path, "-n", ct, "--", *argv], {}

    def execute(self, ct: str, argv: list[str], environment: dict[str, str]) -> NoReturn:
        command, _ = self.command(ct, argv)
        os.execvpe(command[0], command, environment)


class Directories:
    """No isolation: a container is a directory that its commands start in, and a mark in their environment."""

    rootless = True

    def __init__(self, state: Path) -> None:
        self._state = state

    def root(self, ct: str) -> Path:
        return self._state / "roots" / ct

    def _flag(self, ct: str) -> Path:
        return self._state / "running" / ct

    def running(self, ct: str) -> bool:
        return self._flag(ct).exists()

    def start(self, ct: str) -> int:
        self._flag(ct).touch()
        return 0

    def stop(self, ct: str) -> int:
        self._flag(ct).unlink()
        while self._signal(ct, signal.SIGKILL):
            time.sleep(0.01)
        return 0

    def shutdown(self, ct: str, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self._signal(ct, signal.SIGTERM):
            if time.monotonic() > deadline:
                return 1
            time.sleep(0.05)
        self._flag(ct).unlink()
        return 0

    def _signal(self, ct: str, number: int) -> int:
        """Signal everybody who carries the container's mark; returns how many there were."""
        mark = f"{MARK}={self.root(ct)}".encode()
        count = 0
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), number)
                    count += 1
            except OSError:  # gone, or somebody else's
                continue
        return count

    def path(self, ct: str, name: str) -> str:
        return str(self.root(ct) / name.lstrip("/"))

    def command(self, ct: str, argv: list[str]) -> tuple[list[str], dict[str, Any]]:
        return argv, {"cwd": self.root(ct)}

    def execute(self, ct: str, argv: list[str], environment: dict[str, str]) -> NoReturn:
        root = self.root(ct)
        os.chdir(root)
        environment = {**environment, "HOME": str(root), MARK: str(root)}
        program = shutil.which(argv[0], path=environment["PATH"]) or argv[0]
        try:
            os.execve(program, argv, environment)
        except OSError as error:
            place = f"lxc-attach: {ct}: ../src/lxc/attach.c: lxc_attach_run_command: 1841"
            print(f'{place} {error.strerror} - Failed to exec "{argv[0]}"', file=sys.stderr)
            sys.exit(127 if error.errno == errno.ENOENT else 126)
