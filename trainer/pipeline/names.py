"""What a run names in places that everybody shares: its ring in /dev/shm and the directory of its sockets. Torch-free.

Both have one name, which tells whose they are, and are recorded in the run's directory before they exist. After warm-up they
live on without a name. A run that was killed before leaves them, up to ring_mib of memory: the next one takes them away.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from remote.protocol.files import write_durably
from remote.protocol.identity import ProcessIdentity, boot_id
from remote.protocol.layout import RunLayout
from trainer.preflight import SHARED_MEMORY

_NAME = re.compile(r"dflash-([0-9a-f]{8})-([0-9]{1,10})-([0-9]{1,20})-[0-9a-f]{8}")

# An AF_UNIX path has at most 107 bytes; "/dflash-ssssssss-4194304-tttttttttttt-rrrrrrrr/pair-99-99.sock" takes 62 of them.
_LONGEST_PLACE = 45
_SHORT_PLACE = Path("/tmp")


def scope() -> str:
    """Return where a pid means a process: this boot, and in it this pid namespace; 8 hex digits.

    Containers may share /tmp and /dev/shm, and hosts a TMPDIR: there a pid of the one is nobody in the other.
    """
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return hashlib.sha256(f"{boot_id()} {namespace}".encode("ascii")).hexdigest()[:8]


def new_name() -> str:
    """Draw a name that belongs to this process."""
    me = ProcessIdentity.of()
    return f"dflash-{scope()}-{me.pid}-{me.start_ticks}-{os.urandom(4).hex()}"


def make_sockets(run: RunLayout) -> Path:
    """Make the directory of a run's sockets, 0700, and return it; the ring is to have its name. Raises OSError."""
    # A user's TMPDIR may be too deep for a socket: names in it would be refused as "AF_UNIX path too long".
    place = Path(tempfile.gettempdir())
    sockets = (place if len(str(place)) <= _LONGEST_PLACE else _SHORT_PLACE) / new_name()
    # First, so that a kill at any moment leaves nothing that nobody can find.
    write_durably(run.sockets, f"{sockets}\n".encode())
    sockets.mkdir(mode=0o700)
    return sockets


def forget(run: RunLayout) -> None:
    """Remove what a run has reserved, as far as it did and still is there."""
    with contextlib.suppress(FileNotFoundError):
        sockets = Path(run.sockets.read_text(encoding="utf-8").strip())
        if _NAME.fullmatch(sockets.name):
            _remove(SHARED_MEMORY / sockets.name)
            _remove(sockets)


def sweep() -> list[Path]:
    """Remove what dead processes of this user reserved and did not forget; returns what was removed."""
    places = {SHARED_MEMORY, Path(tempfile.gettempdir()), _SHORT_PLACE}
    dead = [path for place in sorted(places) for path in place.glob("dflash-*") if _is_left_over(path)]
    return [path for path in dead if _remove(path)]


def _is_left_over(path: Path) -> bool:
    """Whether the process that a name tells of is known to be dead. What is not of our form, or from elsewhere, is nobody's."""
    match = _NAME.fullmatch(path.name)
    if match is None or match[1] != scope():
        return False
    # By identity: a pid alone may belong to somebody else by now. The name is never given to another process again.
    return not ProcessIdentity(boot_id(), int(match[2]), int(match[3])).is_alive()


def _remove(path: Path) -> bool:
    """Remove a ring or a directory of this user; True when it is gone by our hand."""
    try:
        found = path.lstat()
        if found.st_uid != os.geteuid():
            return False
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(path)
        elif stat.S_ISREG(found.st_mode):
            path.unlink()
        else:
            return False
    except OSError:
        # Another run swept at the same time, or the place is read-only: no reason not to train.
        return False
    return True
