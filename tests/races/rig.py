"""A target and a drafter over a real ring, with a toy model at either end, and the story's races put back on purpose.

Producer, pack buffers, sender, ring, sockets, receiver and verification are the trainer's own. Every batch has states that
follow from its tokens, so that what the drafter read can be compared with what it should have.
"""

from __future__ import annotations

import contextlib
import inspect
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from mutation.code import Mutant, mutated
from races.machines import CudaMachine, LateMachine
from torch import nn

from trainer.data.rows import Row
from trainer.data.schedule import MicroBatch
from trainer.pipeline.channel import PairChannel
from trainer.pipeline.packed import PackBuffer, PackedStates
from trainer.pipeline.reader import RowReader, packed_length
from trainer.pipeline.receiver import Arrival, Fetcher, PrefetchReceiver, SyncReceiver
from trainer.pipeline.ring import Ring
from trainer.pipeline.sender import AsyncSender, Publisher, SyncSender
from trainer.pipeline.slots import create_ring_file, slot_bytes
from trainer.pipeline.target_side import Producer, produce
from trainer.telemetry import StageClock

LAYERS, HIDDEN, TOKENS, SLOTS, BATCHES, BUCKET = 3, 4, 48, 2, 6, 16
DTYPE = torch.float32
Machine = LateMachine | CudaMachine

LATE = ("producer", "copy out", "copy in", "reader", "second")
"""What can be late: the target's forward, either copy, the drafter's backward, and a second stream that should not be."""


class ToyDataset:
    """Documents of 9 to 16 tokens, no two alike."""

    def document(self, index: int) -> Any:
        draw = np.random.default_rng(index)
        tokens = draw.integers(1, 1000, size=int(draw.integers(9, 17)), dtype=np.int64)
        return SimpleNamespace(input_ids=tokens, loss_mask=np.ones(len(tokens), dtype=np.uint8))


def micro_batches() -> list[MicroBatch]:
    return [MicroBatch(b, 1 + b // 3, 0, Row((3 * b, 3 * b + 1, 3 * b + 2), 0), 0, 0, 0) for b in range(BATCHES)]


def values(input_ids: torch.Tensor, layer: int) -> torch.Tensor:
    """Return what a layer puts out, f32[k, width, H]: other numbers for each token, layer and column."""
    columns = torch.arange(HIDDEN, device=input_ids.device)
    return (input_ids[:, :, None] * 64 + layer * 8 + columns).to(DTYPE)


class ToyTarget:
    """What stands for the forward of a target."""

    def __init__(self, machine: Machine) -> None:
        self.stack = nn.Module()
        self._machine = machine

    def capture(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        self._machine.be_late("producer")
        outputs = [self._machine.block(layer, (*input_ids.shape, HIDDEN)) for layer in range(LAYERS)]
        for layer, output in enumerate(outputs):
            output.copy_(values(input_ids, layer))
        return outputs


class NoTimer:
    """A profile timer that is never due."""

    def begin(self) -> None:
        return

    def tick(self) -> bool:
        return False


def expected(split: bool) -> list[torch.Tensor]:
    """Return the states of each batch, packed at once."""
    reader, packed = RowReader(ToyDataset(), BUCKET), []
    for each in micro_batches():
        read = reader.read(each)
        buffer = PackBuffer.allocate(TOKENS, LAYERS, HIDDEN, split=split, dtype=DTYPE, device=torch.device("cpu"))
        outputs = [values(read.padded, layer) for layer in range(LAYERS)]
        packed.append(buffer.pack(outputs, read.lengths, packed_length(sum(read.lengths), BUCKET)))
    return packed


@dataclass
class Outcome:
    """What a run through the rig showed. `wrong`: batches whose states were not right when the drafter read them."""

    wrong: list[int] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)


@dataclass
class Rig:
    """Both sides, joined."""

    near: Machine
    far: Machine
    ring: Callable[[], Ring]
    mode: str
    split: bool

    def run(self) -> Outcome:
        """Hand all batches over; raises what either side raises."""
        global _current
        _current = self
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors: list[BaseException] = []
        target = threading.Thread(target=self._produce, args=(PairChannel(one, "drafter 0"), errors), daemon=True)
        target.start()
        outcome = self._train(PairChannel(other, "target 0"))
        target.join(30)
        assert not target.is_alive(), "deadlock"
        for error in errors:
            raise error
        return outcome

    def _buffers(self, machine: Machine, count: int) -> list[PackBuffer]:
        made = [
            PackBuffer.allocate(TOKENS, LAYERS, HIDDEN, split=self.split, dtype=DTYPE, device=machine.device)
            for _ in range(count)
        ]
        for each in made:
            machine.own(each.storage)
        return made

    def _produce(self, channel: PairChannel, errors: list[BaseException]) -> None:
        machine, clock = self.near, StageClock()
        shape = {"layers": LAYERS, "hidden": HIDDEN}
        try:
            with machine.working():
                publisher = Publisher(self.ring(), machine.copier, clock, pairs={0: 0}, channels={0: channel})
                sender = (
                    SyncSender(publisher, self._buffers(machine, 1)[0], **shape)
                    if self.mode == "sync"
                    else AsyncSender(publisher, self._buffers(machine, 2), **shape)
                )
                reader: Any = RowReader(ToyDataset(), BUCKET)
                target: Any = ToyTarget(machine)
                timer: Any = NoTimer()
                producer = Producer(target, reader, clock, device=machine.device, verify_copies="all")
                produce(producer, iter(micro_batches()), sender, machine.copier, clock, timer)
        except BaseException as error:
            errors.append(error)
            channel.close()

    def _train(self, channel: PairChannel) -> Outcome:
        machine, outcome = self.far, Outcome()
        read: list[torch.Tensor] = []
        with machine.working():
            fetcher = Fetcher(
                self.ring(),
                machine.copier,
                pairs={0: 0},
                channels={0: channel},
                verify_copies="all",
                alarm=lambda seen, _: outcome.alarms.append(seen),
                here="GPU 6 (rank 6)",
                targets=["GPU 2 (rank 2)"],
            )
            arrivals = iter([Arrival(each.b, each.target) for each in micro_batches()])
            receiver = (
                SyncReceiver(fetcher, arrivals, self._buffers(machine, 1)[0], machine.copier)
                if self.mode == "sync"
                else PrefetchReceiver(fetcher, arrivals, self._buffers(machine, 2), machine.copier)
            )
            for each in micro_batches():
                packed = receiver.receive(each.b)
                machine.be_late("reader")
                states = packed.states
                read.append(torch.stack(list(states)) if isinstance(states, tuple) else states.clone())
                receiver.release(packed)
            receiver.close()
        machine.synchronize()
        outcome.wrong = [
            batch
            for batch, (seen, right) in enumerate(zip(read, expected(self.split), strict=True))
            if not torch.equal(seen.cpu(), right)
        ]
        return outcome


_current: Rig | None = None


def second_stream(*, behind: bool = False) -> contextlib.AbstractContextManager[None]:
    """The target's second stream, for mutants."""
    assert _current is not None
    return _current.near.second(behind=behind)


@contextlib.contextmanager
def late_rig(path: Path, *, mode: str, split: bool, late: tuple[str, ...], seconds: float) -> Iterator[Rig]:
    """Yield a rig on the CPU."""
    near, far = LateMachine(late, seconds, "copy out"), LateMachine(late, seconds, "copy in")
    size = slot_bytes(TOKENS, LAYERS * HIDDEN, DTYPE.itemsize)
    path.unlink(missing_ok=True)
    create_ring_file(path, size * SLOTS)
    yield Rig(near, far, lambda: Ring(path, slot_size=size, slots_per_pair=SLOTS), mode, split)
    near.close()
    far.close()


def _mutant(owner: type, text: str, instead: str) -> Mutant:
    """Return the mutant of the one function of a class that has this text."""
    functions = [getattr(each, "__func__", each) for each in vars(owner).values()]
    file = inspect.getfile(owner)  # Those that dataclasses made are in none.
    written = [each for each in functions if inspect.isfunction(each) and each.__code__.co_filename == file]
    (found,) = (each for each in written if text in inspect.getsource(each))
    return Mutant(found, text, instead, check=lambda: None)


_PACK = "            states = buffer.pack(captured, read.lengths, tokens)\n"
_AT_ONCE = "        with self._copier.beside():\n            at_once = self._copier.mark()\n"
_VERIFY = "        row = self._verify(row, states, done)\n"
_COPIED = '        self._clock.copied("copy_in", done.seconds())\n'
_GIVE_BACK = "        channel.send(SlotMessage(MessageKind.FREE, message.slot, message.batch))\n"
_SECOND = "from races.rig import second_stream\n"


@dataclass(frozen=True)
class Race:
    """A wrong order of the story: what was written, and who has to be late for it to show. `rule`: of the pipeline."""

    rule: int
    mutants: tuple[Mutant, ...]
    late: str


RACES = {
    "packed on a second stream": Race(
        1,
        (
            _mutant(
                Producer,
                _PACK,
                f"            {_SECOND}            with second_stream():\n    {_PACK}",
            ),
        ),
        "producer",
    ),
    "published before the copy out is done": Race(
        2,
        (
            _mutant(
                Publisher,
                '        done.wait_host()\n        self._clock.copied("copy_out", copied.seconds())\n',
                "",
            ),
        ),
        "copy out",
    ),
    "a row used before its copy in is done": Race(
        2,
        (_mutant(Fetcher, f"{_VERIFY}{_COPIED}{_GIVE_BACK}", _GIVE_BACK),),
        "copy in",
    ),
    "the mark taken inside the copy stream": Race(
        3,
        (
            _mutant(
                Publisher,
                "        copied = self._copier.copy(view.states, packed.states, after=packed.ready)\n",
                f"{_AT_ONCE}        copied = self._copier.copy(view.states, packed.states, after=at_once)\n",
            ),
        ),
        "producer",
    ),
    "the pack buffer filled again before the copy out of it is done": Race(
        4,
        (
            _mutant(
                AsyncSender,
                "        self._jobs.put((packed, row, drafter))\n",
                "        self._jobs.put((packed, row, drafter))\n        self._buffers.put(packed.buffer)\n",
            ),
        ),
        "copy out",
    ),
    "the host slot given back before the copy in is done": Race(
        4,
        (
            _mutant(
                Fetcher,
                f"{_VERIFY}{_COPIED}{_GIVE_BACK}",
                f"{_GIVE_BACK}{_VERIFY}{_COPIED}",
            ),
        ),
        "copy in",
    ),
    "captured outputs freed while another stream reads them": Race(
        4,
        (
            _mutant(
                Producer,
                _PACK,
                f"            {_SECOND}            with second_stream(behind=True):\n    {_PACK}",
            ),
            # Even the copy waits for that stream: what is wrong is the next forward, which got the memory again.
            _mutant(
                PackedStates,
                "        return cls(buffer, states, copier.mark(), proof)\n",
                f"        {_SECOND}        with second_stream():\n            ready = copier.mark()\n"
                "        return cls(buffer, states, ready, proof)\n",
            ),
        ),
        "second",
    ),
    "the device slot filled again while the backward reads it": Race(
        4,
        (
            _mutant(
                Fetcher,
                "        done = self._copier.copy(states, view.states, after=free.mark)\n",
                f"{_AT_ONCE}        done = self._copier.copy(states, view.states, after=at_once)\n",
            ),
        ),
        "reader",
    ),
}


@contextlib.contextmanager
def put_back(race: Race) -> Iterator[None]:
    """Run the block with a race of the story in the trainer's code."""
    with contextlib.ExitStack() as stack:
        for mutant in race.mutants:
            stack.enter_context(mutated(mutant))
        yield
