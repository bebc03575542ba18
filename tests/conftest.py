from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from testbed.proxmox import Proxmox, missing_machine
from testbed.shim import ShimProxmox
from testbed.sshd import missing_sshd

# A shell without job control starts its background jobs with Ctrl-C ignored, and whatever tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def proxmox_host() -> Iterator[Proxmox]:
    """The testbed, brought up once; tests take `proxmox`."""
    if reason := missing_sshd():
        pytest.skip(reason)
    made = ShimProxmox() if missing_machine() else Proxmox()
    yield made
    made.close()


@pytest.fixture
def proxmox(proxmox_host: Proxmox) -> Iterator[Proxmox]:
    """A Proxmox host on loopback, as new after each test: real containers, without root or LXC a shim of them."""
    yield proxmox_host
    proxmox_host.reset()


@pytest.fixture
def real_proxmox(proxmox: Proxmox) -> Proxmox:
    """The same for what takes real containers: restarts, /dev/shm, user namespaces, freezing."""
    if not proxmox.real:
        pytest.skip(missing_machine())
    return proxmox
