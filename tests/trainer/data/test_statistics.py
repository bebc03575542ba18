"""Counts add up, and the table says them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.chat import Encoded
from trainer.data.statistics import Counts, table, total
from trainer.data.tokenised_files import Documents

LENGTHS = st.lists(st.integers(1, 5000), max_size=20)


def counted(lengths: list[int], *, held_out: bool = False) -> Counts:
    counts = Counts(read=len(lengths))
    documents = [Encoded(np.zeros(n, np.int32), np.arange(n).astype(np.uint8) % 2, 0) for n in lengths]
    counts.count(Documents.of(documents), held_out=held_out)
    return counts


@given(LENGTHS, LENGTHS)
def test_parts_add_up_to_the_whole(one: list[int], other: list[int]) -> None:
    assert total([counted(one), counted(other)]).to_dict() == counted(one + other).to_dict()


@given(LENGTHS)
def test_lengths_are_counted_under_the_next_power_of_two(lengths: list[int]) -> None:
    counts = counted(lengths)
    assert sum(counts.lengths.values()) == counts.written == len(lengths)
    for bound, number in counts.lengths.items():
        assert number == sum(bound // 2 < n <= bound for n in lengths)


def test_held_out_documents_are_counted_apart() -> None:
    counts = counted([3, 4], held_out=True)
    assert (counts.held_out, counts.held_out_tokens, counts.held_out_supervised_tokens) == (2, 7, 3)
    assert (counts.written, counts.tokens, counts.lengths, counts.all_tokens) == (0, 0, {}, 7)


def test_the_table_by_hand() -> None:
    parts = {"a.jsonl": counted([4, 4]), "b.jsonl": counted([24])}
    parts["b.jsonl"].bad_rows = 2
    assert table(parts) == (
        "source   read  written  of all  tokens  supervised  held out\n"
        "a.jsonl     2        2   25.0%       8       50.0%         0\n"
        "b.jsonl     1        1   75.0%      24       50.0%         0\n"
        "all         3        3  100.0%      32       50.0%         0\n"
        "tokens of a document: 67% to 4, 33% to 32\n"
        "left out or cut: 2 bad rows"
    )
    assert "all" not in table({"a.jsonl": counted([4])}).split("\n")[1:][0]
    assert table({"a.jsonl": Counts()}).endswith("tokens of a document: none")


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 4)), max_size=8))
def test_documents_count_as_often_as_they_are_written(parts: list[tuple[int, int]]) -> None:
    documents = [Encoded(np.zeros(n, np.int32), np.arange(n).astype(np.uint8) % 2, 0) for n, _ in parts]
    counts = Counts()
    counts.count(Documents.of(documents, [times for _, times in parts]), held_out=False)
    wanted = counted([n for n, times in parts for _ in range(times)])
    wanted.read = 0
    assert counts.to_dict() | {"lengths": 0} == wanted.to_dict() | {"lengths": 0}
    assert +counts.lengths == wanted.lengths
