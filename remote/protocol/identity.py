"""Which process: (boot id, pid, start ticks). A pid alone names another process after reuse or a container restart."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from remote.protocol.files import write_durably

_PROC = Path("/proc")


def boot_id() -> str:
    """Return the kernel's boot id; in an LXC container it is new at each container start."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@dataclass(frozen=True)
class ProcessStat:
    """What /proc/PID/stat says that we use."""

    state: str
    parent: int
    start_ticks: int


def read_stat(pid: int) -> ProcessStat | None:
    """Return the state of process `pid`, or None when there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name in parentheses may itself hold parentheses and spaces: only what follows the LAST one is safe.
    fields = text[text.rindex(")") + 1 :].split()
    return ProcessStat(state=fields[0], parent=int(fields[1]), start_ticks=int(fields[19]))


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that no other can be confused with. `start_ticks` is compared for equality only (lxcfs shifts ages)."""

    boot_id: str
    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int | None = None) -> ProcessIdentity:
        """Return the identity of process `pid` (default: this one). Raises ProcessLookupError when there is none."""
        pid = os.getpid() if pid is None else pid
        stat = read_stat(pid)
        if stat is None:
            raise ProcessLookupError(pid)
        return cls(boot_id(), pid, stat.start_ticks)

    def is_alive(self) -> bool:
        """Whether this very process lives. A zombie is dead."""
        # A restarted container counts ticks from its host's boot, so equal pid and ticks still need the boot id.
        stat = read_stat(self.pid)
        return (
            stat is not None
            and stat.start_ticks == self.start_ticks
            and stat.state not in ("Z", "X")
            and boot_id() == self.boot_id
        )

    def send(self, number: int) -> bool:
        """Send a signal to this very process through a pidfd; False when it no longer lives.

        The identity is checked after the pidfd is open: from then on the pid cannot be reused under us.
        """
        try:
            # kill() would hit whoever has the pid at that moment.
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def write_pidfile(path: Path, identity: ProcessIdentity) -> None:
    """Write the bare pid in the first line, as every tool expects, and boot id and start ticks below it."""
    write_durably(path, f"{identity.pid}\n{identity.boot_id}\n{identity.start_ticks}\n".encode("ascii"))


def read_pidfile(path: Path) -> ProcessIdentity | None:
    """Return the identity in a pidfile; None when the file is missing or is not one of ours."""
    try:
        pid, boot, ticks = path.read_text(encoding="ascii", errors="replace").splitlines()[:3]
        return ProcessIdentity(boot, int(pid), int(ticks))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
