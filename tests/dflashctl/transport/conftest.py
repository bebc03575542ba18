from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sshoperator import Operator
from testbed.sshd import Sshd, missing_sshd

from dflashctl.transport.ssh import Ssh


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
