"""Warm-up: every shape that a run will meet is run once before its first step, with all memory of a step in use.

So Triton tunes, kernels are compiled and memory runs out here, where nothing is lost, and where shape and GPU are known. Nothing
of it is seen by the training: weights, moments, gradients, random numbers and the schedule are what they were.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from remote.protocol import events as ev
from trainer.data.rows import Row
from trainer.pipeline.copier import Mark
from trainer.pipeline.packed import PackBuffer, PackedRow, PackedStates, RowTokens, as_states
from trainer.pipeline.post import Post
from trainer.pipeline.reader import ReadRow, packed_length
from trainer.pipeline.ring import SlotHeader
from trainer.pipeline.session import DrafterSession
from trainer.pipeline.shapes import STAND_IN, DrafterShape, TargetShape, drafter_shapes, target_shapes
from trainer.pipeline.target_side import Producer

_GIB = 1 << 30

# The slot of its first pair that a role copies to or from meanwhile. Every pair has two, and nothing of it is published.
_TARGETS_SLOT, _DRAFTERS_SLOT = 0, 1


Shape = TypeVar("Shape", TargetShape, DrafterShape)


class WarmUp:
    """The warm-up of one rank: runs shapes until all are done or a stop is wanted, and reports each."""

    def __init__(self, post: Post, *, every_shape: bool | None = None) -> None:
        """`every_shape`: all of them or the largest alone; left out: all on a GPU, for on a CPU nothing is tuned."""
        self._post = post
        self._every_shape = post.device.type == "cuda" if every_shape is None else every_shape
        self._rooms: list[int] = []
        # Not torch's own generators: their state is part of what training sees.
        self._tokens = torch.Generator().manual_seed(0)
        self._states = torch.Generator(post.device).manual_seed(0)

    def target(self, producer: Producer, buffers: Sequence[PackBuffer]) -> None:
        """Run the target over the shapes of its batches, into its pack buffers."""
        post = self._post
        shapes = target_shapes((self._rows(), post.packing), (post.held_out.rows, post.held_out_packing))
        flight = _Flight(post, buffers, _TARGETS_SLOT, into_buffer=False)
        longest = packed_length(post.config.token_budget, post.config.bucket_tokens)
        verify = post.config.verify_copies != "off"
        for shape in self._due(shapes):
            buffer = flight.next()
            with self._reported("target", shape):
                flight.start()
                tokens = torch.randint(
                    producer.target.facts.vocab_size, (shape.documents, shape.width), generator=self._tokens
                )
                read = made_up_batch(tokens, longest, post.config.bucket_tokens)
                states, check = producer.states(read, buffer, verify=verify)
                PackedStates.of(buffer, states, post.copier, batch=0, check=check).ready.wait_host()
        flight.land()

    def drafter(self, session: DrafterSession) -> None:
        """Run the drafter forward and backward over the shapes of its rows, from its device buffers."""
        post = self._post
        flight = _Flight(post, session.buffers, _DRAFTERS_SLOT, into_buffer=True)
        # Where the softmax runs over some tokens only, a label has to be one of them.
        token = int(post.token_ids_seen[0]) if len(post.token_ids_seen) else 0
        for number, shape in enumerate(self._drafters_due(session)):
            buffer = flight.next()
            with self._reported("drafter", shape):
                flight.start()
                states = buffer.rows(shape.tokens).normal_(generator=self._states)
                row = PackedRow(made_up_row(shape, token), as_states(states, split=buffer.split))
                if number == 0 and post.world.drafter_count > 1:
                    self._meet(session, row)
                session.rehearse(row, held_out=shape.held_out)
                post.copier.mark().wait_host()
        flight.land()
        session.optimizer.clear_gradients()

    def finish(self) -> str:
        """Return what was done, in a line: '12 shapes on cuda:0, 21.3 GiB left'. A profile's peak is of training alone."""
        device = self._post.device
        number = f"{len(self._rooms)} shape{'' if len(self._rooms) == 1 else 's'}"
        line = f"{number} on {device}"
        if device.type != "cuda":
            return line
        torch.cuda.reset_peak_memory_stats(device)
        return f"{line}, {min(self._rooms, default=0) / _GIB:.1f} GiB left"

    def _rows(self) -> list[Row]:
        return list(self._post.schedule.rows_of(self._post.plan.first_step, self._post.plan.total_steps))

    def _meet(self, session: DrafterSession, row: PackedRow) -> None:
        """Run a row twice with the other drafters, none of whom has left before this. Gradients are views of buckets then.

        The first time NCCL makes its communicator; the second time DistributedDataParallel lays its buckets out anew. In
        training a resumed run would sum three drafters in another order there than the one that went on.
        """
        session.rehearse(row, last=True)
        # They are views of the buckets: kept, they would keep these beside the new ones, 6.9 GB for the 27B drafter.
        session.optimizer.clear_gradients(forget=True)
        session.rehearse(row, last=True)

    def _drafters_due(self, session: DrafterSession) -> Iterator[DrafterShape]:
        shapes = self._drafter_shapes(session)
        if self._post.world.drafter_count > 1:
            # Whoever wants to stop: the other drafters would wait for this one there.
            yield shapes.pop(0)
            shapes = shapes if self._every_shape else []
        yield from self._due(shapes)

    def _drafter_shapes(self, session: DrafterSession) -> list[DrafterShape]:
        post, backend = self._post, session.backend
        shapes = drafter_shapes(self._rows(), post.packing, post.config, backend)
        if len(post.schedule.step(post.plan.total_steps)) < post.world.drafter_count:
            shapes.append(STAND_IN)
        aside = drafter_shapes(post.held_out.rows, post.held_out_packing, post.config, backend)
        return shapes + [replace(shape, held_out=True) for shape in aside]

    def _due(self, shapes: Sequence[Shape]) -> Iterator[Shape]:
        """Yield what is to be run, until a stop is wanted."""
        for shape in shapes if self._every_shape else shapes[:1]:
            if self._post.plan.run.stop.exists():
                return
            yield shape

    @contextlib.contextmanager
    def _reported(self, role: str, shape: TargetShape | DrafterShape) -> Iterator[None]:
        """Run one shape: what fails in it is filed under it, and what it took is reported."""
        post, device = self._post, self._post.device
        post.phases.detail = f"{role} {shape} on {device}"
        post.world.pulse.beat()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        peak, room = memory_at_peak(device)
        self._rooms.append(room)
        post.telemetry.emit(
            ev.WarmedUp(
                time=time.time(),
                rank=post.world.rank,
                role=role,
                device=str(device),
                shape=str(shape),
                seconds=seconds,
                peak_bytes=peak,
                free_bytes=room,
            )
        )


def memory_at_peak(device: torch.device) -> tuple[int, int]:
    """Return (bytes in tensors at the highest, bytes that were still to be had then) since the peak was reset; 0 on a CPU."""
    if device.type != "cuda":
        return 0, 0
    peak = torch.cuda.max_memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    # What the allocator keeps beyond the peak is to be had as well; what others hold of the device, and a cap, are not.
    room = free + torch.cuda.memory_reserved(device) - peak
    cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return peak, max(0, min(room, cap - peak))


class _Flight:
    """A rank's buffers in turn, and a copy between the other one and a slot of the ring while the next shape runs.

    With a single buffer (synchronous handover) the copy is done before the buffer is used; without a ring there is none.
    """

    def __init__(self, post: Post, buffers: Sequence[PackBuffer], slot: int, *, into_buffer: bool) -> None:
        self._copier = post.copier
        self._buffers = buffers
        self._slot = None if post.joint is None else _slot_states(post, slot)
        self._into_buffer = into_buffer
        self._marks: dict[int, Mark] = {}
        self._turn = 0

    def next(self) -> PackBuffer:
        """Return the next buffer, which no copy reads or writes any more."""
        self._turn = (self._turn + 1) % len(self._buffers)
        self._land(self._turn)
        return self._buffers[self._turn]

    def start(self) -> None:
        """Start the copy of the buffer that is not in use."""
        if self._slot is None:
            return
        other = (self._turn + 1) % len(self._buffers)
        self._land(other)
        states = self._buffers[other].storage
        destination, source = (states, self._slot) if self._into_buffer else (self._slot, states)
        self._marks[other] = self._copier.copy(destination, source, after=self._copier.mark())
        if other == self._turn:
            self._land(other)

    def land(self) -> None:
        """Wait for all copies."""
        for turn in list(self._marks):
            self._land(turn)

    def _land(self, turn: int) -> None:
        if (mark := self._marks.pop(turn, None)) is not None:
            mark.wait_host()


def _slot_states(post: Post, slot: int) -> torch.Tensor:
    """Return the states' memory of a slot of this rank's first pair, for the longest row. Nothing says that they are there."""
    assert post.joint is not None
    plan, config = post.plan, post.config
    header = SlotHeader(
        batch=0,
        step=0,
        epoch=0,
        tokens=packed_length(config.token_budget, config.bucket_tokens),
        layers=plan.packed_layers,
        hidden=plan.hidden_size,
        dtype=post.dtype,
        split=config.splits_fc,
        finite=False,
    )
    return post.joint.ring.view(next(iter(post.joint.pairs.values())), slot, header).states


def made_up_batch(tokens: torch.Tensor, longest: int, bucket_tokens: int) -> ReadRow:
    """Return a batch of i64[k, width] as a reader makes one, of documents as long as fit `longest` packed positions."""
    documents, width = tokens.shape
    # One document alone may be wider than the budget, by one step of the widths.
    length = min(width, longest // documents)
    lengths = (length,) * documents
    row = DrafterShape(packed_length(length * documents, bucket_tokens), 0, lengths, (0,) * documents)
    return ReadRow(tokens, list(lengths), made_up_row(row, 0))


def made_up_row(shape: DrafterShape, token: int) -> RowTokens:
    """Return a packed row of one token, with the documents of a shape and their candidates at the end of each."""
    loss_mask = np.zeros(shape.tokens, dtype=np.uint8)
    document_ids = np.full(shape.tokens, -1, dtype=np.int64)
    position_ids = np.zeros(shape.tokens, dtype=np.int32)
    end = 0
    for document, (length, candidates) in enumerate(zip(shape.lengths, shape.candidates, strict=True)):
        start, end = end, end + length
        document_ids[start:end] = document
        position_ids[start:end] = np.arange(length)
        if candidates:
            # Whoever has a supervised successor is one: a run of them has one less than supervised tokens.
            loss_mask[end - candidates - 1 : end] = 1
    return RowTokens(
        batch=0,
        step=0,
        epoch=0,
        input_ids=torch.full((shape.tokens,), token, dtype=torch.int32),
        loss_mask=torch.from_numpy(loss_mask),
        document_ids=torch.from_numpy(document_ids),
        position_ids=torch.from_numpy(position_ids),
        tokens=end,
    )
