"""The testbed without root and LXC: the same sshd and the same pct, whose containers are directories.

Argv rules, texts, exit codes and locks are those of pct.py. What takes a kernel is missing: another boot id and other
pids after a restart, a /dev/shm of its own, paths from another root, frozen containers.
"""

from __future__ import annotations

import getpass
import subprocess
import sys
from pathlib import Path
from typing import Any

from testbed.containers import SPECS, Container, Spec
from testbed.proxmox import Proxmox, run_quietly
from testbed.sshd import Sshd

# bash finds functions by names with slashes, too: so /usr/sbin/pct is there for whoever logs in and for nobody else.
_LOGIN = """\
#!/bin/bash
function /usr/sbin/pct {{ {pct} "$@"; }}
function sudo {{
    if [ "$1 $2" != "-n /usr/sbin/pct" ]; then echo "sudo: a password is required" >&2; return 1; fi
    shift
    "$@"
}}
eval "$SSH_ORIGINAL_COMMAND"
"""


class Directory(Container):
    """A container that is a directory: its files are the host's, below `workspace`."""

    def __init__(self, state: Path, pct: tuple[str, ...], ct: str, spec: Spec) -> None:
        super().__init__(state, (), ct, spec)
        self.rootfs = state / "roots" / ct
        (self.rootfs / "workspace").mkdir(parents=True)
        self.python = sys.executable
        self.workspace = str(self.rootfs / "workspace")
        self._pct = pct

    def path(self, inside: str) -> Path:
        return Path(inside) if inside.startswith(str(self.rootfs)) else super().path(inside)

    def own(self, path: Path) -> None:
        """Whoever runs the tests is root there."""

    def freeze(self) -> None:
        raise NotImplementedError("freezing a container takes LXC")

    thaw = freeze

    def bind(self, source: Path, inside: str) -> None:
        link = self.path(inside)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(source)
        self._bound.append(link)
        self._touch()

    def _unbind(self) -> None:
        while self._bound:
            self._bound.pop().unlink()


class ShimProxmox(Proxmox):
    """A Proxmox host for whoever may run an sshd of their own; everybody who logs in is the current user."""

    real = False

    def _set_up(self) -> tuple[Sshd, dict[str, Container]]:
        (self.state / "running").mkdir()
        self._program = (sys.executable, "-IS", str(self.state / "pct.py"), str(self.state))
        made: dict[str, Container] = {}
        for ct, spec in SPECS.items():
            if spec.node == "pve":
                made[ct] = Directory(self.state, self._program, ct, spec)
                if spec.started:
                    made[ct].start()
        login = self.state / "login"
        login.write_text(_LOGIN.format(pct=" ".join(self._program)))
        login.chmod(0o755)
        return Sshd(extra=f"ForceCommand {login}", folder=self.state / "sshd"), made

    def ssh_config(self, user: str = "root", *, extra: str = "") -> Path:
        return super().ssh_config(getpass.getuser(), extra=extra)

    def pct(self, *argv: str, user: str = "root", **settings: Any) -> subprocess.CompletedProcess[Any]:
        return run_quietly([*self._program, *argv], settings)

    def close(self) -> None:
        for container in getattr(self, "containers", {}).values():
            if container.running:
                container.stop()
        super().close()
