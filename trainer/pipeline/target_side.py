"""What a target does: read, forward, pack; then hand over, to another process through the ring or to itself (shared roles)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainer.data.schedule import MicroBatch
from trainer.pipeline.checksum import captured_checksum
from trainer.pipeline.copier import Copier
from trainer.pipeline.flops import forward_flops
from trainer.pipeline.handover import Sender, StreamClosed
from trainer.pipeline.held_out import FIRST_BATCH
from trainer.pipeline.out_of_memory import at_shape
from trainer.pipeline.packed import PackBuffer, PackedRow, PackedStates, as_states
from trainer.pipeline.reader import ReadRow, RowReader
from trainer.pipeline.reporting import ProfileTimer
from trainer.pipeline.slots import is_verified
from trainer.target.capture import Target
from trainer.telemetry import StageClock
from trainer.upload import upload


class Producer:
    """One target with its reader: turns micro-batches into packed states."""

    def __init__(
        self,
        target: Target,
        reader: RowReader,
        clock: StageClock,
        *,
        device: torch.device,
        verify_copies: str,
        held_out: RowReader | None = None,
    ) -> None:
        self.target = target
        self._reader = reader
        self._held_out = held_out
        self._clock = clock
        self._device = device
        self._verify = verify_copies
        self._flops_per_token = forward_flops(target.stack)

    def read(self, micro_batch: MicroBatch) -> ReadRow:
        reader = self._held_out if micro_batch.b >= FIRST_BATCH and self._held_out is not None else self._reader
        with self._clock.stage("read"):
            return reader.read(micro_batch)

    def states(
        self, read: ReadRow, buffer: PackBuffer, *, verify: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the target and pack what it captured into `buffer`, on the same stream (rule 1).

        With `verify` the checksum that the states must have comes with them, made from the captured outputs themselves.
        """
        documents, width = read.padded.shape
        with at_shape(f"{documents} x {width} tokens"):
            return self._states(read, buffer, verify)

    def _states(self, read: ReadRow, buffer: PackBuffer, verify: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        with self._clock.stage("target_forward"):
            captured = self.target.capture(upload(read.padded, self._device))
        with self._clock.stage("pack"):
            # The captured outputs die with this frame, before the next forward (rule 11).
            tokens = len(read.row.input_ids)
            states = buffer.pack(captured, read.lengths, tokens)
            check = captured_checksum(captured, read.lengths, tokens, split=buffer.split) if verify else None
        self._clock.add_tokens(read.row.tokens)
        self._clock.add_flops(self._flops_per_token * read.row.tokens)
        return states, check

    def verifies(self, batch: int) -> bool:
        return is_verified(self._verify, batch)


def produce(
    producer: Producer,
    batches: Iterator[MicroBatch],
    sender: Sender,
    copier: Copier,
    clock: StageClock,
    timer: ProfileTimer,
) -> None:
    """Feed the drafters until the data ends or they say goodbye. Raises PeerDied."""
    timer.begin()
    try:
        for micro_batch in batches:
            read = producer.read(micro_batch)
            with clock.stage("wait_buffer"):
                buffer = sender.buffer()
            states, check = producer.states(read, buffer, verify=producer.verifies(micro_batch.b))
            packed = PackedStates.of(buffer, states, copier, batch=micro_batch.b, check=check)
            with clock.stage("publish"):
                sender.send(packed, read.row, micro_batch.drafter)
            timer.tick()
    except StreamClosed:
        pass  # The drafters have stopped.
    with clock.stage("wait_end"):
        sender.close()


class SharedReceiver:
    """The handover of shared roles: the drafter's own process runs the target, and the pack buffer is what it trains on."""

    def __init__(self, producer: Producer, batches: Iterator[MicroBatch], buffer: PackBuffer) -> None:
        self._producer = producer
        self._batches = batches
        self._buffer = buffer

    def receive(self, batch: int) -> PackedRow:
        micro_batch = next(self._batches)
        if micro_batch.b != batch:
            raise ValueError(f"the drafter asked for batch {batch}, the schedule says {micro_batch.b}")
        return self.make(self._producer.read(micro_batch))

    def make(self, read: ReadRow) -> PackedRow:
        """Run the target on what was read. The row's states are overwritten by the next call."""
        states, _ = self._producer.states(read, self._buffer)
        return PackedRow(read.row, as_states(states, split=self._buffer.split))

    def release(self, row: PackedRow) -> None:
        return  # One stream: the next pack is enqueued behind the backward that reads the buffer.

    def close(self) -> None:
        return
