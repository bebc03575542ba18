"""Reading and packing: positions, padding, and bytes that depend on nothing but the batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.documents import Dataset, open_dataset
from trainer.data.rows import Row, padded_width
from trainer.data.schedule import MicroBatch
from trainer.pipeline.checksum import checksum
from trainer.pipeline.copier import HostCopier, make_copier
from trainer.pipeline.packed import PackBuffer, PackedStates, as_states
from trainer.pipeline.reader import RowReader, packed_length

LAYERS, HIDDEN = 3, 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset(data_file: Path) -> Dataset:
    return open_dataset(data_file, max_length=64, vocab_size=48)


def micro_batch(dataset: Dataset, documents: tuple[int, ...]) -> MicroBatch:
    return MicroBatch(9, 4, 1, Row(documents, int(sum(dataset.lengths[d] for d in documents))), 0, 0, 0)


def test_a_row_is_read_as_it_stands_in_the_data(dataset: Dataset, data_file: Path) -> None:
    raw = [json.loads(line) for line in data_file.read_text().splitlines()]
    documents = (7, 3, 12)
    read = RowReader(dataset, 16).read(micro_batch(dataset, documents))
    assert (read.row.batch, read.row.step, read.row.epoch) == (9, 4, 1)
    assert read.lengths == [len(raw[d]["input_ids"]) for d in documents]
    offset = 0
    for place, document in enumerate(documents):
        ids = raw[document]["input_ids"]
        span = slice(offset, offset + len(ids))
        assert read.padded[place, : len(ids)].tolist() == ids
        assert not read.padded[place, len(ids) :].any()
        assert read.row.input_ids[span].tolist() == ids
        assert read.row.loss_mask[span].tolist() == [0] * 3 + [1] * (len(ids) - 3)
        assert set(read.row.document_ids[span].tolist()) == {document}
        assert read.row.position_ids[span].tolist() == list(range(len(ids)))
        offset += len(ids)
    assert read.row.tokens == offset
    assert len(read.row.input_ids) % 16 == 0
    assert set(read.row.document_ids[offset:].tolist()) <= {-1}
    assert not read.row.loss_mask[offset:].any()


@pytest.mark.parametrize("bucket", [1, 16])
def test_the_targets_batch_has_one_of_few_widths(dataset: Dataset, bucket: int) -> None:
    for document in range(20):
        read = RowReader(dataset, bucket).read(micro_batch(dataset, (document,)))
        assert read.padded.shape == (1, padded_width(read.lengths[0], bucket))


@given(st.integers(1, 10**6), st.integers(1, 4096))
def test_a_packed_row_is_padded_to_the_next_bucket(tokens: int, bucket: int) -> None:
    length = packed_length(tokens, bucket)
    assert length % bucket == 0
    assert tokens <= length < tokens + bucket


def captured(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(len(lengths), max(lengths), HIDDEN) for _ in range(LAYERS)]


def buffer(split: bool) -> PackBuffer:
    return PackBuffer.allocate(64, LAYERS, HIDDEN, split=split, dtype=torch.float32, device=CPU)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans(), st.integers(0, 8))
def test_every_valid_position_is_packed_and_no_other(lengths: list[int], split: bool, padding: int) -> None:
    layers = captured(lengths)
    into = buffer(split)
    into.storage.fill_(7.0)  # What the batch before left there.
    states = into.pack(layers, lengths, sum(lengths) + padding)
    assert states.is_contiguous()
    rows = [(document, t) for document, length in enumerate(lengths) for t in range(length)]
    for layer in range(LAYERS):
        one = states[layer] if split else states[:, layer * HIDDEN : (layer + 1) * HIDDEN]
        assert torch.equal(one[: len(rows)], torch.stack([layers[layer][place] for place in rows]))
        assert not one[len(rows) :].any()


def test_split_and_packed_hold_the_same_states() -> None:
    lengths = [5, 3]
    one = as_states(buffer(False).pack(captured(lengths), lengths, 16), split=False)
    many = as_states(buffer(True).pack(captured(lengths), lengths, 16), split=True)
    assert isinstance(one, torch.Tensor)
    assert isinstance(many, tuple)
    assert torch.equal(torch.cat(many, dim=1), one)


@pytest.mark.parametrize("split", [False, True])
def test_the_bytes_do_not_depend_on_what_the_buffer_held(split: bool) -> None:
    lengths = [5, 3]
    fresh, used = buffer(split), buffer(split)
    used.storage.normal_()
    sums = {int(checksum(each.pack(captured(lengths), lengths, 16))) for each in (fresh, used)}
    assert len(sums) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_state_is_flagged_when_it_is_packed(value: float) -> None:
    layers = captured([5, 3])
    good = PackedStates.of(buffer(False), buffer(False).pack(layers, [5, 3], 16), HostCopier(), batch=8)
    layers[2][1, 2, 3] = value
    bad = PackedStates.of(
        buffer(False), buffer(False).pack(layers, [5, 3], 16), HostCopier(), batch=9, check=torch.tensor(-7)
    )
    assert good.proof.tolist() == [1, 0, 9]
    assert bad.proof.tolist() == [0, -7, 10]


def test_padding_of_the_target_never_reaches_the_drafter() -> None:
    lengths = [5, 3]
    layers = captured(lengths)
    other = [layer.clone() for layer in layers]
    for layer in other:
        layer[1, 3:] = np.inf
    assert torch.equal(buffer(False).pack(layers, lengths, 16), buffer(False).pack(other, lengths, 16))


def test_a_host_copy_is_done_at_once_and_in_order() -> None:
    copier = make_copier(CPU)
    source, destination = torch.arange(4.0), torch.zeros(4)
    order: list[str] = []

    class Before:
        def wait_host(self) -> None:
            order.append("waited")
            assert not destination.any()

    copier.copy(destination, source, after=Before()).wait_host()
    assert order == ["waited"]
    assert torch.equal(destination, source)
    with copier.beside():
        copier.mark().wait_host()
