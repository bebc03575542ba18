"""The shared-memory ring between targets and drafters of one machine: fixed slots in one file of /dev/shm.

Slot, little-endian, every part 256-byte aligned:

    header        256 bytes, see _HEADER
    input_ids     i32[T]     loss_mask u8[T]     document_ids i64[T]     position_ids i32[T]
    states        dtype[T, L*H] (layout 0) or dtype[L, T, H] (layout 1, split-fc)
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.pipeline.slots import ALIGNMENT, aligned

MAGIC = 0x44464C52  # "DFLR"
VERSION = 1

# magic, version u32; batch, step, checksum u64; epoch, T, L, H, dtype, layout, finite u32
_HEADER = struct.Struct("<IIQQQIIIIIII")
TORN = (1 << 64) - 1
"""Stands for the checksum of a row that left before it was packed: no states have it but by chance."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class SlotHeader:
    """The fixed part of a slot. `tokens` is T (bucketed), `layers` L, `hidden` H; `checksum` is 0 where none was asked for."""

    batch: int
    step: int
    epoch: int
    tokens: int
    layers: int
    hidden: int
    dtype: torch.dtype
    split: bool
    finite: bool
    checksum: int = 0

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(
            MAGIC,
            VERSION,
            self.batch,
            self.step,
            self.checksum % (1 << 64),
            self.epoch,
            self.tokens,
            self.layers,
            self.hidden,
            _DTYPES.index(self.dtype),
            int(self.split),
            int(self.finite),
        )

    @classmethod
    def unpack(cls, data: bytes) -> SlotHeader:
        """Parse a header. Raises ValueError when it is none of this version."""
        magic, version, batch, step, check, epoch, tokens, layers, hidden, dtype, split, finite = _HEADER.unpack_from(
            data
        )
        if magic != MAGIC or version != VERSION or dtype >= len(_DTYPES):
            raise ValueError(f"no slot header of version {VERSION}: magic {magic:#x}, version {version}, dtype {dtype}")
        return cls(batch, step, epoch, tokens, layers, hidden, _DTYPES[dtype], bool(split), bool(finite), check)


@dataclass(frozen=True)
class SlotView:
    """Tensors that alias a slot's memory."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    document_ids: torch.Tensor
    position_ids: torch.Tensor
    states: torch.Tensor


class Ring:
    """One rank's mapping of the ring. Slot `slot` of pair `pair` is at (pair * slots_per_pair + slot) * slot_bytes."""

    def __init__(self, path: Path, *, slot_size: int, slots_per_pair: int) -> None:
        self.slot_size = slot_size
        self.slots_per_pair = slots_per_pair
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def register_with_cuda(self) -> None:
        """Pin the mapping for asynchronous copies (cudaHostRegister). Raises RuntimeError when the driver refuses."""
        runtime = torch.cuda.cudart()
        assert runtime is not None, "CUDA was not initialised before the ring was registered"
        status = runtime.cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister of {self._memory.numel()} bytes failed with status {int(status)}")

    def _offset(self, pair: int, slot: int) -> int:
        if not 0 <= slot < self.slots_per_pair:
            raise ValueError(f"slot {slot} of {self.slots_per_pair}")
        return (pair * self.slots_per_pair + slot) * self.slot_size

    def write_header(self, pair: int, slot: int, header: SlotHeader) -> None:
        offset = self._offset(pair, slot)
        data = header.pack()
        self._map[offset : offset + len(data)] = data

    def read_header(self, pair: int, slot: int) -> SlotHeader:
        """Return the header of a slot. Raises ValueError when the slot holds none."""
        offset = self._offset(pair, slot)
        return SlotHeader.unpack(self._map[offset : offset + ALIGNMENT])

    def view(self, pair: int, slot: int, header: SlotHeader) -> SlotView:
        """Return tensors over the slot's memory, shaped by `header`."""
        tokens, shape = header.tokens, (header.tokens, header.layers * header.hidden)
        if header.split:
            shape = (header.layers, header.tokens, header.hidden)
        offset = self._offset(pair, slot) + ALIGNMENT
        end = self._offset(pair, slot) + self.slot_size
        parts: list[torch.Tensor] = []
        for dtype, dims in (
            (torch.int32, (tokens,)),
            (torch.uint8, (tokens,)),
            (torch.int64, (tokens,)),
            (torch.int32, (tokens,)),
            (header.dtype, shape),
        ):
            size = torch.Size(dims).numel() * dtype.itemsize
            if offset + size > end:
                raise ValueError(f"{tokens} tokens do not fit a slot of {self.slot_size} bytes")
            parts.append(self._memory[offset : offset + size].view(dtype).view(dims))
            offset += aligned(size)
        return SlotView(*parts)
