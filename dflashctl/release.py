"""A release: remote/, trainer/ and templates/ with an agent.pyz, named by the hash of its content.

The same tree gives the same bytes and the same id on every machine: files are sorted, time stamps fixed, nothing is
compressed inside agent.pyz (zlib's output differs between its versions).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dflashctl.source import FOLDERS
from remote.protocol.errors import usage_error
from remote.protocol.manifest import release_id

# The check before the import: an older Python fails in there, and a traceback tells nobody what to do.
# In a release the same sources lie beside the zip, and compiled files with them, which a zip cannot have.
_ENTRY = b"""\
import sys

if sys.version_info < (3, 11):
    sys.exit("agent: Python 3.11 or newer is needed, this is %d.%d.%d" % sys.version_info[:3])
sys.dont_write_bytecode = True
sys.path.insert(0, sys.path[0].removesuffix("agent.pyz"))
from remote.agent.main import main

raise SystemExit(main(sys.argv[1:]))
"""
# The earliest time a zip file can carry.
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Release:
    """All files of a release, by POSIX path relative to its directory."""

    files: Mapping[str, bytes]

    @cached_property
    def manifest(self) -> dict[str, str]:
        """sha256 (hex) of every file by its path."""
        return {path: hashlib.sha256(content).hexdigest() for path, content in self.files.items()}

    @cached_property
    def id(self) -> str:
        """The first 12 hex digits of the manifest's sha256."""
        return release_id(self.manifest)

    @property
    def pyz(self) -> bytes:
        """The agent as a zipapp."""
        return self.files["agent.pyz"]

    def archive(self) -> bytes:
        """Return one gzipped tar of all files, modes and times fixed."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path, content in sorted(self.files.items()):
                member = tarfile.TarInfo(path)
                member.size = len(content)
                # Read-only from the start: a release is never edited where it lies, it is replaced.
                member.mode = 0o444
                tar.addfile(member, io.BytesIO(content))
        # Measured on 1.40 MB of tar: level 6 gives 0.776 MB in 0.05 s, level 9 0.775 MB in 0.09 s, level 1 0.824 MB.
        return gzip.compress(buffer.getvalue(), compresslevel=6, mtime=0)


def build_pyz(directory: Path) -> bytes:
    """Return the agent of the source tree at `directory` as a zipapp. Raises a usage error as `build_release` does."""
    return _pyz(_folder(directory, "remote"))


def build_release(directory: Path) -> Release:
    """Read the source tree at `directory`. Raises a usage error when a file of it cannot be read."""
    files: dict[str, bytes] = {}
    for folder in FOLDERS:
        files.update(_folder(directory, folder))
    files["agent.pyz"] = _pyz(files)
    return Release(dict(sorted(files.items())))


def _pyz(files: Mapping[str, bytes]) -> bytes:
    # Sources only: compiled files would fit one version of Python. The far end makes them for its own.
    members = {path: files[path] for path in sorted(files) if path.startswith("remote/") and path.endswith(".py")}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, content in {"__main__.py": _ENTRY, **members}.items():
            member = zipfile.ZipInfo(path, _ZIP_TIME)
            # Unix mode bits and system, or the zip would differ between an operator's Linux and his Windows.
            member.external_attr = 0o444 << 16
            member.create_system = 3
            archive.writestr(member, content)
    return buffer.getvalue()


def _folder(directory: Path, folder: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for path in _walk(directory / folder):
        try:
            files[path.relative_to(directory).as_posix()] = path.read_bytes()
        except OSError as error:
            raise usage_error(
                f"cannot read {path}", cause=error.strerror or str(error), hint="a release needs every file of its tree"
            ) from error
    return files


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files that belong to a release: nothing hidden, no bytecode, no editor's back-up."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__" or path.name.endswith((".pyc", "~")):
            continue
        # Sockets, FIFOs and dangling links are left out: reading a FIFO would wait for ever.
        if path.is_dir():
            yield from _walk(path)
        elif path.is_file():
            yield path
