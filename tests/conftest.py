from __future__ import annotations

from collections.abc import Iterator

import pytest
from testbed.proxmox import Proxmox, missing_machine


@pytest.fixture(scope="session")
def proxmox_host() -> Iterator[Proxmox]:
    """The testbed, brought up once; tests take `proxmox`."""
    if reason := missing_machine():
        pytest.skip(reason)
    made = Proxmox()
    yield made
    made.close()


@pytest.fixture
def proxmox(proxmox_host: Proxmox) -> Iterator[Proxmox]:
    """A Proxmox host on loopback with real containers, as new after each test."""
    yield proxmox_host
    proxmox_host.reset()
