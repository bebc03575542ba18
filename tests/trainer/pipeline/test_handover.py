"""Sender and receiver over a real ring and real sockets, in threads: bounds, order, errors, and every way to end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.pipeline.channel import MessageKind, PairChannel, PeerDied, SlotMessage
from trainer.pipeline.checksum import checksum
from trainer.pipeline.copier import HostCopier
from trainer.pipeline.handover import Receiver, Sender, StreamClosed
from trainer.pipeline.packed import PackBuffer, PackedStates, RowTokens
from trainer.pipeline.receiver import Arrival, Fetcher, PrefetchReceiver, SyncReceiver
from trainer.pipeline.ring import Ring
from trainer.pipeline.sender import AsyncSender, Publisher, SyncSender
from trainer.pipeline.slots import create_ring_file, slot_bytes
from trainer.telemetry import StageClock

TOKENS, LAYERS, HIDDEN, SLOTS = 16, 2, 4, 2
COPIER = HostCopier()
MODES = ["async", "sync"]


def row(batch: int, tokens: int = 8) -> RowTokens:
    return RowTokens(
        batch=batch,
        step=1 + batch // 4,
        epoch=0,
        input_ids=torch.arange(tokens, dtype=torch.int32) + batch,
        loss_mask=torch.ones(tokens, dtype=torch.uint8),
        document_ids=torch.tensor([batch] * (tokens - 2) + [-1, -1]),
        position_ids=torch.arange(tokens, dtype=torch.int32),
        tokens=tokens - 2,
    )


def buffers(count: int, split: bool = False) -> list[PackBuffer]:
    make = lambda: PackBuffer.allocate(  # noqa: E731
        TOKENS, LAYERS, HIDDEN, split=split, dtype=torch.float32, device=torch.device("cpu")
    )
    return [make() for _ in range(count)]


@dataclass
class Joint:
    """t targets and d drafters over one ring."""

    ring: Ring
    targets: int
    drafters: int
    sockets: dict[tuple[int, int], tuple[PairChannel, PairChannel]] = field(default_factory=dict)
    alarms: list[tuple[str, int]] = field(default_factory=list)

    def sender(self, target: int, mode: str = "async") -> Sender:
        publisher = Publisher(
            self.ring,
            COPIER,
            StageClock(),
            pairs={drafter: target * self.drafters + drafter for drafter in range(self.drafters)},
            channels={drafter: self.sockets[target, drafter][0] for drafter in range(self.drafters)},
        )
        shape = {"layers": LAYERS, "hidden": HIDDEN}
        if mode == "sync":
            return SyncSender(publisher, buffers(1)[0], **shape)
        return AsyncSender(publisher, buffers(2), **shape)

    def receiver(self, drafter: int, arrivals: list[Arrival], mode: str = "async", verify: str = "all") -> Receiver:
        fetcher = Fetcher(
            self.ring,
            COPIER,
            pairs={target: target * self.drafters + drafter for target in range(self.targets)},
            channels={target: self.sockets[target, drafter][1] for target in range(self.targets)},
            verify_copies=verify,
            alarm=lambda seen, step: self.alarms.append((seen, step)),
            here=f"GPU {5 + drafter} (rank {self.targets + drafter})",
            targets=[f"GPU {target} (rank {target})" for target in range(self.targets)],
        )
        if mode == "sync":
            return SyncReceiver(fetcher, iter(arrivals), buffers(1)[0], COPIER)
        return PrefetchReceiver(fetcher, iter(arrivals), buffers(2), COPIER)


Make = Callable[..., Joint]


@pytest.fixture
def joint(tmp_path: Path) -> Iterator[Make]:
    made: list[Joint] = []

    def make(targets: int = 1, drafters: int = 1) -> Joint:
        path = tmp_path / "ring"
        size = slot_bytes(TOKENS, LAYERS * HIDDEN, 4)
        create_ring_file(path, size * SLOTS * targets * drafters)
        result = Joint(Ring(path, slot_size=size, slots_per_pair=SLOTS), targets, drafters)
        for target in range(targets):
            for drafter in range(drafters):
                one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ends = PairChannel(one, f"drafter {drafter}"), PairChannel(other, f"target {target}")
                result.sockets[target, drafter] = ends
        made.append(result)
        return result

    yield make
    for each in made:
        for ends in each.sockets.values():
            for end in ends:
                end.close()


def send(sender: Sender, batch: int, drafter: int = 0, *, verify: bool = True, value: float | None = None) -> None:
    buffer = sender.buffer()
    states = buffer.rows(8)
    states.fill_(batch + 0.5 if value is None else value)
    check = checksum(states) if verify else None
    sender.send(PackedStates.of(buffer, states, COPIER, batch=batch, check=check), row(batch), drafter)


class Work:
    """A call in a thread of its own whose error, and whose failure to end, the test sees."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error

    def join(self, seconds: float = 10) -> BaseException | None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "deadlock"
        return self.error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()


@pytest.mark.parametrize("into", MODES)
@pytest.mark.parametrize("out", MODES)
def test_every_row_arrives_as_it_was_packed(joint: Make, out: str, into: str) -> None:
    both = joint()
    sender = both.sender(0, out)

    def produce() -> None:
        for batch in range(12):
            send(sender, batch)
        sender.close()

    work = Work(produce)
    receiver = both.receiver(0, [Arrival(batch, 0) for batch in range(12)], into)
    for batch in range(12):
        packed = receiver.receive(batch)
        assert packed.row.batch == batch
        assert torch.equal(packed.row.input_ids, row(batch).input_ids)
        assert torch.equal(packed.row.document_ids, row(batch).document_ids)
        assert packed.row.tokens == 6
        assert isinstance(packed.states, torch.Tensor)
        assert torch.equal(packed.states, torch.full((8, LAYERS * HIDDEN), batch + 0.5))
        receiver.release(packed)
    closing = Work(receiver.close)
    assert work.join() is None
    assert closing.join() is None
    assert both.alarms == []


@pytest.mark.parametrize("mode", MODES)
def test_what_is_in_flight_is_bounded(joint: Make, mode: str) -> None:
    both = joint()
    sender = both.sender(0, mode)
    sent: list[int] = []

    def produce() -> None:
        for batch in range(50):
            send(sender, batch)
            sent.append(batch)

    work = Work(produce)
    deadline = time.monotonic() + 5
    while len(sent) < SLOTS and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    # Two slots, and with async two pack buffers behind them; nobody has taken anything.
    assert len(sent) == (SLOTS if mode == "sync" else SLOTS + 2)
    both.sockets[0, 0][1].say_goodbye()
    assert isinstance(work.join(), StreamClosed)


def test_a_slot_is_never_filled_again_before_it_was_freed(joint: Make) -> None:
    both = joint()
    sender = both.sender(0)
    drafter = both.sockets[0, 0][1]
    work = Work(lambda: [send(sender, batch) for batch in range(8)])
    held: dict[int, int] = {}
    seen = 0
    for _ in range(8):
        message = drafter.receive()
        assert message.slot not in held
        held[message.slot] = message.batch
        seen += 1
        if len(held) == SLOTS:
            time.sleep(0.02)  # Long enough for a publisher that does not wait.
            slot, batch = held.popitem()
            assert both.ring.read_header(0, slot).batch == batch
            states = both.ring.view(0, slot, both.ring.read_header(0, slot)).states
            assert set(states.flatten().tolist()) == {batch + 0.5}
            drafter.send(SlotMessage(MessageKind.FREE, slot, batch))
    assert seen == 8
    assert work.join() is None


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_out_of_order_is_refused(joint: Make, mode: str) -> None:
    both = joint()
    sender = both.sender(0)
    send(sender, 1)
    receiver = both.receiver(0, [Arrival(0, 0)], mode)
    with pytest.raises(ValueError, match="expected batch 0, got 1"):
        receiver.receive(0)


def test_a_drafter_that_asks_out_of_schedule_is_refused(joint: Make) -> None:
    both = joint()
    send(both.sender(0), 0)
    with pytest.raises(ValueError, match="asked for batch 7 and got 0"):
        both.receiver(0, [Arrival(0, 0)]).receive(7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("value", "packed"), [(1.5, "finite when"), (float("nan"), "not finite when")])
def test_a_wrong_copy_raises_the_alarm_with_the_batch(joint: Make, mode: str, value: float, packed: str) -> None:
    both = joint()
    sender = both.sender(0, "sync")
    send(sender, 0)
    send(sender, 1, value=value)
    states = both.ring.view(0, 1, both.ring.read_header(0, 1)).states
    states[3, 2] += 1.0 if value == value else 0.0
    if value != value:
        states[3, 2] = 0.0
    receiver = both.receiver(0, [Arrival(0, 0), Arrival(1, 0)], mode)
    for batch in range(2):
        receiver.release(receiver.receive(batch))
    assert both.alarms == [(f"batch 1: {packed} packed on GPU 0 (rank 0), wrong on GPU 5 (rank 1)", 1)]


@pytest.mark.parametrize("mode", MODES)
def test_states_that_change_while_they_are_used_raise_the_alarm(joint: Make, mode: str) -> None:
    both = joint()
    sender = both.sender(0, "sync")
    receiver = both.receiver(0, [Arrival(0, 0), Arrival(1, 0)], mode)
    for batch in range(2):
        send(sender, batch)
        packed = receiver.receive(batch)
        if batch == 0:
            assert isinstance(packed.states, torch.Tensor)
            packed.states[2, 1] += 1
        receiver.release(packed)
    Work(sender.close)
    receiver.close()
    seen = "right when it arrived on GPU 5 (rank 1), overwritten while in use"
    assert both.alarms == [(f"batch 0: finite when packed on GPU 0 (rank 0), {seen}", 1)]


def test_without_verification_nothing_is_compared(joint: Make) -> None:
    both = joint()
    send(both.sender(0, "sync"), 0, verify=False)
    both.ring.view(0, 0, both.ring.read_header(0, 0)).states.zero_()
    both.receiver(0, [Arrival(0, 0)], verify="off").receive(0)
    assert both.alarms == []


@pytest.mark.parametrize("verify", ["all", "off"])
def test_a_row_that_left_before_it_was_packed_is_an_alarm(joint: Make, verify: str) -> None:
    both = joint()
    sender = both.sender(0, "sync")
    buffer = sender.buffer()
    packed = PackedStates.of(buffer, buffer.rows(8), COPIER, batch=0, check=torch.tensor(0))
    packed.proof.zero_()  # What lies in memory that nobody has written yet; zeros have the checksum 0, too.
    sender.send(packed, row(3), 0)
    both.receiver(0, [Arrival(3, 0)], verify=verify).receive(3)
    assert both.alarms == [("batch 3: copied before it was packed on GPU 0 (rank 0), wrong on GPU 5 (rank 1)", 1)]


def test_a_checksum_that_did_not_come_is_an_alarm(joint: Make) -> None:
    # It travels as the states do: a copy that is too early brings neither, and must not pass for one that nobody asked for.
    both = joint()
    send(both.sender(0, "sync"), 0, verify=False)
    both.receiver(0, [Arrival(0, 0)]).receive(0)
    assert both.alarms == [("batch 0: finite when packed on GPU 0 (rank 0), wrong on GPU 5 (rank 1)", 1)]


def test_the_death_of_a_drafter_reaches_the_targets_loop(joint: Make) -> None:
    both = joint()
    sender = both.sender(0)
    send(sender, 0)
    both.sockets[0, 0][1].close()

    def produce() -> None:
        for batch in range(1, 20):
            send(sender, batch)

    error = Work(produce).join()
    assert isinstance(error, PeerDied)
    assert "drafter 0" in str(error)
    with pytest.raises(PeerDied):
        sender.buffer()  # And again: it does not hang the second time.
    assert isinstance(Work(sender.close).join(), PeerDied)


@pytest.mark.parametrize("mode", MODES)
def test_the_death_of_a_target_reaches_the_drafters_loop(joint: Make, mode: str) -> None:
    both = joint()
    receiver = both.receiver(0, [Arrival(0, 0), Arrival(1, 0)], mode)
    both.sockets[0, 0][0].close()
    for _ in range(2):
        error = Work(lambda: receiver.receive(0)).join()
        assert isinstance(error, PeerDied)
        assert "target 0" in str(error)


def test_the_publishers_own_error_reaches_the_loop(joint: Make) -> None:
    both = joint()
    sender = both.sender(0)
    buffer = sender.buffer()
    states = torch.zeros(TOKENS + 16, LAYERS * HIDDEN)
    sender.send(PackedStates.of(buffer, states, COPIER, batch=0), row(0, TOKENS + 16), 0)

    def produce() -> None:
        for batch in range(1, 5):
            send(sender, batch)

    error = Work(produce).join()
    assert isinstance(error, ValueError)
    assert "do not fit" in str(error)


@pytest.mark.parametrize("mode", MODES)
def test_a_target_that_leaves_early_is_no_silence(joint: Make, mode: str) -> None:
    both = joint()
    both.sockets[0, 0][0].say_goodbye()
    receiver = both.receiver(0, [Arrival(0, 0)], mode)
    assert isinstance(Work(lambda: receiver.receive(0)).join(), StreamClosed)


def deal(targets: int, drafters: int, count: int) -> list[tuple[int, int, int]]:
    return [(batch, batch % targets, (batch // targets) % drafters) for batch in range(count)]


@pytest.mark.parametrize("out", MODES)
@pytest.mark.parametrize("into", MODES)
@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (1, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("slow", ["targets", "drafters"])
def test_a_stop_in_the_middle_ends_every_side(
    joint: Make, targets: int, drafters: int, slow: str, out: str, into: str
) -> None:
    """Drafters stop while targets are blocked on full rings, or while they themselves wait for slow targets."""
    both = joint(targets, drafters)
    dealt = deal(targets, drafters, 40)
    stop_at = 12
    # Drafters agree on the last step in its all-reduce: nobody leaves before everybody has had its rows.
    all_reduce = threading.Barrier(drafters)

    def produce(target: int) -> None:
        sender = both.sender(target, out)
        try:
            for batch, by, to in dealt:
                if by == target:
                    time.sleep(0.01 if slow == "targets" else 0)
                    send(sender, batch, to)
        except StreamClosed:
            pass
        sender.close()

    def train(drafter: int) -> None:
        mine = [(batch, by) for batch, by, to in dealt if to == drafter]
        receiver = both.receiver(drafter, [Arrival(*each) for each in mine], into)
        for batch, _ in mine:
            if batch >= stop_at:
                break
            time.sleep(0.01 if slow == "drafters" else 0)
            receiver.release(receiver.receive(batch))
        all_reduce.wait(10)
        receiver.close()

    works = [Work(lambda target=target: produce(target)) for target in range(targets)]
    works += [Work(lambda drafter=drafter: train(drafter)) for drafter in range(drafters)]
    assert [work.join() for work in works] == [None] * (targets + drafters)
