"""The handover on GPUs: copies on a stream of their own, against producers that are late on purpose; the races of the story, put
back; and that no step waits for the device. With one GPU both roles share it.

`pytest -m gpu tests/trainer/pipeline/test_cuda.py` where there is a CUDA device; everywhere else these are skipped.
"""

from __future__ import annotations

import gzip
import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from races import rig
from races.in_process import between_steps, run_both, slots_of_a_run
from races.machines import CudaMachine
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.pipeline.channel import PairChannel
from trainer.pipeline.checksum import captured_checksum, checksum
from trainer.pipeline.copier import CudaCopier
from trainer.pipeline.layout import Layout
from trainer.pipeline.packed import PackBuffer, PackedStates, RowTokens
from trainer.pipeline.receiver import Arrival, Fetcher, PrefetchReceiver, SyncReceiver
from trainer.pipeline.ring import Ring
from trainer.pipeline.sender import AsyncSender, Publisher, SyncSender
from trainer.pipeline.slots import create_ring_file, slot_bytes
from trainer.telemetry import StageClock
from trainer.upload import upload

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
    sender: Any = (
        SyncSender(publisher, buffers(1, device, split)[0], **shape)
        if mode == "sync"
        else AsyncSender(publisher, buffers(2, device, split), **shape)
    )

    def produce() -> None:
        for batch in range(BATCHES):
            buffer = sender.buffer()
            states = buffer.rows(TOKENS)
            late_fill(states, batch + 1)
            packed = PackedStates.of(buffer, states, copier, batch=batch, check=checksum(states))
            sender.send(packed, row(batch), 0)
        sender.close()

    target = threading.Thread(target=produce)
    target.start()
    alarms: list[str] = []
    with torch.cuda.device(drafter_device):
        drafter_copier = CudaCopier(drafter_device)
        fetcher = Fetcher(
            make_ring(ring_file),
            drafter_copier,
            pairs={0: 0},
            channels={0: far},
            verify_copies="all",
            alarm=lambda seen, _: alarms.append(seen),
            here="GPU 1 (rank 1)",
            targets=["GPU 0 (rank 0)"],
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


# ---- the checksum, where it is computed


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("hidden", [64, 33])
def test_the_device_and_the_host_sum_alike(device, split, hidden):
    lengths, tokens = [700, 1, 300], 1024
    draw = torch.Generator().manual_seed(0)
    outputs = [torch.randn(3, 704, hidden, generator=draw).to(torch.bfloat16) for _ in range(3)]
    buffer = PackBuffer.allocate(tokens, 3, hidden, split=split, dtype=torch.bfloat16, device=device)
    here = [each.to(device) for each in outputs]
    states = buffer.pack(here, lengths, tokens)
    right = int(checksum(states.cpu()))
    assert int(checksum(states)) == right
    assert int(captured_checksum(here, lengths, tokens, split=split)) == right
    assert int(captured_checksum(outputs, lengths, tokens, split=split)) == right


# ---- the races of the story


def cuda_rig(path: Path, *, mode: str, split: bool, late: tuple[str, ...]) -> rig.Rig:
    size = slot_bytes(rig.TOKENS, rig.LAYERS * rig.HIDDEN, rig.DTYPE.itemsize)
    create_ring_file(path, size * rig.SLOTS)

    def ring() -> Ring:
        made = Ring(path, slot_size=size, slots_per_pair=rig.SLOTS)
        made.register_with_cuda()
        kept.append(made)
        return made

    last = torch.device(f"cuda:{torch.cuda.device_count() - 1}")
    near, far = CudaMachine(torch.device("cuda:0"), late, "copy out"), CudaMachine(last, late, "copy in")
    return rig.Rig(near, far, ring, mode, split)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("late", [*rig.LATE[:-1], "everything"])
def test_the_order_is_right_whoever_is_late(device, ring_file, mode, split, late):
    who = rig.LATE if late == "everything" else (late,)
    assert cuda_rig(ring_file, mode=mode, split=split, late=who).run() == rig.Outcome()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", rig.RACES)
def test_every_race_of_the_story_is_caught(device, ring_file, name, split):
    race = rig.RACES[name]
    with rig.put_back(race):
        outcome = cuda_rig(ring_file, mode="async", split=split, late=(race.late,)).run()
    assert outcome.wrong, "who reads the states met none that was wrong"
    assert outcome.alarms, "verification saw nothing"
    assert all("packed on GPU 2 (rank 2)" in each for each in outcome.alarms)


# ---- both roles of a run, in threads of this process


# Of kernels that are compiled, or of the profiler: nothing that these tests are about.
whatever_is_warned_of = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def on_cuda(tiny_values, monkeypatch) -> dict[str, Any]:
    """The tiny run on GPUs; where there is one, both ranks are on it."""
    if torch.cuda.device_count() == 1:
        place = Layout.device_of
        monkeypatch.setattr(Layout, "device_of", lambda layout, rank: place(layout, rank).replace("cuda:1", "cuda:0"))
        monkeypatch.setattr("trainer.preflight.visible_gpus", lambda: 2)
    return tiny_values | {"device": "cuda", "dtype": "bfloat16", "attention_backend": "dense"}


@whatever_is_warned_of
@pytest.mark.parametrize("split", ["off", "on"])
def test_every_slot_holds_the_same_bytes_in_both_modes(device, on_cuda, tmp_path, monkeypatch, split):
    values = on_cuda | {"split_fc": split}
    asynchronous, synchronous = (
        slots_of_a_run(values | {"transfer": mode}, tmp_path, monkeypatch) for mode in ("async", "sync")
    )
    assert sorted(asynchronous) == list(range(16))
    assert synchronous == asynchronous


# After the first steps: until then memory is allocated and kernels are loaded, which waits.
FIRST_HOT, LAST_HOT = 4, 9


def hot(on_cuda: dict[str, Any], make_target: Any, architecture: str) -> dict[str, Any]:
    # fla's kernels multiply tiles of 16 and more, and so does flex. Three slots: the target is two steps ahead at most.
    wide = {"linear_key_head_dim": 32, "linear_value_head_dim": 32} if architecture.startswith("Qwen3_5") else {}
    target = make_target(architecture, tie_word_embeddings=False, head_dim=16, **wide)
    # One step more than is looked at: the last one ends with a checkpoint.
    return on_cuda | {"target_model": str(target), "epochs": 3, "max_steps": LAST_HOT + 1, "profile_interval": 0}


@whatever_is_warned_of
@pytest.mark.timeout(600)  # Kernels are compiled, for flex once a shape.
@pytest.mark.parametrize("attention", ["dense", "flex"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3_5ForCausalLM"])
def test_no_step_waits_for_the_gpu(device, on_cuda, make_target, tmp_path, monkeypatch, architecture, attention):
    """torch itself raises where an operation of either role waits; background threads wait for events alone, which it allows."""

    def hook(step: int) -> None:
        if step in (FIRST_HOT, LAST_HOT + 1):
            torch.cuda.set_sync_debug_mode("error" if step == FIRST_HOT else "default")

    between_steps(monkeypatch, hook)
    try:
        run_both(hot(on_cuda, make_target, architecture) | {"attention_backend": attention}, tmp_path)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@whatever_is_warned_of
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_what_the_host_sends_is_staged_at_once_and_never_waits(device, dtype):
    source = torch.arange(100_000).remainder(7).to(dtype)
    right, nothing = source.clone(), torch.empty(0, 3, dtype=dtype)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(LATE)
        there = [upload(source, device) for _ in range(3)]
        source.zero_()
        assert upload(nothing, device).device.type == "cuda"
        assert upload(there[0], device) is there[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(each.cpu(), right) for each in there)


@whatever_is_warned_of
def test_torch_raises_where_a_step_waits(device):
    x = torch.ones(4, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@whatever_is_warned_of
def test_the_profiler_counts_no_wait_and_no_copy_from_pageable_memory(
    device, on_cuda, make_target, tmp_path, monkeypatch
):
    """What torch cannot tell of itself: copies from pageable memory, which wait although they are `non_blocking`."""
    trace = tmp_path / "trace.json.gz"
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def hook(step: int) -> None:
        # What the device is asked it sees of all threads. It waits for the device itself as it begins and ends: outside of the
        # steps that are looked at.
        if step == FIRST_HOT - 1:
            profiler.start()
        with record_function(f"step {step} begins"):
            pass
        if step == LAST_HOT + 1:
            profiler.stop()

    between_steps(monkeypatch, hook)
    run_both(hot(on_cuda, make_target, "LlamaForCausalLM") | {"verify_copies": "all"}, tmp_path)
    profiler.export_chrome_trace(str(trace))
    with gzip.open(trace, "rt") as file:
        events = [each for each in json.load(file)["traceEvents"] if "ts" in each]
    begin, end = (
        min(each["ts"] for each in events if each.get("name") == f"step {n} begins") for n in (FIRST_HOT, LAST_HOT)
    )
    names = [str(each.get("name")) for each in events if begin <= each["ts"] < end]
    assert any(name.startswith("Memcpy HtoD (Pinned") for name in names), "the trace shows no copy at all"
    assert [name for name in names if name in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")] == []
    assert [name for name in names if name.startswith("Memcpy") and "Pageable" in name] == []
