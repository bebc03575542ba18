"""The size of a slot, the file of all slots, and which batches are verified. Torch-free: the leader reserves the ring."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

ALIGNMENT = 256
"""Every part of a slot begins at a multiple of this many bytes."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


def aligned(size: int) -> int:
    """Return `size` rounded up to ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def slot_bytes(tokens: int, width: int, itemsize: int) -> int:
    """Return the size in bytes of a slot for `tokens` rows of `width` (= L*H) elements of `itemsize` bytes."""
    parts = (ALIGNMENT, 4 * tokens, tokens, 8 * tokens, 4 * tokens, tokens * width * itemsize)
    return sum(aligned(part) for part in parts)


def is_sampled(batch: int) -> bool:
    """Whether `--verify-copies sample` checks this batch: sha256 of its id is 0 mod 64, so every target and drafter is met."""
    return int.from_bytes(hashlib.sha256(str(batch).encode("ascii")).digest(), "big") % 64 == 0


def is_verified(verify_copies: str, batch: int) -> bool:
    """Whether both ends compare this batch. Each asks for itself: that nothing came to compare with is a difference, too."""
    return verify_copies == "all" or (verify_copies == "sample" and is_sampled(batch))


def create_ring_file(path: Path, size: int) -> None:
    """Create the ring's file with all its pages reserved. Raises OSError (ENOSPC) when /dev/shm has no room for it.

    Without posix_fallocate a full /dev/shm shows as SIGBUS in the middle of training.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
