"""The one owner of CUDA streams: copies beside the computation, ordered by marks. On a CPU a copy is done when the call returns.

Rules 1 to 5 of the pipeline: data is packed on the stream that produced it; only copies run elsewhere; a copy waits for
the mark of its producer, taken on the producer's own stream BEFORE the copy stream is entered; the source stays untouched
until the copy's mark fired.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in a stream's work."""

    def wait_host(self) -> None:
        """Block the calling thread until all work before the mark is done."""
        ...

    def seconds(self) -> float:
        """Return how long the copy that ends at the mark was under way, 0.0 for a mark that ends none. After `wait_host` only."""
        ...


class Copier(Protocol):
    """Copies of one device."""

    def mark(self) -> Mark:
        """Return a mark behind everything the calling thread has enqueued on its current stream so far."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Mark) -> Mark:
        """Enqueue destination <- source behind `after`, and return the mark of its completion."""
        ...

    def copy_here(self, destination: torch.Tensor, source: torch.Tensor) -> Mark:
        """Enqueue destination <- source, a few bytes, on the calling thread's current stream, and return a mark behind it."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """Return a context whose device work runs on the copy stream, behind the copies."""
        ...

    def landing(self, count: int) -> torch.Tensor:
        """Return i64[count] in host memory for copies of device scalars: read behind their mark, they cost no synchronisation."""
        ...


class _Done:
    """The mark of work that is already done."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def wait_host(self) -> None:
        return

    def seconds(self) -> float:
        return self._seconds


class HostCopier:
    """Copies within host memory, done at once."""

    def mark(self) -> Mark:
        return _Done()

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Mark) -> Mark:
        after.wait_host()
        began = time.monotonic()
        destination.copy_(source)
        return _Done(time.monotonic() - began)

    def copy_here(self, destination: torch.Tensor, source: torch.Tensor) -> Mark:
        destination.copy_(source)
        return _Done()

    def beside(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def landing(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event, began: torch.cuda.Event | None = None) -> None:
        self.event = event
        self._began = began

    def wait_host(self) -> None:
        self.event.synchronize()

    def seconds(self) -> float:
        return 0.0 if self._began is None else self._began.elapsed_time(self.event) / 1e3


class CudaCopier:
    """Copies on a stream of their own, so that they overlap with the next forward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> Mark:
        # Blocking: a thread that waits for it sleeps; the default spins, a CPU core for each background thread.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return _CudaMark(event)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Mark) -> Mark:
        began, done = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        if isinstance(after, _CudaMark):
            self._stream.wait_event(after.event)
        with torch.cuda.stream(self._stream):
            # Behind the wait: what the producer takes is no time of the copy.
            began.record(self._stream)
            destination.copy_(source, non_blocking=True)
            done.record(self._stream)
        return _CudaMark(done, began)

    def copy_here(self, destination: torch.Tensor, source: torch.Tensor) -> Mark:
        destination.copy_(source, non_blocking=True)
        return self.mark()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def landing(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, pin_memory=True)


def make_copier(device: torch.device) -> Copier:
    """Return the copier for a device."""
    return CudaCopier(device) if device.type == "cuda" else HostCopier()
