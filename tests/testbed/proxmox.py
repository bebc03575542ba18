"""A Proxmox host that one logs in to: sshd, users, pct and containers 200 to 203 and 299."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testbed.containers import SPECS, Container, make_container
from testbed.machine import OTHER_USER, SUDO_USER, Machine, missing_machine, new_state, remove_state
from testbed.sshd import Sshd

HOST = "10.1.2.6"
"""The address that the README types; the configuration below leads it to loopback."""

_SSH_CONFIGURATION = """\
Host {host}
    HostName {address}
    Port {port}
    User {user}
    IdentityFile {key}
    IdentitiesOnly yes
    UserKnownHostsFile {known_hosts}
    GlobalKnownHostsFile none
    ControlPath none
"""


class Proxmox:
    """Up from construction to close()."""

    real = True
    users: tuple[str, ...] = ("root", SUDO_USER)
    """Those who can reach a container."""

    def __init__(self) -> None:
        self.state = new_state()
        self.set_knobs()
        self._calls = self.state / "calls.jsonl"
        self._forget_calls()
        for folder in ("containers", "touched"):
            (self.state / folder).mkdir()
        for ct, spec in SPECS.items():
            self._configure(ct, lock=spec.lock)
        self.machine: Machine | None = None
        self.enter: tuple[str, ...] = ()
        try:
            self.sshd, self.containers = self._set_up()
            self.sshd.start()
            self.known_hosts = self.state / "known_hosts"
            self.trust()
        except BaseException:
            self.close()
            raise

    def _set_up(self) -> tuple[Sshd, dict[str, Container]]:
        """Return the sshd, not yet started, and the containers of this node."""
        for ct, spec in SPECS.items():
            # Where each node's configurations lie for all nodes to see: /etc/pve/nodes.
            node = self.state / "pve" / "nodes" / spec.node / "lxc"
            node.mkdir(parents=True, exist_ok=True)
            (node / f"{ct}.conf").touch()
            if spec.node == "pve":
                make_container(self.state, ct, spec)
        self.machine = Machine(self.state, Path(sys.prefix))
        self.enter = enter = self.machine.enter
        made = {ct: Container(self.state, enter, ct, spec) for ct, spec in SPECS.items() if spec.node == "pve"}
        for container in made.values():
            if container.spec.started:
                container.start()
        sshd = Sshd(users=("root", SUDO_USER, OTHER_USER), enter=enter, folder=self.state / "sshd")
        return sshd, made

    def __getitem__(self, ct: str) -> Container:
        return self.containers[ct]

    def trust(self) -> None:
        """Make the host key of now the known one."""
        self.known_hosts.write_text(self.sshd.known_hosts_line())

    def ssh_config(self, user: str = "root", *, extra: str = "") -> Path:
        """Write an ssh client configuration with which HOST means this testbed; `extra` are lines of the host's block."""
        path = self.state / f"ssh_config_{user}"
        block = _SSH_CONFIGURATION.format(
            host=HOST,
            address=self.sshd.address,
            port=self.sshd.port,
            user=user,
            key=self.sshd.client_key,
            known_hosts=self.known_hosts,
        )
        # The first value wins.
        first, _, rest = block.partition("\n")
        path.write_text("\n".join([first, *(f"    {line}" for line in extra.splitlines()), rest]))
        return path

    def pct(self, *argv: str, user: str = "root", **settings: Any) -> subprocess.CompletedProcess[Any]:
        """Run pct as somebody who is logged in on the host; `settings` are those of subprocess.run."""
        return run_quietly([*self.enter, "/usr/sbin/runuser", "-u", user, "--", "/usr/sbin/pct", *argv], settings)

    def ssh(self, command: str, user: str = "root", **settings: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command line on the host through the system's ssh."""
        return run_quietly(["ssh", "-F", str(self.ssh_config(user)), "-o", "BatchMode=yes", HOST, command], settings)

    def set_knobs(self, **knobs: Any) -> None:
        """Set how pct behaves from its next call on; none: as a good one. See Pct in pct.py for their names:

        delay and push_seconds, lock_timeout (s); push: "short" or an error's text; prefix ("Error: ") and failure_code.
        """
        new = self.state / "knobs.new"
        new.write_text(json.dumps(knobs))
        new.replace(self.state / "knobs.json")

    @contextmanager
    def knobs(self, **knobs: Any) -> Iterator[None]:
        self.set_knobs(**knobs)
        try:
            yield
        finally:
            self.set_knobs()

    def lock(self, ct: str, reason: str) -> None:
        """Lock a container, e.g. for a "backup"; "" unlocks it."""
        self._configure(ct, lock=reason)

    def _configure(self, ct: str, **changes: object) -> None:
        path = self.state / "containers" / f"{ct}.json"
        path.write_text(json.dumps({**SPECS[ct].config(ct), **changes}))

    def calls(self) -> list[list[str]]:
        """Return the argv of every call of pct since the last reset, the testbed's own apart."""
        return [json.loads(line)["argv"] for line in self._calls.read_text().splitlines()]

    def _forget_calls(self) -> None:
        self._calls.write_text("")
        # Who may not use pct is counted as well.
        self._calls.chmod(0o666)

    def reset(self) -> None:
        """Bring back the state of before a test. Containers in which it did nothing are left alone."""
        self.sshd.thaw()
        # Unlocked before they are stopped.
        for ct, spec in SPECS.items():
            self._configure(ct, lock=spec.lock)
        for ct, container in self.containers.items():
            if (self.state / "touched" / ct).exists():
                container.clean()
                (self.state / "touched" / ct).unlink()
        self.set_knobs()
        self._forget_calls()
        self.trust()

    def close(self) -> None:
        """End everything and remove every file."""
        sshd = getattr(self, "sshd", None)
        if sshd is not None:
            sshd.close()
        if self.machine is not None:
            self.machine.close()
        remove_state(self.state)


def run_quietly(command: list[str], settings: dict[str, Any]) -> subprocess.CompletedProcess[Any]:
    defaults: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 30, "cwd": "/"}
    if "input" not in settings:
        defaults["stdin"] = subprocess.DEVNULL
    return subprocess.run(command, check=False, **{**defaults, **settings})


__all__ = ["HOST", "Proxmox", "missing_machine"]
