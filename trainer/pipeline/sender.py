"""A target's end of the ring. Rule 2: only the copy and its publishing are asynchronous.

A background thread waits for the copy and publishes; its error is raised in the main loop.
"""

from __future__ import annotations

import dataclasses
import queue
import threading

from trainer.pipeline.channel import MessageKind, PairChannel, SlotMessage
from trainer.pipeline.copier import Copier
from trainer.pipeline.handover import StreamClosed
from trainer.pipeline.packed import PackBuffer, PackedStates, RowTokens
from trainer.pipeline.ring import TORN, Ring, SlotHeader
from trainer.telemetry import StageClock


class Publisher:
    """Writes packed states into free slots and says READY: the far half of a target's sender."""

    def __init__(
        self, ring: Ring, copier: Copier, clock: StageClock, *, pairs: dict[int, int], channels: dict[int, PairChannel]
    ) -> None:
        """`pairs` and `channels`: ring index and socket of each drafter this target feeds."""
        self._clock = clock
        self._ring = ring
        self._copier = copier
        self._pairs = pairs
        self._channels = channels
        self._free = {drafter: list(range(ring.slots_per_pair)) for drafter in pairs}
        self._proof = copier.landing(3)

    def publish(self, packed: PackedStates, row: RowTokens, drafter: int, *, layers: int, hidden: int) -> None:
        """Copy one row into a free slot of the drafter's pair and publish it. Raises StreamClosed, PeerDied."""
        slot = self._free_slot(drafter)
        header = SlotHeader(
            batch=row.batch,
            step=row.step,
            epoch=row.epoch,
            tokens=len(row.input_ids),
            layers=layers,
            hidden=hidden,
            dtype=packed.states.dtype,
            split=packed.buffer.split,
            finite=True,
        )
        view = self._ring.view(self._pairs[drafter], slot, header)
        copied = self._copier.copy(view.states, packed.states, after=packed.ready)
        done = self._copier.copy(self._proof, packed.proof, after=copied)
        for into, tokens in (
            (view.input_ids, row.input_ids),
            (view.loss_mask, row.loss_mask),
            (view.document_ids, row.document_ids),
            (view.position_ids, row.position_ids),
        ):
            into.copy_(tokens)
        done.wait_host()
        self._clock.copied("copy_out", copied.seconds())
        finite, check, tag = self._proof.tolist()
        if tag != row.batch + 1:
            # Read before it was made, and so were the states: the drafter says so, whether the batch is verified or not.
            finite, check = 1, TORN
        header = dataclasses.replace(header, finite=bool(finite), checksum=check)
        self._ring.write_header(self._pairs[drafter], slot, header)
        self._channels[drafter].send(SlotMessage(MessageKind.READY, slot, row.batch))

    def wait_for_slot(self, drafter: int) -> None:
        """Wait until `publish` finds a slot. Raises StreamClosed, PeerDied."""
        with self._clock.stage("wait_slot"):
            while not self._free[drafter]:
                self._take_back(drafter, self._channels[drafter].receive())

    def _free_slot(self, drafter: int) -> int:
        for each, channel in self._channels.items():
            while (message := channel.poll()) is not None:
                self._take_back(each, message)
        while not self._free[drafter]:
            self._take_back(drafter, self._channels[drafter].receive())
        slot = self._free[drafter].pop(0)
        held = sum(self._ring.slots_per_pair - len(free) for free in self._free.values())
        self._clock.ring_bytes = held * self._ring.slot_size
        return slot

    def _take_back(self, drafter: int, message: SlotMessage) -> None:
        if message.kind is MessageKind.BYE:
            raise StreamClosed
        self._free[drafter].append(message.slot)

    def close(self) -> None:
        """Say goodbye to every drafter and wait for its goodbye."""
        for channel in self._channels.values():
            channel.say_goodbye()
        for channel in self._channels.values():
            channel.wait_goodbye()
            channel.close()


class SyncSender:
    """The reference: the row is copied and published before `send` returns. Raises what the publisher raises."""

    def __init__(self, publisher: Publisher, buffer: PackBuffer, *, layers: int, hidden: int) -> None:
        self._publisher = publisher
        self._buffer = buffer
        self._shape = {"layers": layers, "hidden": hidden}

    def buffer(self) -> PackBuffer:
        return self._buffer

    def send(self, packed: PackedStates, row: RowTokens, drafter: int) -> None:
        self._publisher.wait_for_slot(drafter)
        self._publisher.publish(packed, row, drafter, **self._shape)

    def close(self) -> None:
        self._publisher.close()


class AsyncSender:
    """A background thread copies and publishes; the number of pack buffers bounds the bytes in flight (rule 5)."""

    def __init__(self, publisher: Publisher, buffers: list[PackBuffer], *, layers: int, hidden: int) -> None:
        self._publisher = publisher
        self._shape = {"layers": layers, "hidden": hidden}
        self._buffers: queue.SimpleQueue[PackBuffer | None] = queue.SimpleQueue()
        for buffer in buffers:
            self._buffers.put(buffer)
        self._jobs: queue.SimpleQueue[tuple[PackedStates, RowTokens, int] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    def buffer(self) -> PackBuffer:
        buffer = self._buffers.get()
        if buffer is None:
            self._buffers.put(None)  # The thread has ended: so for every later call.
            self._raise()
            raise StreamClosed
        return buffer

    def send(self, packed: PackedStates, row: RowTokens, drafter: int) -> None:
        self._raise()
        self._jobs.put((packed, row, drafter))

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._publisher.close()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                packed, row, drafter = job
                self._publisher.publish(packed, row, drafter, **self._shape)
                self._buffers.put(packed.buffer)
        except StreamClosed:
            pass  # What else waits in the queue is not wanted either.
        except BaseException as error:
            self._error = error
        finally:
            self._buffers.put(None)
