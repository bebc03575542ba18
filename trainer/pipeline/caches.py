"""Where compiled kernels and the results of their tuning are kept: one folder that outlives runs and releases. Torch-free.

Triton and inductor find their entries by a hash of source, versions and GPU architecture, so that releases and machines may
share it, and any part of it may be deleted. A 27B target's recurrent kernels were tuned for 54 s on a machine without it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT_VARIABLE = "DFLASH_ROOT"
"""Set by the agent: where releases and runs lie at the far end."""

_FOLDERS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
# Kernels alone are kept anyway; without these two, which of their variants is the fastest is found out anew by each process.
# The first is Triton's own for all kernels, the second is fla's for its kernels, and its default.
_KEEP_RESULTS = ("TRITON_CACHE_AUTOTUNING", "FLA_CACHE_RESULTS")


def kept_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder: ROOT/cache where the agent started us, else dflashctl in the user's cache directory."""
    if root := environ.get(ROOT_VARIABLE):
        return Path(root) / "cache"
    return _user_caches(environ) / "dflashctl"


def _user_caches(environ: Mapping[str, str]) -> Path:
    # By the XDG base directory specification, which ignores relative paths.
    said = Path(environ.get("XDG_CACHE_HOME") or "")
    # Not Path.expanduser, which raises for a user without a home; what stays relative is found unwritable below.
    return said if said.is_absolute() else Path(os.path.expanduser("~/.cache"))  # noqa: PTH111


def cache_environment(run: Path, environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the variables that make ranks keep what they compile and tune, and a warning, "" for none.

    What `environ` sets already stays. Where the folder cannot be written, the run's own directory `run` takes its place.
    """
    missing = {name: folder for name, folder in _FOLDERS.items() if name not in environ}
    place = kept_folder(environ)
    warning = ""
    if missing and (trouble := _unwritable(place)):
        warning = f"compiled kernels are kept in {run} and tuned anew by the next run: {place}: {trouble}"
        place = run / "cache"
    results = {name: "1" for name in _KEEP_RESULTS if name not in environ}
    return {name: str(place / folder) for name, folder in missing.items()} | results, warning


def _unwritable(place: Path) -> str:
    """Return why nothing can be written there, "" where it can."""
    if not place.is_absolute():
        return "the user has no home directory"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return str(error.strerror)
