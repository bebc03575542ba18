"""Where a rig runs: on a late device of the CPU, or on a GPU. Both have a main stream, a copy stream and one too many."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch
from races.streams import LateCopier, LateDevice

from trainer.pipeline.copier import Copier, CudaCopier, Mark


class LateMachine:
    """One side of the pipeline on the CPU. `late` names what is late, by `seconds`."""

    def __init__(self, late: Sequence[str], seconds: float, copies: str) -> None:
        self.device = torch.device("cpu")
        self._late, self._seconds = late, seconds
        self._streams = LateDevice()
        self.copier: Copier = LateCopier(self._streams, seconds if copies in late else 0.0)
        self._blocks: dict[int, torch.Tensor] = {}

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._streams.own(tensor)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Let the calling thread's work go to the device's main stream."""
        with self._streams.on(self._streams.main):
            yield

    @contextlib.contextmanager
    def second(self, *, behind: bool) -> Iterator[None]:
        """Let work go to a second stream, `behind` what the main stream has so far; nothing waits for it."""
        if behind:
            self._streams.second.wait(self._streams.current.mark())
        with self._streams.on(self._streams.second):
            self.be_late("second")
            yield

    def be_late(self, who: str) -> None:
        if who in self._late:
            self._streams.current.enqueue(lambda: time.sleep(self._seconds))

    def block(self, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return memory as a caching allocator does: what was freed is given out again, whatever other streams do with it."""
        size = torch.Size(shape).numel()
        if number not in self._blocks:
            self._blocks[number] = self.own(torch.zeros(1 << 16))
        return self._blocks[number][:size].view(shape)

    def synchronize(self) -> None:
        self._streams.main.synchronize()

    @property
    def waits(self) -> list[str]:
        return self._streams.waits

    def close(self) -> None:
        self._streams.close()
        assert self._streams.errors == []


class _LateCudaCopier(CudaCopier):
    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Mark) -> Mark:
        # The sleep stands before the wait: what it delays is the copy, whatever the copy waits for.
        with self.beside():
            torch.cuda._sleep(CudaMachine.CYCLES)
        return super().copy(destination, source, after=after)


class CudaMachine:
    """One side of the pipeline on a GPU."""

    CYCLES = 100_000_000  # About 50 ms at 2 GHz: longer than anything here takes.
    waits: Sequence[str] = ()

    def __init__(self, device: torch.device, late: Sequence[str], copies: str) -> None:
        self.device = device
        self._late = late
        self.copier: Copier = _LateCudaCopier(device) if copies in late else CudaCopier(device)
        # Of its own, not the device's default one: both sides may be on one GPU, and must not wait for one another.
        self._main, self._second = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        with torch.cuda.stream(self._main):
            yield

    @contextlib.contextmanager
    def second(self, *, behind: bool) -> Iterator[None]:
        if behind:
            self._second.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._second):
            self.be_late("second")
            yield

    def be_late(self, who: str) -> None:
        if who in self._late:
            torch.cuda._sleep(self.CYCLES)

    def block(self, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, device=self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
