"""Tensors go from files to a GPU through small pinned buffers: the same bytes, in bounded host memory, whatever is late."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from remote.protocol.errors import DflashError, ExitCode
from trainer.pipeline.copier import HostCopier, Mark
from trainer.target.facts import TensorEntry, read_header
from trainer.target.load import load_target
from trainer.target.staging import Load, Staging, staged_tensors
from trainer.target.weights import read_tensors

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8]


def entries_of(*files: Path) -> dict[str, TensorEntry]:
    return {name: entry for file in files for name, entry in read_header(file).items()}


@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=12),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=12, max_size=12),
    threads=st.integers(1, 4),
    piece=st.integers(1, 97),
    dtype=st.sampled_from(DTYPES[:4]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_staged_equals_what_is_mapped(tmp_path: Path, shapes, dtypes, threads, piece, dtype) -> None:
    tensors = {
        f"t{number}": (torch.randn(shape) * 9).to(kind)
        for number, (shape, kind) in enumerate(zip(shapes, dtypes, strict=False))
    }
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    files = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for half, file in zip(halves, files, strict=True):
        save_file(half, file)
    entries = entries_of(*files)
    mapped = dict(read_tensors(entries, tensors, dtype=dtype, device=CPU))
    load = Load(entries, list(tensors), dtype, CPU)
    staged = list(staged_tensors(load, HostCopier(), threads=threads, piece=piece))
    assert [name for name, _ in staged] == list(tensors)
    for name, tensor in staged:
        assert tensor.dtype == dtype
        assert tensor.shape == tensors[name].shape
        assert torch.equal(tensor, mapped[name]), name


class LateMark:
    def __init__(self, copier: LateCopier) -> None:
        self._copier = copier

    def wait_host(self) -> None:
        for destination, source in self._copier.waiting:
            destination.copy_(source)
        self._copier.waiting.clear()

    def seconds(self) -> float:
        return 0.0


class LateCopier(HostCopier):
    """Copies when somebody waits for it, as a busy GPU would."""

    def __init__(self) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy_here(self, destination: torch.Tensor, source: torch.Tensor) -> Mark:
        self.waiting.append((destination, source))
        return LateMark(self)


def read_late(path: Path, copier: LateCopier, staging: Staging, count: int) -> torch.Tensor:
    into = torch.zeros(count, dtype=torch.uint8)
    descriptor = os.open(path, os.O_RDONLY)
    staging.load(descriptor, 3, into)
    staging.finish()
    os.close(descriptor)
    LateMark(copier).wait_host()
    return into


def test_a_buffer_is_not_refilled_before_its_copy_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = torch.randint(256, (1003,), dtype=torch.uint8)
    path = tmp_path / "file"
    path.write_bytes(content.numpy().tobytes())
    copier = LateCopier()
    assert torch.equal(read_late(path, copier, Staging(copier, piece=64, pinned=False), 1000), content[3:])
    # Put back on purpose: without the wait the late copies read what came after.
    monkeypatch.setattr(Staging, "_wait", lambda staging, turn: None)
    assert not torch.equal(read_late(path, copier, Staging(copier, piece=64, pinned=False), 1000), content[3:])


def sparse(path: Path, tensors: int, size: int) -> Path:
    """Write a safetensors file of uint8 zeros, which takes no room on the disk."""
    offsets = [(number * size, (number + 1) * size) for number in range(tensors)]
    header = {f"t{n}": {"dtype": "U8", "shape": [size], "data_offsets": list(span)} for n, span in enumerate(offsets)}
    data = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + tensors * size)
    return path


PRIVATE = """
import sys, threading, torch
from pathlib import Path
from trainer.pipeline.copier import HostCopier
from trainer.target.facts import read_header
from trainer.target.staging import Load, staged_tensors

def private():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "Private_Clean"))) << 10

class Sink(HostCopier):
    peak = 0
    def copy_here(self, destination, source):
        Sink.peak = max(Sink.peak, private())
        return self.mark()

entries = read_header(Path(sys.argv[1]))
load = Load(entries, list(entries), torch.uint8, torch.device("meta"))
# What a first thread, and the first reading of the figures, take.
thread = threading.Thread(target=private); thread.start(); thread.join()
for piece in (1 << 20, 100 << 20):
    Sink.peak = before = private()
    count = sum(1 for _ in staged_tensors(load, Sink(), threads=2, piece=piece))
    print(count, (Sink.peak - before) >> 20)
"""


def test_host_memory_is_bounded_by_the_buffers(tmp_path: Path) -> None:
    """Read to a device without memory, 300 MB: what is left is what the host needs."""
    path = sparse(tmp_path / "model.safetensors", 3, 100 << 20)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PRIVATE, str(path)], env=environment, capture_output=True, text=True, check=True
    )
    (count, small), (again, large) = ([int(word) for word in line.split()] for line in done.stdout.splitlines())
    assert count == again == 3
    # 2 threads x 2 buffers of 1 MiB; the rest is Python's own.
    assert small < 24
    assert large > 100, "the measurement would not see a tensor that is kept on the host"


def test_who_has_enough_leaves_the_rest_unread(tmp_path: Path) -> None:
    path = sparse(tmp_path / "model.safetensors", 64, 64)
    entries = entries_of(path)
    copier = LateCopier()
    tensors = staged_tensors(Load(entries, list(entries), torch.uint8, CPU), copier, threads=1, piece=64)
    next(tensors)
    tensors.close()
    assert not copier.waiting, "a copy is under way while its buffer is given back"


def test_a_file_that_was_cut_off_or_lies_is_refused(tmp_path: Path) -> None:
    path = sparse(tmp_path / "model.safetensors", 2, 1000)
    entries = entries_of(path)
    load = Load(entries, list(entries), torch.uint8, CPU)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(DflashError, match="cannot read") as caught:
        list(staged_tensors(load, HostCopier()))
    assert caught.value.code is ExitCode.PREFLIGHT
    assert "it ends too early" in caught.value.cause
    path.unlink()
    with pytest.raises(DflashError, match="cannot read") as caught:
        list(staged_tensors(load, HostCopier()))
    assert "No such file" in caught.value.cause
    wrong = {"t0": TensorEntry(path, (7, 3), "F8_E4M3", 0, 21), "t1": TensorEntry(path, (7, 3), "F32", 0, 21)}
    for name in wrong:
        with pytest.raises(DflashError, match="cannot read") as caught:
            list(staged_tensors(Load(wrong, [name], torch.float32, CPU), HostCopier()))
        assert "[7, 3]" in caught.value.cause


def test_a_load_tells_how_far_it_is(make_target: Callable[..., Path]) -> None:
    said: list[tuple[int, int]] = []
    load_target(
        make_target(),
        dtype=torch.float32,
        device="cpu",
        target_layer_ids=(0, 2),
        progress=lambda *each: said.append(each),
    )
    assert said[-1][0] == said[-1][1] > 0
    assert [read for read, _ in said] == sorted({read for read, _ in said})


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def device() -> torch.device:
    return torch.device(f"cuda:{torch.cuda.device_count() - 1}")


class TestOnGpu:
    pytestmark = gpu

    def test_the_bytes_are_right(self, device: torch.device, tmp_path: Path) -> None:
        tensors = {f"t{n}": torch.randn(1000 + n, 777).bfloat16() for n in range(40)}
        save_file(tensors, tmp_path / "model.safetensors")
        entries = entries_of(tmp_path / "model.safetensors")
        for dtype in (torch.bfloat16, torch.float32):
            for name, tensor in read_tensors(entries, tensors, dtype=dtype, device=device):
                assert tensor.device == device
                assert torch.equal(tensor.cpu(), tensors[name].to(dtype)), name

    def test_six_gigabytes_take_less_than_two_of_the_host(self, device: torch.device, tmp_path: Path) -> None:
        path = sparse(tmp_path / "model.safetensors", 24, 256 << 20)
        entries = entries_of(path)
        # CUDA's own, and that of pinned memory.
        torch.zeros(1, device=device).cpu()
        torch.zeros(1, pin_memory=True)
        before = peak = private()
        for _, tensor in read_tensors(entries, entries, dtype=torch.uint8, device=device):
            peak = max(peak, private())
            del tensor
        assert (peak - before) / (1 << 30) < 2


def private() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "Private_Clean"))) << 10
