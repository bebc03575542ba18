"""A drafter's end of the ring: wait for a batch, copy it to the device, verify the copy, free the slot."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from trainer.pipeline.channel import MessageKind, PairChannel, SlotMessage
from trainer.pipeline.copier import Copier, Mark
from trainer.pipeline.handover import StreamClosed
from trainer.pipeline.packed import PackBuffer, PackedRow, RowTokens, as_states
from trainer.pipeline.ring import Ring, SlotHeader, SlotView, checksum

CopyAlarm = Callable[[int, str], None]
"""Called with (batch, what was seen) when a copy differs from what was packed."""


@dataclass(frozen=True)
class Arrival:
    """Where a batch comes from."""

    batch: int
    target: int


class Fetcher:
    """Takes batches out of the ring, in ascending order."""

    def __init__(
        self, ring: Ring, copier: Copier, *, pairs: dict[int, int], channels: dict[int, PairChannel], alarm: CopyAlarm
    ) -> None:
        """`pairs` and `channels`: ring index and socket of each target that feeds this drafter."""
        self._ring = ring
        self._copier = copier
        self._pairs = pairs
        self._channels = channels
        self._alarm = alarm

    def fetch(self, arrival: Arrival, buffer: PackBuffer, *, free: Mark) -> PackedRow:
        """Wait for a batch and copy it into `buffer`, which is overwritten behind the mark `free`.

        Raises PeerDied, StreamClosed, and ValueError when the ring's content is not what the schedule says.
        """
        channel, pair = self._channels[arrival.target], self._pairs[arrival.target]
        message = channel.receive()
        if message.kind is MessageKind.BYE:
            raise StreamClosed
        header = self._ring.read_header(pair, message.slot)
        if not header.batch == message.batch == arrival.batch:
            raise ValueError(f"expected batch {arrival.batch}, got {message.batch} in a slot of batch {header.batch}")
        view = self._ring.view(pair, message.slot, header)
        states = buffer.rows(header.tokens)
        self._copier.copy(states, view.states, after=free).wait_host()
        row = _row_tokens(header, view)
        self._verify(header, states, arrival)
        channel.send(SlotMessage(MessageKind.FREE, message.slot, message.batch))
        return PackedRow(row, as_states(states, split=header.split), header.finite)

    def _verify(self, header: SlotHeader, states: torch.Tensor, arrival: Arrival) -> None:
        if not header.checksum:
            return
        with self._copier.beside():
            # CPU-GPU sync point on the copy stream of the fetching thread; the training stream does not wait.
            seen = int(checksum(states).item()) % (1 << 64)
        if seen != header.checksum:
            packed = "finite" if header.finite else "not finite"
            self._alarm(arrival.batch, f"{packed} when packed by target {arrival.target}, wrong after the copy in")

    def close(self) -> None:
        """Say goodbye to every target and wait for its goodbye."""
        for channel in self._channels.values():
            channel.say_goodbye()

    def wait_closed(self) -> None:
        """Wait for the goodbye of every target, then close the sockets."""
        for channel in self._channels.values():
            channel.wait_goodbye()
            channel.close()


def _row_tokens(header: SlotHeader, view: SlotView) -> RowTokens:
    document_ids = view.document_ids.clone()
    return RowTokens(
        batch=header.batch,
        step=header.step,
        epoch=header.epoch,
        input_ids=view.input_ids.clone(),
        loss_mask=view.loss_mask.clone(),
        document_ids=document_ids,
        position_ids=view.position_ids.clone(),
        tokens=int((document_ids >= 0).sum()),
    )


class SyncReceiver:
    """The reference: each batch is fetched when it is asked for."""

    def __init__(self, fetcher: Fetcher, arrivals: Iterator[Arrival], buffer: PackBuffer, copier: Copier) -> None:
        self._fetcher = fetcher
        self._arrivals = arrivals
        self._buffer = buffer
        self._copier = copier

    def receive(self, batch: int) -> PackedRow:
        row = self._fetcher.fetch(next(self._arrivals), self._buffer, free=self._copier.mark())
        _expect(row, batch)
        return row

    def release(self, row: PackedRow) -> None:
        return  # `receive` marks the stream itself before it overwrites the one buffer.

    def close(self) -> None:
        self._fetcher.close()
        self._fetcher.wait_closed()


class PrefetchReceiver:
    """A background thread fetches the next batches while the drafter trains; the device buffers bound how far it runs ahead."""

    def __init__(
        self, fetcher: Fetcher, arrivals: Iterator[Arrival], buffers: list[PackBuffer], copier: Copier
    ) -> None:
        self._fetcher = fetcher
        self._arrivals = arrivals
        self._copier = copier
        self._free: queue.SimpleQueue[tuple[PackBuffer, Mark] | None] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put((buffer, copier.mark()))
        self._rows: queue.SimpleQueue[tuple[PackedRow, PackBuffer] | BaseException] = queue.SimpleQueue()
        self._held: dict[int, PackBuffer] = {}
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def receive(self, batch: int) -> PackedRow:
        item = self._rows.get()
        if isinstance(item, BaseException):
            self._rows.put(item)  # So for every later call.
            raise item
        row, buffer = item
        _expect(row, batch)
        self._held[batch] = buffer
        return row

    def release(self, row: PackedRow) -> None:
        self._free.put((self._held.pop(row.row.batch), self._copier.mark()))

    def close(self) -> None:
        # The goodbye makes the targets say theirs, which ends a fetch that waits; None ends one that waits for a buffer.
        self._fetcher.close()
        self._free.put(None)
        self._thread.join()
        self._fetcher.wait_closed()

    def _work(self) -> None:
        try:
            for arrival in self._arrivals:
                if (item := self._free.get()) is None:
                    return
                buffer, free = item
                self._rows.put((self._fetcher.fetch(arrival, buffer, free=free), buffer))
        except BaseException as error:
            self._rows.put(error)


def _expect(row: PackedRow, batch: int) -> None:
    if row.row.batch != batch:
        raise ValueError(f"the drafter asked for batch {batch} and got {row.row.batch}: the schedules differ")
