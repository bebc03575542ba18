"""Somebody who has ssh: a configuration, known hosts and a key of his own, apart from the machine's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from testbed.sshd import Sshd

from dflashctl.transport.ssh import Ssh


@dataclass
class Operator:
    """Somebody with an ssh configuration of his own: a file, known hosts, and the key that every sshd here accepts."""

    folder: Path
    opened: list[Ssh] = field(default_factory=list)

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def config(self) -> Path:
        return self.folder / "ssh_config"

    def configure(self, sshd: Sshd, *before: str) -> None:
        """Write the configuration; what stands in `before` wins, as ssh takes the first value of a key."""
        lines = [
            *before,
            "Host *",
            f"  UserKnownHostsFile {self.known_hosts}",
            "  GlobalKnownHostsFile none",
            f"  IdentityFile {sshd.client_key}",
            "  IdentitiesOnly yes",
            "  IdentityAgent none",
            "  ConnectTimeout 2",
        ]
        self.config.write_text("\n".join(lines) + "\n")

    def knows(self, *sshds: Sshd) -> None:
        self.known_hosts.write_text("".join(sshd.known_hosts_line() for sshd in sshds))

    def ssh(self, sshd: Sshd | str) -> Ssh:
        destination = sshd if isinstance(sshd, str) else f"127.0.0.1:{sshd.port}"
        self.opened.append(Ssh(destination, config_file=str(self.config)))
        return self.opened[-1]
