"""Seeds that depend on what is drawn and never on who draws: rank, order and Python's randomised hash() play no part."""

from __future__ import annotations

import hashlib

from numpy.random import Philox


def key(purpose: str, *numbers: int, bits: int = 128) -> int:
    """Return a key of `bits` bits (a multiple of 8) from the SHA-256 of a purpose and integers of any size."""
    text = ",".join([purpose, *(str(int(number)) for number in numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[: bits // 8], "little")


def philox(purpose: str, *numbers: int) -> Philox:
    """Return numpy's Philox bit generator under that key; its raw stream is the same on every platform."""
    return Philox(key=key(purpose, *numbers))
