"""How much memory there is for us: /proc/meminfo, and the cgroup's bound and use, which a container is held to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from remote.agent.finding import OK, WARNING, Finding, gib

CGROUPS = Path("/sys/fs/cgroup")
MEMORY_INFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")

_NO_LIMIT = 1 << 60
"""cgroup v1 has no word for "unlimited": it shows the largest multiple of a page in 63 bits."""


@dataclass(frozen=True)
class CgroupMemory:
    """Bytes: the tightest bound over us (0: none), and what counts against it but for cache that can be dropped."""

    limit: int = 0
    used: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes of memory as this process may use it. `limit` is 0 where no cgroup bounds it."""

    total: int
    available: int
    limit: int
    used: int

    @property
    def free(self) -> int:
        """What a new process may take before the kernel kills for memory."""
        return min(self.available, max(self.limit - self.used, 0)) if self.limit else self.available


def memory(information: Path = MEMORY_INFO, cgroups: Path = CGROUPS, own: Path = _OWN_CGROUPS) -> Memory:
    """Read all of it; what is not there, or makes no sense, counts as 0."""
    values = parse_information(_text(information))
    cgroup = cgroup_memory(cgroups, _text(own))
    return Memory(values.get("MemTotal", 0), values.get("MemAvailable", 0), cgroup.limit, cgroup.used)


def parse_information(text: str) -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; a line of another form is skipped."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and _is_number(words[0]):
            values[key.strip()] = int(words[0]) * 1024
    return values


def cgroup_memory(cgroups: Path, own: str) -> CgroupMemory:
    """Return the bound with the least room over this process; `own` is the text of /proc/self/cgroup.

    Version 2 keeps memory.max and memory.current, version 1 memory/memory.limit_in_bytes and usage_in_bytes.
    """
    found = [bound for folder in _folders(cgroups, own) if (bound := _bound(folder)).limit]
    return min(found, key=lambda bound: bound.limit - bound.used, default=CgroupMemory())


def _folders(cgroups: Path, own: str) -> Iterator[Path]:
    """Yield our cgroup's folder and those above it, in either version's tree."""
    for line in own.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in ("", "memory"):
            continue
        base = cgroups / controllers if controllers else cgroups
        # In a container the path may be the host's, which does not exist there: the folders above it do.
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for length in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:length])


def _bound(folder: Path) -> CgroupMemory:
    limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
    if not 0 < limit < _NO_LIMIT:
        return CgroupMemory()
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
    # Pages of files count as used although the kernel drops them first; those of /dev/shm are on the anonymous lists.
    kept = {
        key: value for key, _, value in (line.partition(" ") for line in _text(folder / "memory.stat").splitlines())
    }
    dropped = sum(_integer(kept.get(f"total_{key}") or kept.get(key, "")) for key in ("inactive_file", "active_file"))
    return CgroupMemory(limit, max(used - dropped, 0))


def _number(path: Path) -> int:
    return _integer(_text(path).strip())


def _integer(text: str) -> int:
    return int(text) if _is_number(text) else 0


def _is_number(text: str) -> bool:
    # isdigit() alone lets in digits of other scripts, and int() refuses a text of more than 4,300.
    return text.isascii() and text.isdigit() and len(text) < 25


def _text(path: Path) -> str:
    try:
        # Bounded: whatever stands in its place, these files have a few KiB.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return file.read(1 << 16).decode("ascii", errors="replace")
    except (OSError, ValueError):  # not there in this version, or not ours to read
        return ""


def memory_finding(ring: int) -> Finding:
    """Return the line about memory; `ring` is how many bytes of shared memory a run may fill."""
    now = memory()
    if not now.total:
        return Finding("memory", WARNING, "/proc/meminfo does not say how much there is", "mount /proc there")
    # lxcfs shows a container its own total; elsewhere /proc/meminfo is the host's, and only the cgroup knows.
    bounded = 0 < now.limit < now.total
    whole = f"{gib(now.limit)} (cgroup limit)" if bounded else f"{gib(now.total)}, no tighter cgroup limit"
    text = f"{gib(now.free)} free of {whole}"
    if ring > now.free:
        # Pages of /dev/shm count as the container's memory: beyond its limit comes the OOM killer, not ENOSPC.
        return Finding(
            "memory", WARNING, f"{text}; the ring may grow to {gib(ring)}", "lower ring_mib, or raise the limit"
        )
    return Finding("memory", OK, text)
