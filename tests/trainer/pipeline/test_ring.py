"""The ring crosses a process boundary: headers, views, checksums, and a real second process."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.pipeline.checksum import checksum
from trainer.pipeline.ring import Ring, SlotHeader
from trainer.pipeline.slots import ALIGNMENT, aligned, create_ring_file, is_sampled, is_verified, slot_bytes

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
headers = st.builds(
    SlotHeader, batch=u64, step=u64, epoch=u32, tokens=u32, layers=u32, hidden=u32, dtype=dtypes,
    split=st.booleans(), finite=st.booleans(), checksum=u64,
)  # fmt: skip


def header(tokens: int = 8, *, split: bool = False, dtype: torch.dtype = torch.float32) -> SlotHeader:
    return SlotHeader(
        batch=5, step=2, epoch=0, tokens=tokens, layers=2, hidden=4, dtype=dtype, split=split, finite=True
    )


@pytest.fixture
def ring_file(tmp_path: Path) -> Path:
    path = tmp_path / "ring"
    create_ring_file(path, 6 * slot_bytes(16, 8, 8))
    return path


@pytest.fixture
def ring(ring_file: Path) -> Iterator[Ring]:
    return Ring(ring_file, slot_size=slot_bytes(16, 8, 8), slots_per_pair=2)


@given(headers)
def test_a_header_survives_the_ring(written: SlotHeader) -> None:
    data = written.pack()
    assert len(data) <= ALIGNMENT
    assert SlotHeader.unpack(data) == written


def test_a_header_lies_as_the_design_says() -> None:
    data = SlotHeader(1, 2, 3, 4, 5, 6, torch.float64, True, True, 7).pack()
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    # magic, version, batch (2 words), step, checksum, then epoch, T, L, H, dtype, layout, finite
    assert words == [0x44464C52, 1, 1, 0, 2, 0, 7, 0, 3, 4, 5, 6, 2, 1, 1]


@pytest.mark.parametrize("position", [0, 4, 48])
def test_a_foreign_header_is_refused(position: int) -> None:
    data = bytearray(header().pack())
    data[position] ^= 0x7F  # magic, version, dtype
    with pytest.raises(ValueError, match="no slot header"):
        SlotHeader.unpack(bytes(data))


def test_an_empty_slot_holds_no_header(ring: Ring) -> None:
    with pytest.raises(ValueError, match="no slot header"):
        ring.read_header(0, 0)


@given(st.integers(1, 300), st.integers(1, 64), st.sampled_from([2, 4, 8]))
def test_a_slot_is_as_large_as_its_parts(tokens: int, width: int, itemsize: int) -> None:
    size = slot_bytes(tokens, width, itemsize)
    assert size % ALIGNMENT == 0
    assert size >= ALIGNMENT + tokens * (4 + 1 + 8 + 4) + tokens * width * itemsize
    assert size < ALIGNMENT + tokens * (4 + 1 + 8 + 4) + tokens * width * itemsize + 5 * ALIGNMENT


@settings(max_examples=40)
@given(st.integers(0, 10**12))
def test_aligned(size: int) -> None:
    assert aligned(size) % ALIGNMENT == 0
    assert 0 <= aligned(size) - size < ALIGNMENT


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_parts_of_a_view_are_aligned_and_disjoint(ring: Ring, split: bool, dtype: torch.dtype) -> None:
    view = ring.view(2, 1, header(13, split=split, dtype=dtype))
    parts = [view.input_ids, view.loss_mask, view.document_ids, view.position_ids, view.states]
    assert [part.dtype for part in parts] == [torch.int32, torch.uint8, torch.int64, torch.int32, dtype]
    assert list(view.states.shape) == ([2, 13, 4] if split else [13, 8])
    start = ring.view(0, 0, header(1)).input_ids.data_ptr() - ALIGNMENT
    spans = [(part.data_ptr() - start, part.numel() * part.itemsize) for part in parts]
    slot = (2 * 2 + 1) * ring.slot_size
    assert all(offset % ALIGNMENT == 0 and offset >= slot + ALIGNMENT for offset, _ in spans)
    assert all(offset + size <= after for (offset, size), (after, _) in itertools.pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= slot + ring.slot_size


def test_a_row_that_does_not_fit_is_refused(ring: Ring) -> None:
    ring.view(0, 0, header(16, dtype=torch.float64))
    with pytest.raises(ValueError, match="do not fit"):
        ring.view(0, 0, header(17, dtype=torch.float64))


@pytest.mark.parametrize("slot", [-1, 2, 10**6])
def test_a_slot_beyond_the_pair_is_refused(ring: Ring, slot: int) -> None:
    with pytest.raises(ValueError, match="slot"):
        ring.read_header(0, slot)
    with pytest.raises(ValueError, match="slot"):
        ring.write_header(0, slot, header())


WRITER = """
import sys, torch
from pathlib import Path
from trainer.pipeline.checksum import checksum
from trainer.pipeline.ring import Ring, SlotHeader
ring = Ring(Path(sys.argv[1]), slot_size=int(sys.argv[2]), slots_per_pair=2)
for pair in range(3):
    for slot in range(2):
        number = 10 * pair + slot
        head = SlotHeader(number, 7, 1, 9, 2, 4, torch.bfloat16, True, True)
        view = ring.view(pair, slot, head)
        view.states.copy_(torch.arange(72).view(2, 9, 4) + number)
        view.input_ids.fill_(number); view.loss_mask.fill_(1); view.document_ids.fill_(number + 100)
        view.position_ids.copy_(torch.arange(9))
        ring.write_header(pair, slot, SlotHeader(number, 7, 1, 9, 2, 4, torch.bfloat16, True, True, int(checksum(view.states))))
"""


def test_another_process_reads_what_one_wrote(ring: Ring, ring_file: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    subprocess.run(
        [sys.executable, "-c", WRITER, str(ring_file), str(ring.slot_size)], check=True, cwd=root, timeout=60
    )
    for pair in range(3):
        for slot in range(2):
            number = 10 * pair + slot
            head = ring.read_header(pair, slot)
            view = ring.view(pair, slot, head)
            assert (head.batch, head.tokens, head.split) == (number, 9, True)
            assert torch.equal(view.states, (torch.arange(72).view(2, 9, 4) + number).to(torch.bfloat16))
            assert set(view.document_ids.tolist()) == {number + 100}
            assert view.position_ids.tolist() == list(range(9))
            assert int(checksum(view.states)) % 2**64 == head.checksum


# ---- the file


def test_a_ring_without_space_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    free = os.statvfs("/dev/shm")
    path = Path("/dev/shm") / f"dflash-test-{os.getpid()}"
    with pytest.raises(OSError) as caught:
        create_ring_file(path, free.f_bavail * free.f_frsize + (1 << 30))
    assert caught.value.errno == errno.ENOSPC
    assert not path.exists()


def test_the_pages_of_a_ring_are_reserved(ring_file: Path) -> None:
    assert ring_file.stat().st_blocks * 512 >= ring_file.stat().st_size == 6 * slot_bytes(16, 8, 8)
    assert ring_file.stat().st_mode & 0o777 == 0o600


def test_a_ring_never_takes_over_an_existing_file(ring_file: Path) -> None:
    with pytest.raises(FileExistsError):
        create_ring_file(ring_file, 4096)
    assert ring_file.stat().st_size == 6 * slot_bytes(16, 8, 8)


def test_the_sample_is_one_in_64_and_meets_every_pair() -> None:
    sampled = [batch for batch in range(64 * 200) if is_sampled(batch)]
    assert 150 < len(sampled) < 250
    assert {(batch % 5, batch % 3) for batch in sampled} == {(t, d) for t in range(5) for d in range(3)}


def test_who_is_verified_follows_from_the_setting_and_the_batch_alone() -> None:
    # Both ends ask for themselves; a number that has to come with the states could be lost with them.
    batches = range(500)
    assert [batch for batch in batches if is_verified("sample", batch)] == [
        each for each in batches if is_sampled(each)
    ]
    assert all(is_verified("all", batch) and not is_verified("off", batch) for batch in batches)
