"""A device on the CPU whose work is done later, in streams, as a GPU's is: what is wrong in order on a GPU is wrong here too.

Operations on the device's memory return at once and are done by the thread of the stream that was current; operations on host
memory are done at once. So code that reads too early reads what was there before, whoever runs the tests.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PATIENCE = 20.0

# Operations whose result the host needs: on a GPU they wait until everything before them is done.
ASK_THE_DEVICE = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "item")


class Point:
    """A mark in a stream's work."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def wait_host(self) -> None:
        assert self.reached.wait(PATIENCE), "a stream stands still"

    def seconds(self) -> float:
        return 0.0


class Stream:
    """Work done in order by a thread of its own."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], Any]) -> None:
        self._work.put(work)

    def mark(self) -> Point:
        point = Point()
        self.enqueue(point.reached.set)
        return point

    def wait(self, point: Point) -> None:
        self.enqueue(point.wait_host)

    def synchronize(self) -> None:
        self.mark().wait_host()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(PATIENCE)

    @torch.no_grad()
    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)


class LateDevice:
    """Memory whose operations are done by streams. `waits` lists every time that the host had to wait for the device."""

    def __init__(self) -> None:
        self.main, self.copies, self.second = Stream(), Stream(), Stream()
        self.waits: list[str] = []
        self._own: dict[int, torch.Tensor] = {}
        self._thread = threading.local()

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor's memory the device's. It is kept, so that no host tensor is ever put at its address."""
        if tensor.numel():
            self._own.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    def owns(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() in self._own

    @property
    def current(self) -> Stream:
        return getattr(self._thread, "current", self.main)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Let the calling thread's device work go to a stream."""
        before, entered = self.current, getattr(self._thread, "entered", False)
        self._thread.current, self._thread.entered = stream, True
        try:
            with contextlib.nullcontext() if entered else _Later(self):
                yield
        finally:
            self._thread.current, self._thread.entered = before, entered

    def close(self) -> None:
        for stream in (self.main, self.copies, self.second):
            stream.close()

    @property
    def errors(self) -> list[BaseException]:
        return self.main.errors + self.copies.errors + self.second.errors


class _Later(TorchDispatchMode):
    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = self._device
        # `_unsafe_view` returns its argument's memory, too, but does not say so.
        alias = func.is_view or "_unsafe_view" in func._schema.name
        if alias or not any(device.owns(each) for each in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name in ASK_THE_DEVICE or (name == "copy_" and not device.owns(args[0])):
            device.waits.append(name)
            device.current.synchronize()
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._change(func, args, kwargs)
        # Done at once as well, for the result's shape; who reads it too early finds memory that nobody has written.
        results = func(*args, **kwargs)
        tensors = [device.own(each).zero_() for each in tree_leaves(results) if isinstance(each, torch.Tensor)]

        def again() -> None:
            for into, right in zip(tensors, tree_leaves(func(*args, **kwargs)), strict=True):
                into.copy_(right)

        device.current.enqueue(again)
        return results

    def _change(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = [
            kwargs[each.name] if each.name in kwargs else args[place]
            for place, each in enumerate(func._schema.arguments)
            if each.alias_info is not None and each.alias_info.is_write
        ]
        for each in tree_leaves(written):
            self._device.own(each)
        self._device.current.enqueue(lambda: func(*args, **kwargs))
        returned = len(func._schema.returns)
        return written[0] if returned == 1 else tuple(written) if returned else None


class LateCopier:
    """The copier of a late device; each of its copies begins `late` seconds after it may."""

    def __init__(self, device: LateDevice, late: float) -> None:
        self._device = device
        self._late = late

    def mark(self) -> Point:
        return self._device.current.mark()

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Point) -> Point:
        stream = self._device.copies
        stream.wait(after)
        if self._late:
            stream.enqueue(lambda: time.sleep(self._late))
        stream.enqueue(lambda: destination.copy_(source))
        return stream.mark()

    def copy_here(self, destination: torch.Tensor, source: torch.Tensor) -> Point:
        self._device.current.enqueue(lambda: destination.copy_(source))
        return self._device.current.mark()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        with self._device.on(self._device.copies):
            yield

    def landing(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)
