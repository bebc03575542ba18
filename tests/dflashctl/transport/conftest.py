from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from testbed.sshd import Sshd, missing_sshd

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


@pytest.fixture(scope="session")
def shared_sshd() -> Iterator[Sshd]:
    """One sshd for the tests that leave it as it is."""
    if missing_sshd():
        pytest.skip(missing_sshd())
    with Sshd() as made:
        yield made


@pytest.fixture
def sshd() -> Iterator[Sshd]:
    """An sshd to freeze, stop and change."""
    if missing_sshd():
        pytest.skip(missing_sshd())
    with Sshd() as made:
        yield made


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    made = Operator(tmp_path)
    yield made
    for ssh in made.opened:
        ssh.close()


@pytest.fixture
def ssh(operator: Operator, shared_sshd: Sshd) -> Ssh:
    """A way to the shared sshd by an operator who knows it."""
    operator.configure(shared_sshd)
    operator.knows(shared_sshd)
    return operator.ssh(shared_sshd)
