"""Reading tensors from files to a GPU: threads read into small pinned buffers, from which they are copied while more is read.

A mapped file goes through the driver's own staging, page fault by page fault in one thread: 54 GB took 20 s from /dev/shm,
2.7 GB/s, where a pinned copy does 55. Host memory is bounded: `THREADS` x 2 x `PIECE` bytes, whatever the model's size.
"""

from __future__ import annotations

import errno
import math
import os
import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from remote.protocol.errors import preflight_error
from trainer.pipeline.copier import Copier, Mark
from trainer.target.facts import TensorEntry

THREADS = 4
PIECE = 16 << 20

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Staging:
    """Two host buffers in turns: one is filled from a file while the other is copied to the device. For one thread at a time."""

    def __init__(self, copier: Copier, *, piece: int, pinned: bool) -> None:
        self._copier = copier
        self._pieces = [host_buffer(piece, pinned=pinned) for _ in range(2)]
        self._marks: list[Mark | None] = [None, None]
        self._turn = 0

    def load(self, descriptor: int, start: int, into: torch.Tensor) -> None:
        """Read u8[n] at `start` of a file into a tensor of the device, in the order of the calling thread's stream.

        The copies may still be under way. Raises OSError.
        """
        piece = len(self._pieces[0])
        for offset in range(0, len(into), piece):
            self._turn = 1 - self._turn
            self._wait(self._turn)
            part = self._pieces[self._turn][: len(into) - offset]
            read_at(descriptor, start + offset, part)
            self._marks[self._turn] = self._copier.copy_here(into[offset : offset + len(part)], part)

    def finish(self) -> None:
        """Wait for the copies."""
        self._wait(0)
        self._wait(1)

    def _wait(self, turn: int) -> None:
        # A buffer is not refilled before the copy out of it is done (rule 4).
        if (mark := self._marks[turn]) is not None:
            mark.wait_host()
            self._marks[turn] = None


def host_buffer(count: int, *, pinned: bool) -> torch.Tensor:
    """Return u8[count] of host memory, from which copies to a GPU are asynchronous if it is pinned."""
    return torch.empty(count, dtype=torch.uint8, pin_memory=pinned)


def read_at(descriptor: int, start: int, into: torch.Tensor) -> None:
    """Fill u8[n] of host memory from a file. Raises OSError, also where the file ends too early."""
    memory = into.numpy().data
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], start + done)
        if count == 0:
            raise OSError(errno.EIO, "it ends too early")
        done += count


@dataclass(frozen=True)
class Load:
    """What is to be read: names in the order of the files, to a device, in a dtype."""

    entries: Mapping[str, TensorEntry]
    names: Sequence[str]
    dtype: torch.dtype
    device: torch.device


def staged_tensors(
    load: Load, copier: Copier, *, threads: int = THREADS, piece: int = PIECE
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) in the order asked for, up to twice as many tensors ahead as there are threads.

    Raises:
        DflashError: a file cannot be read, or a tensor is not what its header says (code 7).
    """
    on_gpu = load.device.type == "cuda"
    stagings: queue.SimpleQueue[Staging] = queue.SimpleQueue()
    for _ in range(threads):
        stagings.put(Staging(copier, piece=piece, pinned=on_gpu))

    def begin_thread() -> None:
        # Else its first allocation would make a context on GPU 0, half a GiB there for each process.
        if on_gpu:
            torch.cuda.set_device(load.device)

    def read(name: str) -> torch.Tensor:
        staging = stagings.get()
        try:
            return _read(load.entries[name], load, staging)
        finally:
            stagings.put(staging)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="weights", initializer=begin_thread)
    ahead: deque[tuple[str, Future[torch.Tensor]]] = deque()
    try:
        for name in load.names:
            ahead.append((name, pool.submit(read, name)))
            if len(ahead) > 2 * threads:
                first, tensor = ahead.popleft()
                yield first, tensor.result()
        for name, tensor in ahead:
            yield name, tensor.result()
    finally:
        # Whoever asked may have had enough: what nobody began is not read.
        pool.shutdown(cancel_futures=True)
        while not stagings.empty():
            stagings.get().finish()


def _read(entry: TensorEntry, load: Load, staging: Staging) -> torch.Tensor:
    dtype = _TYPES.get(entry.dtype)
    if dtype is None or math.prod(entry.shape) * dtype.itemsize != entry.bytes:
        raise preflight_error(
            f"cannot read {entry.file}",
            cause=f"a tensor of {list(entry.shape)} {entry.dtype} has {entry.bytes} bytes in it",
            hint="copy the model again",
        )
    flat = torch.empty(entry.bytes, dtype=torch.uint8, device=load.device)
    try:
        descriptor = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            staging.load(descriptor, entry.start, flat)
        finally:
            os.close(descriptor)
    except OSError as problem:
        raise preflight_error(f"cannot read {entry.file}", cause=str(problem), hint="copy the model again") from problem
    return flat.view(dtype).view(entry.shape).to(load.dtype)
