"""The handover on GPUs: copies on a stream of their own, against producers that are late on purpose.

`pytest -m gpu tests/trainer/pipeline/test_cuda.py` where there is a CUDA device; everywhere else these are skipped.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainer.pipeline.channel import PairChannel
from trainer.pipeline.copier import CudaCopier
from trainer.pipeline.packed import PackBuffer, PackedStates, RowTokens
from trainer.pipeline.receiver import Arrival, Fetcher, PrefetchReceiver, SyncReceiver
from trainer.pipeline.ring import Ring
from trainer.pipeline.sender import AsyncSender, Publisher, SyncSender
from trainer.pipeline.slots import create_ring_file, slot_bytes
from trainer.telemetry import StageClock

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

# About 0.1 s at 2 GHz: longer than any copy here takes, so that an order which is wrong shows every time.
LATE = 200_000_000
TOKENS, LAYERS, HIDDEN, SLOTS, BATCHES = 2048, 5, 1024, 2, 8


@pytest.fixture
def device() -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda:0")


def late_fill(tensor: torch.Tensor, value: float) -> None:
    torch.cuda._sleep(LATE)
    tensor.fill_(value)


def test_a_copy_waits_for_the_work_before_its_mark(device):
    copier = CudaCopier(device)
    source, host = torch.zeros(1 << 20, device=device), torch.zeros(1 << 20).pin_memory()
    late_fill(source, 7)
    copier.copy(host, source, after=copier.mark()).wait_host()
    assert (host == 7).all()


def test_a_mark_taken_inside_the_copy_stream_waits_for_nothing(device):
    # The story's losses of 1.0000 and -0.0000: the order that the copier exists to make impossible.
    copier = CudaCopier(device)
    source, host = torch.zeros(1 << 20, device=device), torch.zeros(1 << 20).pin_memory()
    torch.cuda.synchronize(device)
    late_fill(source, 7)
    with copier.beside():
        wrong = copier.mark()
    copier.copy(host, source, after=wrong).wait_host()
    assert (host == 0).all()


def test_a_buffer_is_not_overwritten_before_its_reader_is_done(device):
    copier = CudaCopier(device)
    buffer, host = torch.ones(1 << 20, device=device), torch.full((1 << 20,), 2.0).pin_memory()
    torch.cuda._sleep(LATE)
    read = buffer.clone()
    copier.copy(buffer, host, after=copier.mark()).wait_host()
    assert (read == 1).all()
    assert (buffer == 2).all()


@pytest.fixture
def ring_file() -> Iterator[Path]:
    # Where the trainer puts it: the pages of a file on a disk cannot be pinned.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory) / "ring"


# CUDA remembers a registered range: unmapped, its addresses may be given out again and would be refused.
kept: list[Ring] = []


def make_ring(path: Path) -> Ring:
    size = slot_bytes(TOKENS, LAYERS * HIDDEN, 2)
    if not path.exists():
        create_ring_file(path, size * SLOTS)
    ring = Ring(path, slot_size=size, slots_per_pair=SLOTS)
    ring.register_with_cuda()
    kept.append(ring)
    return ring


def test_the_mapping_of_the_ring_is_pinned(device, ring_file):
    assert make_ring(ring_file)._memory.is_pinned()


def row(batch: int) -> RowTokens:
    ids = torch.arange(TOKENS, dtype=torch.int32) + batch
    mask, documents = torch.ones(TOKENS, dtype=torch.uint8), torch.full((TOKENS,), batch, dtype=torch.int64)
    return RowTokens(batch, 1, 0, ids, mask, documents, ids, TOKENS)


def buffers(count: int, device: torch.device, split: bool) -> list[PackBuffer]:
    return [
        PackBuffer.allocate(TOKENS, LAYERS, HIDDEN, split=split, dtype=torch.bfloat16, device=device)
        for _ in range(count)
    ]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_late_states_arrive_as_they_were_packed(ring_file, device, mode, split):
    """A target on the first GPU, a drafter on the last; both sides' work is late, every copy is verified."""
    drafter_device = torch.device(f"cuda:{torch.cuda.device_count() - 1}")
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near, far = PairChannel(one, "drafter 0"), PairChannel(other, "target 0")
    copier = CudaCopier(device)
    publisher = Publisher(make_ring(ring_file), copier, StageClock(), pairs={0: 0}, channels={0: near})
    shape = {"layers": LAYERS, "hidden": HIDDEN}
    sender = (
        SyncSender(publisher, buffers(1, device, split)[0], **shape)
        if mode == "sync"
        else AsyncSender(publisher, buffers(2, device, split), **shape)
    )

    def produce() -> None:
        for batch in range(BATCHES):
            buffer = sender.buffer()
            states = buffer.rows(TOKENS)
            late_fill(states, batch + 1)
            sender.send(PackedStates.of(buffer, states, copier, verify=True), row(batch), 0)
        sender.close()

    target = threading.Thread(target=produce)
    target.start()
    alarms: list[tuple[int, str]] = []
    with torch.cuda.device(drafter_device):
        drafter_copier = CudaCopier(drafter_device)
        fetcher = Fetcher(
            make_ring(ring_file),
            drafter_copier,
            pairs={0: 0},
            channels={0: far},
            alarm=lambda batch, seen: alarms.append((batch, seen)),
        )
        arrivals = iter([Arrival(batch, 0) for batch in range(BATCHES)])
        receiver = (
            SyncReceiver(fetcher, arrivals, buffers(1, drafter_device, split)[0], drafter_copier)
            if mode == "sync"
            else PrefetchReceiver(fetcher, arrivals, buffers(2, drafter_device, split), drafter_copier)
        )
        sums: list[torch.Tensor] = []
        for batch in range(BATCHES):
            packed = receiver.receive(batch)
            # A reader as late as a backward: the next copy in must not overwrite what it has not read.
            torch.cuda._sleep(LATE)
            parts = packed.states if isinstance(packed.states, tuple) else (packed.states,)
            sums.append(torch.stack([part.float().mean() for part in parts]).mean())
            receiver.release(packed)
        assert torch.stack(sums).tolist() == [batch + 1 for batch in range(BATCHES)]
        receiver.close()
    target.join(30)
    assert not target.is_alive()
    assert alarms == []
