from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from system.faults.laptop import Laptop, make_tree
from testbed.proxmox import Proxmox


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree whose trainer trains slowly and for long."""
    return make_tree(tmp_path_factory.mktemp("source") / "tree", "--pause", "0.02")


@pytest.fixture
def laptop(proxmox: Proxmox, tmp_path: Path) -> Iterator[Laptop]:
    """Somebody's laptop, with container 200 in mind; nothing is deployed."""
    made = Laptop(proxmox, tmp_path / "laptop")
    yield made
    made.close()


@pytest.fixture(scope="session")
def other_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree after an edit."""
    return make_tree(tmp_path_factory.mktemp("source") / "edited", "--pause", "0.03")
