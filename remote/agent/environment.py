"""The environment of what we launch, built from nothing: a run never depends on the shell that started it."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

RUN_VARIABLE = "DFLASH_RUN_ID"
"""What every process of a run carries in its environment; the last resort of stop sweeps by it."""


def home() -> Path:
    """Return the home of who runs us, as this machine knows it, "/" where it has none.

    Not HOME: `pct exec` hands on that of the user who came by ssh, of another machine, or none at all.
    """
    try:
        known = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:  # a user id without an entry: usual in unprivileged containers
        known = Path("/")
    # `nobody` and ids without an entry: what the caller says is better than nothing, if it is there at all.
    said = Path(os.environ.get("HOME") or "/")
    return said if (known == Path("/") or not known.is_dir()) and said.is_absolute() and said.is_dir() else known


def base_environment(python: str) -> dict[str, str]:
    """Return what any program needs. PATH gets /usr/local/bin, which `pct exec` leaves out."""
    # The interpreter's own folder first: torchrun and ninja of its venv, not of the system.
    folders = [str(Path(python).parent), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    return {
        "PATH": ":".join(dict.fromkeys(folders)),
        "HOME": str(home()),
        # `pct exec` gives the C locale, and Python would then read UTF-8 data sets as ASCII.
        "LANG": "C.UTF-8",
        # A log line must be in the file when its step is done, not 8 KiB later.
        "PYTHONUNBUFFERED": "1",
        # nvidia-smi counts by bus id; without this CUDA counts by speed, and GPU 3 is another one in each.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def trainer_environment(python: str, root: Path, release: Path) -> dict[str, str]:
    """Return the environment of `python -m trainer` from a release."""
    # SAFEPATH: `python -m` would look for the trainer in the working directory first, and may find another one there.
    return base_environment(python) | {
        "PYTHONPATH": str(release),
        "PYTHONSAFEPATH": "1",
        "DFLASH_ROOT": str(root),
    }


def run_environment(python: str, root: Path, release: Path, run: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the complete environment of a run; `extra` (from the spec) comes last."""
    return (
        trainer_environment(python, root, release) | {RUN_VARIABLE: run.name, "DFLASH_RUN_DIR": str(run)} | dict(extra)
    )
