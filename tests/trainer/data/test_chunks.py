"""A chunk gives the same mask whether it is asked for one document or for a range of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.chunks import Chunk, Supervision, supervised_tokens

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=9)


def chunk(kind: Supervision, lengths: list[int], seed: int) -> Chunk:
    rng = np.random.default_rng(seed)
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    ids = rng.integers(0, 50, offsets[-1])
    on = rng.integers(0, 2, offsets[-1]).astype(bool)
    supervision = {
        Supervision.LOSS_MASK: on.astype(np.int64),
        Supervision.LABELS: np.where(on, ids, -100),
        Supervision.COMPLETION_MASK: on,
        Supervision.PROMPT_LEN: rng.integers(0, 12, len(lengths)),
    }[kind]
    return Chunk(ids, offsets, kind, supervision, Path("x"), np.arange(len(lengths)))


@pytest.mark.parametrize("kind", list(Supervision))
@given(lengths=LENGTHS, seed=st.integers(0, 99), data=st.data())
def test_one_document_and_a_range_of_them_agree(
    kind: Supervision, lengths: list[int], seed: int, data: st.DataObject
) -> None:
    all_of_it = chunk(kind, lengths, seed)
    first = data.draw(st.integers(0, len(lengths)))
    last = data.draw(st.integers(first, len(lengths)))
    flat = all_of_it.flat_loss_mask(first, last)
    alone = [all_of_it.loss_mask(row, lengths[row]) for row in range(first, last)]
    assert flat.tolist() == [on for mask in alone for on in mask.tolist()]
    assert flat.dtype == np.uint8


@pytest.mark.parametrize("kind", list(Supervision))
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_truncation_takes_the_front(kind: Supervision, lengths: list[int], seed: int) -> None:
    all_of_it = chunk(kind, lengths, seed)
    for row, length in enumerate(lengths):
        for cut in range(length + 1):
            assert all_of_it.input_ids(row, cut).tolist() == all_of_it.input_ids(row, length).tolist()[:cut]
            assert all_of_it.loss_mask(row, cut).tolist() == all_of_it.loss_mask(row, length).tolist()[:cut]


def test_a_prompt_as_long_as_its_document_leaves_no_label() -> None:
    whole = Chunk(np.arange(4), np.array([0, 2, 4]), Supervision.PROMPT_LEN, np.array([2, 9]), Path("x"), np.arange(2))
    assert whole.flat_loss_mask(0, 2).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "values", "mask"),
    [
        (Supervision.LOSS_MASK, [0, 1, 2], [0, 1, 1]),
        (Supervision.COMPLETION_MASK, [False, True, True], [0, 1, 1]),
        (Supervision.LABELS, [-100, 0, 7], [0, 1, 1]),
    ],
)
def test_what_counts_as_supervised(kind: Supervision, values: list[int], mask: list[int]) -> None:
    """Label 0 is a token like others: a mutant that tests labels for truth would lose it."""
    assert supervised_tokens(kind, np.array(values)).tolist() == mask


def test_ids_are_a_copy_of_their_own(tmp_path: Path) -> None:
    whole = chunk(Supervision.LOSS_MASK, [3, 3], 0)
    whole.input_ids(0, 3)[:] = 99
    assert whole.input_ids(0, 3).max() < 50
