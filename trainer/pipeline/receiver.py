"""A drafter's end of the ring: wait for a batch, copy it to the device, verify the copy, free the slot."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from trainer.pipeline.channel import MessageKind, PairChannel, SlotMessage
from trainer.pipeline.checksum import checksum
from trainer.pipeline.copier import Copier, Mark
from trainer.pipeline.handover import StreamClosed
from trainer.pipeline.packed import PackBuffer, PackedRow, RowTokens, as_states
from trainer.pipeline.ring import TORN, Ring, SlotHeader, SlotView
from trainer.pipeline.slots import is_verified
from trainer.telemetry import StageClock

CopyAlarm = Callable[[str, int], None]
"""Called with (what was seen, step) when states differ from what was packed."""


@dataclass(frozen=True)
class Arrival:
    """Where a batch comes from."""

    batch: int
    target: int


@dataclass(frozen=True)
class Released:
    """A device buffer's leave: `mark` is behind all that read it; `used` what a verified row's checksum was by then.

    `seen` is the device's side of `used`, kept until the copy of it is done.
    """

    mark: Mark
    row: PackedRow | None = None
    used: torch.Tensor | None = None
    seen: torch.Tensor | None = None


class Fetcher:
    """Takes batches out of the ring, in ascending order, and verifies them."""

    def __init__(
        self,
        ring: Ring,
        copier: Copier,
        *,
        pairs: dict[int, int],
        channels: dict[int, PairChannel],
        verify_copies: str,
        alarm: CopyAlarm,
        here: str,
        targets: Sequence[str],
        clock: StageClock | None = None,
    ) -> None:
        """`pairs` and `channels`: ring index and socket of each target that feeds this drafter.

        `here` and `targets` say in an alarm where this drafter and each target are, e.g. "GPU 6 (rank 6)".
        """
        self._ring = ring
        self._copier = copier
        self._pairs = pairs
        self._channels = channels
        self._verify_copies = verify_copies
        self._alarm = alarm
        self._here = here
        self._targets = targets
        self._clock = clock or StageClock()
        self._seen = copier.landing(1)
        self._landings: deque[torch.Tensor] = deque()  # One for each buffer whose row is being looked at.

    def fetch(self, arrival: Arrival, buffer: PackBuffer, *, free: Released) -> PackedRow:
        """Wait for a batch and copy it into `buffer`, which is overwritten behind its leave `free`.

        Raises PeerDied, StreamClosed, and ValueError when the ring's content is not what the schedule says.
        """
        channel, pair = self._channels[arrival.target], self._pairs[arrival.target]
        message = channel.receive()
        if message.kind is MessageKind.BYE:
            self.settle(free)
            raise StreamClosed
        header = self._ring.read_header(pair, message.slot)
        if not header.batch == message.batch == arrival.batch:
            raise ValueError(f"expected batch {arrival.batch}, got {message.batch} in a slot of batch {header.batch}")
        view = self._ring.view(pair, message.slot, header)
        states = buffer.rows(header.tokens)
        done = self._copier.copy(states, view.states, after=free.mark)
        row = PackedRow(
            _row_tokens(header, view),
            as_states(states, split=header.split),
            header.finite,
            header.checksum if header.checksum == TORN or is_verified(self._verify_copies, header.batch) else None,
            arrival.target,
        )
        self.settle(free)
        row = self._verify(row, states, done)
        self._clock.copied("copy_in", done.seconds())
        channel.send(SlotMessage(MessageKind.FREE, message.slot, message.batch))
        return row

    def _verify(self, row: PackedRow, states: torch.Tensor, arrived: Mark) -> PackedRow:
        """Wait until the states have arrived, and compare those of a verified batch; what is wrong is not looked at again."""
        if row.checksum is None:
            arrived.wait_host()
            return row
        with self._copier.beside():
            # On the copy stream, behind the copy: the training stream does not wait for it.
            seen = checksum(states).reshape(1)
        self._copier.copy(self._seen, seen, after=arrived).wait_host()
        right = self._compare(row, self._seen, f"wrong on {self._here}")
        return row if right else replace(row, checksum=None)

    def release(self, row: PackedRow, buffer: PackBuffer) -> Released:
        """Return the leave of a row's buffer, on the stream that read it; nothing enqueued from now on may read it.

        The states of a verified batch are summed once more behind their readers: a slot that was filled again too early
        was right when it arrived.
        """
        if row.checksum is None:
            return Released(self._copier.mark())
        seen = checksum(buffer.rows(len(row.row.input_ids))).reshape(1)
        used = self._landings.pop() if self._landings else self._copier.landing(1)
        # Not on the copy stream: behind the backward, it would hold up the copies of the next batches.
        return Released(self._copier.copy_here(used, seen), row, used, seen)

    def settle(self, released: Released) -> None:
        """Compare what the readers of a verified batch met; waits until they are done."""
        if released.row is not None and released.used is not None:
            released.mark.wait_host()
            self._compare(
                released.row, released.used, f"right when it arrived on {self._here}, overwritten while in use"
            )
            self._landings.append(released.used)

    def _compare(self, row: PackedRow, seen: torch.Tensor, otherwise: str) -> bool:
        if int(seen) % (1 << 64) == row.checksum:
            return True
        packed = "finite when packed" if row.packed_finite else "not finite when packed"
        if row.checksum == TORN:
            packed = "copied before it was packed"
        where = self._targets[row.target]
        self._alarm(f"batch {row.row.batch}: {packed} on {where}, {otherwise}", row.row.step)
        return False

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
        self._free: Released | None = None

    def receive(self, batch: int) -> PackedRow:
        # None before the first row, and given up before the fetch: one that ends the stream has looked at what it carries.
        free, self._free = self._free or Released(self._copier.mark()), None
        row = self._fetcher.fetch(next(self._arrivals), self._buffer, free=free)
        _expect(row, batch)
        return row

    def release(self, row: PackedRow) -> None:
        self._free = self._fetcher.release(row, self._buffer)

    def close(self) -> None:
        if self._free is not None:
            self._fetcher.settle(self._free)
        self._fetcher.close()
        self._fetcher.wait_closed()


class PrefetchReceiver:
    """A background thread fetches the next batches while the drafter trains; the device buffers bound how far it runs ahead."""

    def __init__(
        self, fetcher: Fetcher, arrivals: Iterator[Arrival], buffers: list[PackBuffer], copier: Copier
    ) -> None:
        self._fetcher = fetcher
        self._arrivals = arrivals
        self._free: queue.SimpleQueue[tuple[PackBuffer, Released] | None] = queue.SimpleQueue()
        self._buffers = buffers
        self._copier = copier
        self._rows: queue.SimpleQueue[tuple[PackedRow, PackBuffer] | BaseException] = queue.SimpleQueue()
        self._held: dict[int, PackBuffer] = {}
        # Begins with the first row that is asked for: until then the buffers are the warm-up's.
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)

    def receive(self, batch: int) -> PackedRow:
        if self._thread.ident is None:
            self._begin()
        item = self._rows.get()
        if isinstance(item, BaseException):
            self._rows.put(item)  # So for every later call.
            raise item
        row, buffer = item
        _expect(row, batch)
        self._held[batch] = buffer
        return row

    def _begin(self) -> None:
        for buffer in self._buffers:
            self._free.put((buffer, Released(self._copier.mark())))
        self._thread.start()

    def release(self, row: PackedRow) -> None:
        buffer = self._held.pop(row.row.batch)
        self._free.put((buffer, self._fetcher.release(row, buffer)))

    def close(self) -> None:
        # The goodbye makes the targets say theirs, which ends a fetch that waits; None ends one that waits for a buffer.
        self._fetcher.close()
        self._free.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        while not self._free.empty():
            if (item := self._free.get()) is not None:
                self._fetcher.settle(item[1])
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
