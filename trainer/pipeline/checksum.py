"""The number that a slot's states are compared by: sum(word_i * (2i+1)) mod 2^64 over their bytes as u32 words.

Made twice, from different memory: by the drafter from the states that arrived, and by the target from what its layers put
out. A sum over the packed states would be the right number of wrong bytes where the packing itself went wrong or too early.
The odd weights make swapped, shifted and repeated words visible. int64 arithmetic wraps, which is the mod 2^64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_CHUNK = 1 << 20  # units at a time: bounds the int64 temporaries to 24 MiB


def checksum(states: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a slot's states, of any shape, as an int64 scalar on their device."""
    raw = states.reshape(-1).view(torch.uint8)
    if raw.numel() % 4:
        raw = torch.nn.functional.pad(raw, (0, 4 - raw.numel() % 4))
    words = raw.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=states.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64) & 0xFFFFFFFF
        weights = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=states.device) * 2 + 1
        total += (chunk * weights).sum()
    return total


def captured_checksum(
    captured: Sequence[torch.Tensor], lengths: Sequence[int], tokens: int, *, split: bool
) -> torch.Tensor:
    """Return the checksum that the slot of a row of `tokens` positions must have, from L captured outputs f[k, L_max, H].

    Nothing is packed: each value counts at the place where it belongs, in the slot of [T, L*H], or with `split` of
    [L, T, H]. Positions behind the documents are zero there and count nothing.
    """
    total = torch.zeros((), dtype=torch.int64, device=captured[0].device)
    for layer, states in enumerate(captured):
        units, halves = _units(states)
        width = units.shape[-1]
        pitch = width if split else len(captured) * width
        origin = layer * (tokens * width if split else width)
        for rows, first in _spans(units, lengths):
            total += _weighed(rows, origin + first * pitch, pitch, halves)
    return total


def _units(states: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return the words of each row, or, where a word would span two rows (bfloat16 of odd H), its halves."""
    halves = states.shape[-1] * states.itemsize % 4 != 0
    return states.contiguous().view(torch.int16 if halves else torch.int32), halves


def _spans(units: torch.Tensor, lengths: Sequence[int]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield pieces [n, width] of the documents' rows, each with its first position in the packed row."""
    step = max(1, _CHUNK // units.shape[-1])
    offset = 0
    for document, length in enumerate(lengths):
        for start in range(0, length, step):
            yield units[document, start : min(start + step, length)], offset + start
        offset += length


def _weighed(rows: torch.Tensor, first: int, pitch: int, halves: bool) -> torch.Tensor:
    """Return the sum over [n, width] of the units whose first is number `first` of the slot, each row `pitch` behind the last."""
    place = torch.arange(rows.shape[0], dtype=torch.int64, device=rows.device)[:, None] * pitch + first
    place = place + torch.arange(rows.shape[1], dtype=torch.int64, device=rows.device)
    if not halves:
        return ((rows.to(torch.int64) & 0xFFFFFFFF) * (place * 2 + 1)).sum()
    # Little-endian: the unit of odd number is the upper half of its word.
    words = (rows.to(torch.int64) & 0xFFFF) << ((place & 1) * 16)
    return (words * ((place >> 1) * 2 + 1)).sum()
