"""The mask against its text, the dense backend against the naive one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.drafter.attention import DenseAttention, KeysValues, dense_mask, masked_softmax


def written_out(blocks, window):
    """Return the mask of the algorithm's text, one pair of rows at a time."""
    size, context = blocks.block_size, len(blocks.context_positions)
    mask = torch.zeros(blocks.count * size, context + blocks.count * size, dtype=torch.bool)
    for row in range(blocks.count * size):
        n, k = divmod(row, size)
        anchor = int(blocks.anchor_positions[n])
        for key in range(context):
            t = int(blocks.context_positions[key])
            same = blocks.context_documents[key] == blocks.documents[n]
            lowest = 0 if window is None else anchor + k - (window - 1)
            mask[row, key] = same and lowest <= t < anchor
        for j in range(size):
            near = window is None or (j <= k and k - j <= window - 1)
            mask[row, context + n * size + j] = near
    return mask


def naive(queries, context, block, mask):
    """Attention over all keys at once with key/value heads repeated: queries f[R, heads, d] -> f[R, heads·d]."""
    keys, values = (torch.cat(pair) for pair in zip(context, block, strict=True))
    shared = queries.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(shared, dim=1) for each in (keys, values))
    scores = torch.einsum("rhd,khd->hrk", queries, keys) * queries.shape[-1] ** -0.5
    probabilities = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
    return torch.einsum("hrk,khd->rhd", probabilities, values).flatten(1)


def rows(blocks, dtype=torch.float64, heads=4, kv_heads=2, width=8):
    generator = torch.Generator().manual_seed(0)

    def draw(count, heads):
        return torch.randn(count, heads, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    inside = blocks.count * blocks.block_size
    context = len(blocks.context_positions)
    pairs = [KeysValues(draw(count, kv_heads), draw(count, kv_heads)) for count in (context, inside)]
    return draw(inside, heads), *pairs


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    padding=st.integers(0, 3),
    window=st.sampled_from([None, 1, 2, 3, 5, 50]),
    seed=st.integers(0, 99),
)
def test_the_mask_is_the_text(row, blocks_of, lengths, padding, window, seed):
    blocks = blocks_of(row(lengths, padding, seed))
    mask = dense_mask(blocks, window)
    assert torch.equal(mask, written_out(blocks, window))
    # What the softmax asks for: a row that saw nothing would spread its weight over what it must not see.
    assert mask[:, len(blocks.context_positions) :].diagonal().all()


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_dense_equals_naive_forward_and_backward(row, blocks_of, window, kv_heads, recompute):
    blocks = blocks_of(row([11, 3, 17, 9], 4))
    queries, context, block = rows(blocks, kv_heads=kv_heads)
    leaves = [queries, *context, *block]
    got = DenseAttention(blocks, recompute=recompute)(queries, context, block, window)
    wanted = naive(queries, context, block, dense_mask(blocks, window))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    probe = torch.randn_like(got)
    for ours, theirs in zip(
        torch.autograd.grad((got * probe).sum(), leaves),
        torch.autograd.grad((wanted * probe).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_bfloat16_stays_near_float64_and_in_its_type(row, blocks_of):
    blocks = blocks_of(row([20, 15]))
    queries, context, block = rows(blocks, torch.bfloat16)
    got = DenseAttention(blocks)(queries, context, block, None)
    wide = [KeysValues(*(each.double() for each in pair)) for pair in (context, block)]
    assert got.dtype is torch.bfloat16
    wanted = naive(queries.double(), *wide, dense_mask(blocks, None))
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=0.05)


@pytest.mark.parametrize("recompute", [False, True])
def test_no_block_still_reaches_every_input(row, blocks_of, recompute):
    blocks = blocks_of(row([3, 2], 3))
    queries, context, block = rows(blocks)
    assert blocks.count == 0
    out = DenseAttention(blocks, recompute=recompute)(queries, context, block, None)
    assert out.shape == (0, 32)
    for gradient in torch.autograd.grad(out.sum(), [queries, *context, *block]):
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_recomputing_changes_no_bit_and_keeps_no_scores(row, blocks_of, dtype):
    blocks = blocks_of(row([40, 35]))
    queries, context, block = rows(blocks, dtype)
    leaves = [queries, *context, *block]
    gradients, kept = [], []
    for recompute in (False, True):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            out = DenseAttention(blocks, recompute=recompute)(queries, context, block, None)
        gradients.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        kept.append(max(sizes, default=0))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    # The scores of one document: 4 heads, its block rows, 30 keys and more. Without them inputs alone are left.
    assert kept[1] <= max(leaf.numel() for leaf in leaves) < kept[0]


def test_the_softmax_gives_what_is_not_seen_nothing_and_no_gradient():
    scores = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 5, [True, False, False, True, False]])
    out = masked_softmax(scores, mask)
    assert torch.equal(out[0], scores[0].softmax(-1))
    torch.testing.assert_close(out[1, [0, 3]], scores[1, [0, 3]].softmax(-1))
    assert out[1, [1, 2, 4]].eq(0).all()
    (gradient,) = torch.autograd.grad(out.square().sum(), scores)
    assert gradient[1, [1, 2, 4]].eq(0).all()


def test_bfloat16_scores_are_summed_in_float32():
    # In bfloat16 a sum of 1 and then many of 1/256 stays 1: each is below half of the last digit.
    scores = torch.zeros(1, 2049, dtype=torch.bfloat16)
    scores[0, 0] = 5.53125
    out = masked_softmax(scores, torch.ones(1, 2049, dtype=torch.bool))
    wide = scores.float().softmax(-1)
    assert (out.float() - wide).abs().max() <= wide.max() / 256
