"""The content address of a release: which files it holds, by sha256."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

_SHA256 = re.compile(r"[0-9a-f]{64}")

MANIFEST_NAME = "MANIFEST"
"""The manifest's own file in a release; it is not listed in itself."""


def check_path(path: str) -> str:
    """Return `path` when it names a file inside a release.

    Raises ValueError for what could leave it or would make two lines of one: absolute, `..`, not normalised, control
    characters, the manifest itself.
    """
    pure = PurePosixPath(path)
    # A path that is not normalised gives one file two lines, and so one tree two ids.
    inside = path != "" and not pure.is_absolute() and ".." not in pure.parts and str(pure) == path and path != "."
    if not inside or not path.isprintable() or path == MANIFEST_NAME:
        raise ValueError(f"not a path inside a release: {path!r}")
    return path


def manifest_text(manifest: Mapping[str, str]) -> str:
    """Return the canonical text: one `sha256  path` a line, sorted by path (as sha256sum prints and checks).

    Raises ValueError for a bad path or digest.
    """
    for path, digest in manifest.items():
        check_path(path)
        if _SHA256.fullmatch(digest) is None:
            raise ValueError(f"not a sha256 for {path!r}: {digest!r}")
    return "".join(f"{manifest[path]}  {path}\n" for path in sorted(manifest))


def release_id(manifest: Mapping[str, str]) -> str:
    """Return the id of a release: the first 12 hex digits of the sha256 of its canonical manifest."""
    return hashlib.sha256(manifest_text(manifest).encode("utf-8")).hexdigest()[:12]
