"""Receiving a release: one tar over stdin, every file verified, then renamed into place as a whole."""

from __future__ import annotations

import compileall
import contextlib
import errno
import hashlib
import os
import shutil
import tarfile
import zlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import IO, cast

from remote.protocol.errors import DflashError, preflight_error
from remote.protocol.files import fsync_directory
from remote.protocol.frames import FrameError
from remote.protocol.layout import RootLayout
from remote.protocol.locks import LockKind, acquire, is_held
from remote.protocol.manifest import MANIFEST_NAME, manifest_text

_TEMPORARY = ".tmp-"
_CHUNK = 1 << 20


class _Stream:
    """The data frames as a file, as tarfile wants one."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (chunk := next(self._chunks, None)) is not None:
            self._rest += chunk
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def drain(self) -> None:
        for _ in self._chunks:
            pass


def damaged(directory: Path, manifest: Mapping[str, str]) -> list[str]:
    """Return the files of a release that are missing or are not what the manifest says."""
    return [path for path, digest in manifest.items() if _sha256(directory / path) != digest]


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def receive(root: RootLayout, release: str, manifest: Mapping[str, str], chunks: Iterator[bytes]) -> None:
    """Unpack and verify a release, then rename it into place. Whatever fails, nothing of it stays.

    Raises DflashError: a refused or incomplete upload (1), no space or no permission (7).
    """
    with _temporary(root, release) as temporary:
        try:
            _unpack(temporary, manifest, chunks)
            (temporary / MANIFEST_NAME).write_text(manifest_text(manifest), encoding="utf-8")
            _compile(temporary, root.release(release))
            _seal(temporary)
            _put_in_place(root, release, temporary)
        except (FrameError, tarfile.TarError, EOFError, zlib.error) as error:
            raise _refused(f"the upload is not complete: {error}") from error
        except OSError as error:
            space = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise preflight_error(
                f"no space left in {root.path}" if space else f"cannot write in {root.path}",
                cause=error.strerror or str(error),
                hint="free some space, or choose another place with --root DIR",
            ) from error


def _refused(cause: str) -> DflashError:
    return DflashError("the release was refused", cause=cause, hint="deploy again; `current` is unchanged")


@contextlib.contextmanager
def _temporary(root: RootLayout, release: str) -> Generator[Path]:
    """Yield a directory that is removed unless it was renamed away; a dead deploy's is removed by the next one.

    Its lock is taken before it exists, so a directory without a held lock is a dead one's.
    """
    # Before we write: what a dead deploy left may be the space that we lack.
    _remove_dead(root)
    name = f"{_TEMPORARY}{release}-{os.getpid()}"
    lock = root.start_lock.with_name(name)
    descriptor = acquire(lock, LockKind.EXCLUSIVE)
    path = root.releases / name
    try:
        path.mkdir(mode=0o755)
        yield path
    finally:
        _remove(path)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _remove_dead(root: RootLayout) -> None:
    for path in root.releases.glob(f"{_TEMPORARY}*"):
        lock = root.start_lock.with_name(path.name)
        if not is_held(lock):
            _remove(path)
            lock.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Remove a tree, also one that is sealed already (a directory without write permission keeps its files)."""
    if path.is_dir():
        for folder, _, _ in os.walk(path):
            Path(folder).chmod(0o755)
        shutil.rmtree(path, ignore_errors=True)


def _unpack(directory: Path, manifest: Mapping[str, str], chunks: Iterator[bytes]) -> None:
    stream = _Stream(chunks)
    unpacked: set[str] = set()
    with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|*") as archive:
        for member in archive:
            # Directories come of the files' paths; their modes and owners are ours to choose.
            if member.isdir():
                continue
            # The manifest's paths are checked: a member that equals one of them cannot leave the directory.
            if not member.isreg() or member.name not in manifest or member.name in unpacked:
                raise _refused(f"unexpected member {member.name!r}")
            content = archive.extractfile(member)
            assert content is not None, "isreg() holds, so there is content"
            _write(directory / member.name, content, manifest[member.name])
            unpacked.add(member.name)
    # tar pads to 10 KiB, and the `end` frame comes after: a client cut off there did not send it all.
    stream.drain()
    missing = sorted(set(manifest) - unpacked)
    if missing:
        raise _refused(f"{len(missing)} files did not arrive: {', '.join(missing[:3])}")


def _write(path: Path, content: IO[bytes], expected: str) -> None:
    digest = hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    # x: never through a link or over a file that is already there.
    with path.open("xb") as file:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != expected:
        raise _refused(f"{path.name} arrived damaged: its sha256 is {digest.hexdigest()[:12]}, not {expected[:12]}")


def _compile(directory: Path, place: Path) -> None:
    """Put compiled files beside the agent's sources, for this version of Python.

    Without them each call compiles anew what it imports: status takes 89 ms of CPU, 65 with them. They are no part of the
    release: one that cannot be written, or fits another Python, is not missed.
    """
    compileall.compile_dir(directory / "remote", ddir=place / "remote", quiet=2)


def _seal(directory: Path) -> None:
    """Make everything read-only and readable by all, whatever the umask: a run may belong to another user."""
    for folder, _, names in os.walk(directory):
        for name in names:
            Path(folder, name).chmod(0o444)
        fsync_directory(Path(folder))
        Path(folder).chmod(0o555)


def _put_in_place(root: RootLayout, release: str, temporary: Path) -> None:
    place = root.release(release)
    try:
        temporary.rename(place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _replace(place, temporary)
    fsync_directory(root.releases)


def _replace(place: Path, temporary: Path) -> None:
    """Another deploy was faster, or the old copy is damaged: this verified one takes its place either way."""
    # rename() does not replace a directory that has content. A run that uses the old one keeps its open files.
    aside = temporary.with_name(temporary.name + "-old")
    place.rename(aside)
    temporary.rename(place)
    _remove(aside)
