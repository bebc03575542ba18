"""The timeline of a GPU, and where the gradients of a backward are there but not yet the other ranks'."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable

from trainer.telemetry import HostTimeline, Timeline


class CudaTimeline:
    """Moments are events on the current stream of the thread that asks: they pass when the device gets there.

    Events are used again once their moments are forgotten, so that a run has as many as are on their way at once. A moment
    is only asked for whether it has passed; nothing here waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def now(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        return start.elapsed_time(end) / 1e3 if end.query() else None

    def forget(self, moment: torch.cuda.Event) -> None:
        self._free.append(moment)


def timeline_of(device: torch.device) -> Timeline:
    """Return how time is taken on a device."""
    return CudaTimeline(device) if device.type == "cuda" else HostTimeline()


def when_gradients_are_made(loss: torch.Tensor, do: Callable[[], None]) -> None:
    """Call `do` in the coming backward of `loss` once all gradients are computed, before anything waits for other ranks.

    DistributedDataParallel waits for them in a callback at the backward's very end. Ours is put in line at its beginning,
    and so is called first; on the streams of the caller of backward, though maybe in another thread.
    """

    def put_in_line(_: torch.Tensor) -> None:
        Variable._execution_engine.queue_callback(do)  # pyright: ignore[reportAttributeAccessIssue]

    loss.register_hook(put_in_line)
