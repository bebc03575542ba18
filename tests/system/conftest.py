"""An operator at a laptop who reaches a container of a Proxmox host through ssh and pct: nothing in between is played."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from testbed.containers import Container
from testbed.proxmox import Proxmox

from tests.dflashctl.conftest import Cli, cli, make_tree, standin_tree

__all__ = ["Operator", "cli", "make_tree", "operate", "standin_tree"]

WAYS = [("200", "root"), ("201", "root"), ("200", "ops"), ("201", "ops")]
"""Privileged and unprivileged, as root and as the user who may only `sudo -n /usr/sbin/pct`."""


@dataclass
class Operator:
    """Types commands in a directory of its own; `dflashctl.toml` and the ssh configuration say the rest."""

    cli: Cli
    proxmox: Proxmox
    container: Container
    user: str
    _followers: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def _variables(self) -> dict[str, str]:
        return {"DFLASHCTL_SSH_CONFIG": str(self.proxmox.ssh_config(self.user))}

    def __call__(self, line: str, *, timeout: float = 90.0, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a command line of words without quotes, e.g. `stop --now`, in a process of its own."""
        process = self.begin(line, **extra)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(line, process.returncode, out, err)

    def ok(self, line: str, *, timeout: float = 90.0, **extra: str) -> subprocess.CompletedProcess[str]:
        done = self(line, timeout=timeout, **extra)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done

    def json(self, line: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ok(f"{line} --json").stdout)
        return answer

    def begin(self, line: str, **extra: str) -> subprocess.Popen[str]:
        """Start a command line and leave it running."""
        process = subprocess.Popen(
            # The installed command: `python -m` would take the trainer of a project it is typed in for dflashctl's own.
            [Path(sys.executable).with_name("dflashctl"), *line.split()],
            cwd=self.cli.directory,
            env=self.cli.environment(**self._variables, **extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._followers.append(process)
        return process

    def close(self) -> None:
        for process in self._followers:
            process.kill()
            process.communicate()


@pytest.fixture
def operate(cli: Cli, proxmox: Proxmox) -> Iterator[Callable[..., Operator]]:
    """Return a function that makes an operator of container `ct` who works in `tree`."""
    made: list[Operator] = []

    def make(ct: str, user: str, tree: Path) -> Operator:
        cli.directory = tree
        made.append(Operator(cli, proxmox, proxmox[ct], user))
        return made[-1]

    yield make
    for operator in made:
        operator.close()
