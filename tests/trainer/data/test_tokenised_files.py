"""Whatever prepare writes, open_dataset reads back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.data import tokenised_files
from trainer.data.chat import Encoded
from trainer.data.documents import open_dataset
from trainer.data.tokenised_files import ArrowWriter, Documents, JsonlWriter

TOKENS = st.lists(st.tuples(st.integers(0, 2**31 - 2), st.booleans()), max_size=8)
# Documents without a candidate are dropped on reading, so each gets two labels at its end.
BATCHES = st.lists(st.lists(TOKENS.map(lambda t: [*t, (1, True), (2, True)]), max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize(("writer", "name"), [(JsonlWriter, "a.jsonl"), (ArrowWriter, "a.arrow")])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(batches=BATCHES.filter(any))
def test_documents_come_back_as_they_were(tmp_path: Path, writer, name: str, batches) -> None:
    documents = [
        [Encoded(np.array([t for t, _ in d], np.int32), np.array([on for _, on in d], np.uint8), 0) for d in batch]
        for batch in batches
    ]
    with writer(tmp_path / name) as file:
        for batch in documents:
            file.write(Documents.of(batch))
    dataset = open_dataset(tmp_path / name, max_length=99)
    expected = [document for batch in documents for document in batch]
    assert len(dataset) == len(expected)
    for index, document in enumerate(expected):
        assert dataset.document(index).input_ids.tolist() == document.input_ids.tolist()
        assert dataset.document(index).loss_mask.tolist() == document.loss_mask.tolist()


@pytest.mark.parametrize(("writer", "name"), [(JsonlWriter, "a.jsonl"), (ArrowWriter, "a.arrow")])
def test_a_writer_closes_its_file_when_its_block_fails(tmp_path: Path, writer, name: str) -> None:
    file = writer(tmp_path / name)
    with pytest.raises(RuntimeError), file:
        raise RuntimeError
    assert file._file.closed if hasattr(file._file, "closed") else (tmp_path / name).stat().st_size


def test_record_batches_are_large_however_small_the_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A held-out part gets a few documents at a time; batches of these would make it slow to open."""
    monkeypatch.setattr(tokenised_files, "_BATCH_TOKENS", 100)
    with ArrowWriter(tmp_path / "a.arrow") as file:
        for _ in range(50):
            file.write(Documents.of([Encoded(np.arange(7, dtype=np.int32), np.ones(7, np.uint8), 0)]))
            assert file._tokens < 100
    with pa.memory_map(str(tmp_path / "a.arrow")) as source:
        assert pa.ipc.open_file(source).num_record_batches == 4
    assert len(open_dataset(tmp_path / "a.arrow", max_length=99)) == 50


@pytest.mark.parametrize(("writer", "name"), [(JsonlWriter, "a.jsonl"), (ArrowWriter, "a.arrow")])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(
    parts=st.lists(st.tuples(st.integers(2, 9), st.integers(0, 7)), min_size=1, max_size=5).filter(
        lambda p: any(n for _, n in p)
    )
)
def test_documents_are_written_as_often_as_they_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer, name: str, parts: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(tokenised_files, "_BATCH_TOKENS", 20)
    documents = [Encoded(np.full(n, i, np.int32), np.ones(n, np.uint8), 0) for i, (n, _) in enumerate(parts)]
    joined = Documents.of(documents, [times for _, times in parts])
    with writer(tmp_path / name) as file:
        file.write(joined)
    dataset = open_dataset(tmp_path / name, max_length=99)
    expected = [[i] * n for i, (n, times) in enumerate(parts) for _ in range(times)]
    assert [dataset.document(i).input_ids.tolist() for i in range(len(dataset))] == expected
    assert len(joined) == len(expected)


def test_memory_knows_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row repeated a million times lay in memory a million times, and overran the 32 bits of a batch's offsets."""
    monkeypatch.setattr(tokenised_files, "_BATCH_TOKENS", 1000)
    document = Encoded(np.arange(10, dtype=np.int32), np.ones(10, np.uint8), 0)
    many = Documents.of([document] * 3, [1, 10**6, 5])
    assert len(many.input_ids) == 30
    pieces = many.repeated()
    assert [len(next(pieces).input_ids) for _ in range(50)] == [1000] * 50
    assert len(many) == 10**6 + 6
