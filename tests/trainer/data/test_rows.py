from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.rows import Row, assign_step, pack_rows, padded_width, padding_share

LENGTHS = st.lists(st.integers(2, 300), min_size=1, max_size=120)
TOKENS = st.lists(st.integers(1, 5000), min_size=1, max_size=24)


def packed(lengths: list[int], **changes: int) -> list[Row]:
    settings = {"seed": 42, "epoch": 0, "token_budget": 600, "bucket_tokens": 64} | changes
    array = np.array(lengths, dtype=np.int32)
    return pack_rows(array, np.ones_like(array), **settings)


@given(LENGTHS, st.integers(300, 2000), st.integers(0, 5), st.integers(0, 2**63))
def test_each_document_is_in_exactly_one_row(lengths: list[int], budget: int, epoch: int, seed: int) -> None:
    rows = packed(lengths, token_budget=budget, epoch=epoch, seed=seed)
    assert sorted(d for row in rows for d in row.documents) == list(range(len(lengths)))


@given(LENGTHS, st.integers(300, 2000))
def test_the_padded_batch_fits_the_budget_and_tokens_are_the_valid_ones(lengths: list[int], budget: int) -> None:
    for row in packed(lengths, token_budget=budget):
        width = padded_width(max(lengths[d] for d in row.documents), 64)
        assert len(row.documents) == 1 or len(row.documents) * width <= budget
        assert row.tokens == sum(lengths[d] for d in row.documents)


@given(LENGTHS, st.integers(0, 3))
def test_rows_hang_on_their_arguments_alone(lengths: list[int], epoch: int) -> None:
    assert packed(lengths, epoch=epoch) == packed(lengths, epoch=epoch)


def test_epochs_and_seeds_have_other_orders_and_other_companions() -> None:
    lengths = list(range(50, 250)) * 3
    first, second, reseeded = packed(lengths), packed(lengths, epoch=1), packed(lengths, seed=43)
    for other in (second, reseeded):
        assert [row.tokens for row in first] != [row.tokens for row in other]
        assert {frozenset(row.documents) for row in first} != {frozenset(row.documents) for row in other}


def test_training_order_is_not_the_order_of_lengths() -> None:
    longest = [row.tokens / len(row.documents) for row in packed(list(range(20, 300)))]
    assert sorted(longest) != longest
    assert sorted(longest, reverse=True) != longest
    # A shuffled order has about half of its neighbours ascending.
    ascending = np.mean(np.diff(longest) > 0)
    assert 0.3 < ascending < 0.7


@pytest.mark.parametrize(("budget", "longest"), [(2048, 256), (16384, 4096)])
def test_padding_of_a_natural_mix_of_lengths_is_under_seven_per_cent(budget: int, longest: int) -> None:
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 4), 0.7, 4000)
    lengths = np.clip(drawn, 2, longest).astype(np.int32)
    rows = pack_rows(lengths, lengths, seed=1, epoch=0, token_budget=budget, bucket_tokens=64)
    assert padding_share(rows, lengths, 64) < 0.07
    in_file_order = [Row((d, d + 1), int(lengths[d] + lengths[d + 1])) for d in range(0, 4000, 2)]
    assert padding_share(in_file_order, lengths, 64) > 0.2


@given(st.integers(1, 1 << 20), st.integers(1, 4096))
def test_a_width_is_little_more_than_the_length(longest: int, bucket: int) -> None:
    width = padded_width(longest, bucket)
    assert longest <= width <= longest + min(longest / 16, bucket)
    # Of a bucket that is no power of two a width of one octave may be none of the next.
    assert padded_width(width, bucket) == width or bucket & (bucket - 1)
    assert padded_width(longest + 1, bucket) >= width


def test_widths_are_few_however_many_lengths_there_are() -> None:
    """The mutant that pads to the longest document has 4,095 of them, and tunes kernels for each in mid-run."""
    assert len({padded_width(length, 512) for length in range(17, 4097)}) == 8 * 16
    assert [padded_width(n, 512) for n in (1, 9, 33, 129, 257, 4000, 4096)] == [1, 9, 34, 136, 272, 4096, 4096]
    assert padded_width(129, 1) == 129


def test_padding_share_by_hand() -> None:
    assert padding_share([Row((0, 1), 14)], np.array([10, 4], dtype=np.int32), 2) == pytest.approx(0.3)
    assert padding_share([Row((0, 1), 14)], np.array([10, 4], dtype=np.int32), 64) == pytest.approx(0.3)
    assert padding_share([], np.zeros(0, dtype=np.int32), 8) == 0.0


@given(LENGTHS, st.integers(1, 5))
def test_documents_of_a_row_are_bounded(lengths: list[int], most: int) -> None:
    assert all(len(row.documents) <= most for row in packed(lengths, token_budget=4000, max_documents=most))


def test_no_documents_make_no_rows() -> None:
    assert packed([]) == []


@pytest.mark.parametrize("lengths", [[601], [0, 5]])
def test_lengths_outside_the_budget_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"outside 1\.\.600"):
        packed(lengths)


def test_a_document_without_candidates_is_refused() -> None:
    with pytest.raises(ValueError, match="candidate"):
        pack_rows(
            np.array([5, 5], dtype=np.int32),
            np.array([1, 0], dtype=np.int32),
            seed=0,
            epoch=0,
            token_budget=9,
            bucket_tokens=1,
        )


def test_the_order_is_pinned_across_versions() -> None:
    """A resumed run may meet another numpy or platform: these rows are part of the format."""
    rows = packed([100, 250, 80, 300, 120, 90, 60, 200, 210], seed=7, epoch=3)
    assert [row.documents for row in rows] == [(3,), (5, 2, 6), (7, 4, 0), (1, 8)]


@given(TOKENS, st.integers(1, 50), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))
def test_every_micro_batch_has_ranks_that_exist(
    tokens: list[int], step: int, machines: int, targets: int, drafters: int
) -> None:
    ranks = assign_step(tokens, step, machines, targets, drafters, shared=False)
    assert len(ranks) == len(tokens)
    assert all(0 <= m < machines and 0 <= t < targets and 0 <= d < drafters for m, t, d in ranks)


@given(TOKENS, st.integers(1, 50), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))
def test_loads_of_machines_differ_by_one_micro_batch_at_most(
    tokens: list[int], step: int, machines: int, targets: int, drafters: int
) -> None:
    ranks = assign_step(tokens, step, machines, targets, drafters, shared=False)

    def spread(role: int, places: list[tuple[int, ...]]) -> int:
        loads = dict.fromkeys(places, 0)
        for count, rank in zip(tokens, ranks, strict=True):
            loads[rank[:1] if role == 0 else (rank[0], rank[role])] += count
        return max(loads.values()) - min(loads.values())

    assert spread(0, [(m,) for m in range(machines)]) <= max(tokens)
    if machines == 1:
        assert spread(1, [(0, t) for t in range(targets)]) <= max(tokens)
        assert spread(2, [(0, d) for d in range(drafters)]) <= max(tokens)


@given(TOKENS, st.integers(1, 50), st.integers(1, 3), st.integers(1, 4))
def test_shared_roles_are_one_choice(tokens: list[int], step: int, machines: int, ranks: int) -> None:
    assert all(t == d for _, t, d in assign_step(tokens, step, machines, ranks, ranks, shared=True))


def test_by_hand() -> None:
    # Step 1 of two targets: ties start at index 1. 50 goes to target 1, 30 to 0, 20 to 0 (30 < 50), 10 to 1 (tie at 50).
    assert assign_step([10, 50, 20, 30], 1, 1, 2, 1, shared=False) == [(0, 1, 0), (0, 1, 0), (0, 0, 0), (0, 0, 0)]


def test_ties_go_round_with_the_step() -> None:
    first = [assign_step([7], step, 1, 3, 2, shared=False)[0] for step in range(1, 7)]
    assert first == [(0, 1, 1), (0, 2, 0), (0, 0, 1), (0, 1, 0), (0, 2, 1), (0, 0, 0)]


def test_equal_micro_batches_are_taken_in_ascending_order() -> None:
    assert [t for _, t, _ in assign_step([5, 5, 5, 5], 4, 1, 4, 1, shared=False)] == [0, 1, 2, 3]


def test_longest_first_is_what_balances() -> None:
    """The mutant that deals in ascending b leaves 100 on top of 40; longest first does not."""
    ranks = assign_step([40, 40, 100], 2, 1, 2, 1, shared=False)
    assert ranks[0][1] == ranks[1][1] != ranks[2][1]


def test_shared_roles_of_different_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="3 and 2"):
        assign_step([1], 1, 1, 3, 2, shared=True)


def test_the_odd_micro_batch_of_each_step_goes_round() -> None:
    """The mutant that starts every step at index 0 gives target 0 twice the work of the others, for ever."""
    counts = [0, 0, 0]
    for step in range(1, 31):
        for _, target, _ in assign_step([9, 9, 9, 9], step, 1, 3, 1, shared=False):
            counts[target] += 1
    assert counts == [40, 40, 40]


def test_targets_and_drafters_are_balanced_independently() -> None:
    """Five targets and three drafters: no function of the target's index would balance both."""
    tokens = [100, 90, 80, 70, 60, 50, 40, 30, 20, 10, 5, 5]
    ranks = assign_step(tokens, 5, 1, 5, 3, shared=False)
    for role, count in ((1, 5), (2, 3)):
        loads = [sum(t for t, rank in zip(tokens, ranks, strict=True) if rank[role] == index) for index in range(count)]
        assert max(loads) - min(loads) <= 30
    assert len({rank[1:] for rank in ranks}) > 5
