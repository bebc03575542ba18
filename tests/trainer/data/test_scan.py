"""The vectorised scan against the definitions, one document at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.protocol.errors import DflashError
from trainer.data import scan
from trainer.data.chunks import Chunk, Supervision

DOCUMENTS = st.lists(st.lists(st.tuples(st.integers(0, 99), st.booleans()), max_size=12), max_size=12)


def chunk_of(documents: list[list[tuple[int, bool]]], kind: Supervision = Supervision.LOSS_MASK) -> Chunk:
    flat = [token for document in documents for token in document]
    ids = np.array([token for token, _ in flat], dtype=np.int32)
    mask = np.array([on for _, on in flat], dtype=np.uint8)
    return Chunk(
        ids=ids,
        offsets=np.cumsum([0, *map(len, documents)]).astype(np.int64),
        kind=kind,
        supervision=np.where(mask, ids, -100) if kind is Supervision.LABELS else mask,
        source=Path("data.jsonl"),
        rows=np.arange(1, len(documents) + 1),
    )


@pytest.mark.parametrize("kind", [Supervision.LOSS_MASK, Supervision.LABELS])
@given(documents=DOCUMENTS, max_length=st.integers(1, 14), piece=st.integers(1, 40))
def test_counts_are_those_of_the_definitions(kind: Supervision, documents, max_length: int, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "_PIECE_TOKENS", piece)
        found = scan.scan_chunk(chunk_of(documents, kind), max_length, 100)
    cut = [document[:max_length] for document in documents]
    masks = [[on for _, on in document] for document in cut]
    assert found.lengths.tolist() == [len(document) for document in cut]
    assert found.supervised.tolist() == [sum(mask) for mask in masks]
    assert found.candidates.tolist() == [sum(m[i] and m[i + 1] for i in range(len(m) - 1)) for m in masks]
    expected = [sum((2 * token + on) * (2 * j + 1) for j, (token, on) in enumerate(document)) for document in cut]
    assert found.checksums.tolist() == [value % 2**64 for value in expected]


def test_a_pair_across_two_documents_is_no_candidate() -> None:
    found = scan.scan_chunk(chunk_of([[(1, False), (2, True)], [(3, True), (4, False)]]), 9, 100)
    assert found.candidates.tolist() == [0, 0]


def test_the_last_position_is_no_candidate() -> None:
    """Anchor S-1 has nothing to predict: three supervised tokens give two candidates."""
    assert scan.scan_chunk(chunk_of([[(1, True), (2, True), (3, True)]]), 9, 100).candidates.tolist() == [2]
    assert scan.scan_chunk(chunk_of([[(1, True), (2, True), (3, True)]]), 2, 100).candidates.tolist() == [1]


@given(DOCUMENTS.filter(lambda documents: any(map(len, documents))), st.data())
def test_a_changed_token_or_mask_changes_the_checksum(documents, data) -> None:
    row = data.draw(st.sampled_from([i for i, document in enumerate(documents) if document]))
    place = data.draw(st.integers(0, len(documents[row]) - 1))
    token, on = documents[row][place]
    changed = [list(document) for document in documents]
    changed[row][place] = data.draw(st.sampled_from([(token + 1, on), (token, not on)]))
    before, after = (scan.scan_chunk(chunk_of(d), 99, 200).checksums for d in (documents, changed))
    assert [i for i in range(len(documents)) if before[i] != after[i]] == [row]


@pytest.mark.parametrize("token", [-1, 100])
def test_an_id_outside_the_vocabulary_names_its_row(token: int) -> None:
    with pytest.raises(DflashError) as caught:
        scan.scan_chunk(chunk_of([[(1, True)], [], [(2, True), (token, True)]]), 9, 100)
    assert "data.jsonl, row 3" in caught.value.error
    assert f"token id {token} is outside the vocabulary of 100" in caught.value.cause


def test_shifted_labels_are_caught() -> None:
    chunk = chunk_of([[(1, False), (2, True), (3, True)]], Supervision.LABELS)
    chunk.supervision[:] = [2, 3, -100]
    with pytest.raises(DflashError, match="row 1") as caught:
        scan.scan_chunk(chunk, 9, 100)
    assert "label 2 stands at token 1" in caught.value.cause
