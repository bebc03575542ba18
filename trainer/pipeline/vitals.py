"""A small mapping that all ranks of a machine share: where each is, when it last got on, when its watchdog last looked.

A rank that waits sees there whether the one it waits for still gets on, and a frozen one, which can say nothing, is seen to
have gone silent. Each rank writes its own record alone. Torch-free.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

# seen, moved, limit; ended; name, doing, awaits in UTF-8, padded with NUL. Aligned, so that no number is ever seen half.
_RECORD = struct.Struct("<3d?7x64s224s64s")


@dataclass(frozen=True)
class Vitals:
    """One rank at one moment. Times are seconds of the monotonic clock, which all processes of a machine share.

    `seen`: when its watchdog last looked. `moved`: when it last got on. `limit`: how long it may stand still where it is.
    `awaits`: for whom it waits, "" where it has work of its own. `ended`: it ended well; nothing more will come of it.
    """

    name: str
    seen: float
    moved: float
    limit: float
    doing: str
    awaits: str = ""
    ended: bool = False

    def pack(self) -> bytes:
        return _RECORD.pack(
            self.seen,
            self.moved,
            self.limit,
            self.ended,
            *(
                text.encode(errors="replace")[:size]
                for text, size in ((self.name, 64), (self.doing, 224), (self.awaits, 64))
            ),
        )

    @classmethod
    def unpack(cls, data: bytes) -> Vitals:
        seen, moved, limit, ended, *texts = _RECORD.unpack(data)
        # A text that is read while it is written may be half of two; it is for people alone.
        name, doing, awaits = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        return cls(name, seen, moved, limit, doing, awaits, ended)


class Board:
    """The records of a machine's ranks, by local rank, in a file that may be unlinked once all have mapped it."""

    def __init__(self, path: Path, ranks: int) -> None:
        """Map the file; whoever comes first makes it. Raises OSError."""
        self._ranks = ranks
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _RECORD.size * ranks)
            self._map = mmap.mmap(descriptor, _RECORD.size * ranks)
        finally:
            os.close(descriptor)

    def write(self, local_rank: int, vitals: Vitals) -> None:
        self._map[self._place(local_rank)] = vitals.pack()

    def read(self) -> dict[int, Vitals]:
        """Return the records of the ranks that have begun."""
        records = {rank: Vitals.unpack(self._map[self._place(rank)]) for rank in range(self._ranks)}
        return {rank: each for rank, each in records.items() if each.seen > 0 and each.limit > 0}

    def _place(self, local_rank: int) -> slice:
        return slice(local_rank * _RECORD.size, (local_rank + 1) * _RECORD.size)

    def close(self) -> None:
        self._map.close()
