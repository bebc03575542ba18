"""known_hosts as OpenSSH reads it (sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT"): who is known by which key, and how it is learnt.

Own reading, because paramiko forgets markers (@revoked would be a trusted key), negations, file and line.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflashctl.errors import NoAnswer
from dflashctl.home import locked

REVOKED = "@revoked"
AUTHORITY = "@cert-authority"
# As ssh-keygen shows them. RSA's signature algorithms have names of their own, the key in the file has none of these.
_TYPES = {
    "ssh-ed25519": ("ED25519", ("ssh-ed25519",)),
    "ssh-rsa": ("RSA", ("rsa-sha2-512", "rsa-sha2-256")),
    **{f"ecdsa-sha2-nistp{bits}": ("ECDSA", (f"ecdsa-sha2-nistp{bits}",)) for bits in (256, 384, 521)},
}


@dataclass(frozen=True)
class HostKey:
    """A public host key: its type as in known_hosts, and its blob (RFC 4253, 6.6)."""

    kind: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """`SHA256:...` as ssh-keygen prints it."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode("ascii").rstrip("=")

    @property
    def name(self) -> str:
        """The type as ssh-keygen shows it, e.g. ED25519."""
        return _TYPES.get(self.kind, (self.kind, ()))[0]

    def __str__(self) -> str:
        return f"{self.name} {self.fingerprint}"


@dataclass(frozen=True)
class Entry:
    """One line of a known_hosts file; `line` counts from 1."""

    path: Path
    line: int
    marker: str
    names: str
    key: HostKey

    @property
    def place(self) -> str:
        """Where it stands, as people and editors write it."""
        return f"{self.path}:{self.line}"

    def is_for(self, name: str) -> bool:
        """Whether it speaks of `name`, a host name or `[host]:port` in lower case."""
        patterns = self.names.split(",")
        if any(_matches(pattern[1:], name) for pattern in patterns if pattern.startswith("!")):
            return False
        return any(_matches(pattern, name) for pattern in patterns)


@dataclass(frozen=True)
class Trusted:
    """The key is the one that `entry` holds."""

    entry: Entry


@dataclass(frozen=True)
class Unknown:
    """Nothing is known of this machine; `authority` is a certificate authority that speaks for it."""

    authority: Entry | None = None


@dataclass(frozen=True)
class Changed:
    """The machine is known by other keys."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Revoked:
    """The key must not be used; `place` says who forbids it."""

    place: str


Verdict = Trusted | Unknown | Changed | Revoked


def read_known_hosts(paths: Iterable[Path]) -> list[Entry]:
    """Return the entries of those files that exist; lines that make no sense are skipped. Raises NoAnswer."""
    entries: list[Entry] = []
    for path in paths:
        for number, line in enumerate(_lines(path), start=1):
            entry = _parse(path, number, line.decode("utf-8", "surrogateescape"))
            if entry is not None:
                entries.append(entry)
    return entries


def judge(entries: Sequence[Entry], name: str, key: HostKey) -> Verdict:
    """Say what the files make of `key` of the machine called `name`.

    Stricter than OpenSSH in one point: a key of a type that is not known, where others are, counts as changed.
    """
    about = [entry for entry in entries if entry.is_for(name)]
    for entry in about:
        if entry.marker == REVOKED and entry.key == key:
            return Revoked(entry.place)
    plain = [entry for entry in about if not entry.marker]
    # As OpenSSH does: a key that is trusted for the bare host is trusted on its other ports too.
    bare = re.sub(r"^\[(.*)\]:\d+$", r"\1", name)
    for entry in (*plain, *(entry for entry in entries if not entry.marker and entry.is_for(bare))):
        if entry.key == key:
            return Trusted(entry)
    if plain:
        return Changed(tuple(plain))
    return Unknown(next((entry for entry in about if entry.marker == AUTHORITY), None))


def preferred_algorithms(entries: Sequence[Entry], name: str) -> list[str]:
    """Return the algorithms to ask for first: else a machine known by one type is refused for its key of another."""
    bare = re.sub(r"^\[(.*)\]:\d+$", r"\1", name)
    kinds = [entry.key.kind for which in (name, bare) for entry in entries if not entry.marker and entry.is_for(which)]
    return list(dict.fromkeys(algorithm for kind in kinds for algorithm in _TYPES.get(kind, ("", ()))[1]))


def read_revoked_keys(paths: Iterable[Path], key: HostKey) -> Revoked | None:
    """Say whether a RevokedHostKeys file, one public key a line, lists `key`. Raises NoAnswer for one it cannot read."""
    for path in paths:
        lines = _lines(path)
        if not path.is_file() or b"".join(lines).startswith(b"SSHKRL"):
            # OpenSSH too refuses every key then: what the file forbids cannot be known.
            raise NoAnswer(
                f"the revoked host keys in {path} cannot be read",
                cause="it is a binary key revocation list" if path.is_file() else "there is no such file",
                hint="give RevokedHostKeys a file with one public key a line",
            )
        for number, line in enumerate(lines, start=1):
            if base64.b64encode(key.blob) in line.split():
                return Revoked(f"{path}:{number}")
    return None


def learn(path: Path, name: str, key: HostKey, *, hashed: bool, replace: bool) -> None:
    """Add `key` to the file at `path`, made where it is missing (0600 in 0700); with `replace` in place of older keys.

    The other lines keep every byte; the file is renamed into place. Raises NoAnswer when it cannot be written, or when an old
    key stands in a line with wildcards.
    """
    line = f"{_hashed(name) if hashed else name} {key.kind} {base64.b64encode(key.blob).decode('ascii')}\n".encode()
    try:
        # A link into a directory of dotfiles stays one.
        path = path.resolve()
        if path.exists() and not path.is_file():
            # /dev/null is a way to say that nothing is to be kept; root could rename a file into its place.
            raise FileExistsError(0, "it is no regular file")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.dflashctl-lock")):
            lines = _lines(path)
            if replace:
                lines = [
                    kept for number, old in enumerate(lines, start=1) if (kept := _without(path, number, old, name))
                ]
            if lines and not lines[-1].endswith(b"\n"):
                lines[-1] += b"\n"
            _replace(path, b"".join([*lines, line]))
    except OSError as error:
        raise NoAnswer(
            f"the host key cannot be written to {path}",
            cause=error.strerror or str(error),
            hint="make it writable, or name another file with UserKnownHostsFile in the ssh configuration",
        ) from error


def _without(path: Path, number: int, line: bytes, name: str) -> bytes:
    """Return `line` without what it says of `name`; b"" where nothing is left of it."""
    text = line.decode("utf-8", "surrogateescape")
    entry = _parse(path, number, text)
    if entry is None or entry.marker or not entry.is_for(name):
        return line
    patterns = entry.names.split(",")
    left = [pattern for pattern in patterns if pattern.lower() != name and not pattern.startswith("|")]
    if any(_matches(pattern, name) for pattern in left):
        raise NoAnswer(
            f"the old key of {name} cannot be taken out of {entry.place}",
            cause=f"it stands there for {entry.names}, and so for other machines too",
            hint=f"edit {path} by hand",
        )
    if not left:
        return b""
    return text.replace(entry.names, ",".join(left), 1).encode("utf-8", "surrogateescape")


def _lines(path: Path) -> list[bytes]:
    try:
        # Not splitlines: it breaks at a lone CR too, and a line's number would not be the editor's.
        return [line for line in re.split(rb"(?<=\n)", path.read_bytes()) if line]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise NoAnswer(
            f"cannot read the known hosts in {path}",
            cause=error.strerror or str(error),
            hint="make the file readable: without it no host key can be verified",
        ) from error


def _parse(path: Path, number: int, line: str) -> Entry | None:
    words = line.split()
    if not words or words[0].startswith("#"):
        return None
    marker = words.pop(0) if words[0].startswith("@") else ""
    if len(words) < 3 or marker not in ("", REVOKED, AUTHORITY):
        return None
    names, kind, encoded = words[:3]
    try:
        return Entry(path, number, marker, names, HostKey(kind, base64.b64decode(encoded, validate=True)))
    except (binascii.Error, ValueError):
        return None


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("|1|"):
        return _matches_hash(pattern, name)
    # Only * and ? are special to OpenSSH; fnmatch knows [...] besides, and names of ports have brackets.
    return fnmatch.fnmatchcase(name, re.sub(r"\[", "[[]", pattern.lower()))


def _matches_hash(pattern: str, name: str) -> bool:
    try:
        _, _, salt, digest = pattern.split("|")
        return hmac.compare_digest(_digest(base64.b64decode(salt), name), base64.b64decode(digest))
    except ValueError:
        return False


def _digest(salt: bytes, name: str) -> bytes:
    return hmac.digest(salt, name.encode("utf-8", "surrogateescape"), "sha1")


def _hashed(name: str) -> str:
    salt = os.urandom(20)
    return "|1|" + "|".join(base64.b64encode(part).decode("ascii") for part in (salt, _digest(salt, name)))


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes 0600, which is right for a new file; an old one keeps what its owner chose.
        if path.exists():
            Path(temporary).chmod(path.stat().st_mode & 0o777)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
