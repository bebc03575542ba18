"""The flex backend against the dense one: masks everywhere, outputs forward; gradients through a written-out kernel.

What needs a GPU, the compiled kernel and its backward, is in test_flex_cuda.py.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation.drafter_checks import written_kernel
from races.waits import HostWaits
from torch import distributed
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel

from trainer.drafter.attention import DenseAttention, KeysValues, dense_mask
from trainer.drafter.blocks import pad_blocks
from trainer.drafter.flex import KEY_BUCKET, FlexAttention, compiled_kernel
from trainer.drafter.model import Drafter
from trainer.drafter.step import drafter_forward


def seen(attention, window):
    """Return the whole mask of a flex backend, bool[queries, keys]."""
    made = attention.block_mask(window)
    rows, keys = made.seq_lengths
    return create_mask(made.mask_mod, 1, 1, rows, keys, "cpu")[0, 0]


def tiles(mask, rows, columns):
    """Return how many of its 128 x 128 elements each tile of a mask sees, i64[rows, columns]."""
    whole = torch.zeros(rows * 128, columns * 128, dtype=torch.int64)
    whole[: mask.shape[0], : mask.shape[1]] = mask
    return whole.view(rows, 128, columns, 128).sum(dim=(1, 3))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    padding=st.integers(0, 9),
    window=st.sampled_from([None, 1, 2, 5, 50]),
    block_size=st.integers(2, 10),
    bucket=st.sampled_from([0, 1, 3, 40]),
    seed=st.integers(0, 99),
)
def test_the_mask_is_the_dense_one(row, blocks_of, written_flex, lengths, padding, window, block_size, bucket, seed):
    packed = row(lengths, padding, seed)
    blocks = blocks_of(packed, block_size=block_size, num_anchors=20, row_budget=400, bucket=bucket)
    if not len(blocks.positions):
        return
    attention = written_flex(blocks)
    wanted, got = dense_mask(blocks, window), seen(attention, window)
    assert torch.equal(got[:, : wanted.shape[1]], wanted)
    # Keys that are padding are nobody's, and no row is empty.
    assert not got[:, wanted.shape[1] :].any()
    assert got.any(dim=1).all()
    # What the kernel skips, and where it does not ask.
    made = attention.block_mask(window)
    count = tiles(got, made.kv_num_blocks.shape[-1], made.kv_indices.shape[-1])
    assert torch.equal(made.to_dense()[0, 0] > 0, count > 0)
    assert made.full_kv_num_blocks is not None
    assert int(made.full_kv_num_blocks.sum()) == int((count == 128 * 128).sum())


def test_it_answers_beyond_the_last_query_and_reads_nothing_there(row, blocks_of, written_flex):
    blocks = blocks_of(row([30, 9]), num_anchors=20, row_budget=400)
    attention = written_flex(blocks)
    queries = blocks.positions.numel()
    assert queries % 128
    # A kernel's tile: on a CPU a read beyond the end is an error, on a GPU another's memory.
    rows, columns = torch.arange(-(-queries // 128) * 128)[:, None], torch.arange(KEY_BUCKET)[None]
    none = torch.zeros((), dtype=torch.int64)
    for window in (None, 4):
        got = attention.block_mask(window).mask_mod(none, none, rows, columns)
        assert torch.equal(got[:queries, : 39 + queries], dense_mask(blocks, window))


def rows_of(blocks, dtype, heads=4, kv_heads=2, width=16):
    generator = torch.Generator().manual_seed(0)
    inside, outside = blocks.positions.numel(), len(blocks.context_positions)

    def draw(rows, heads):
        return torch.randn(rows, heads, width, generator=generator, dtype=dtype)

    pairs = [KeysValues(draw(rows, kv_heads), draw(rows, kv_heads)) for rows in (outside, inside)]
    return draw(inside, heads), *pairs


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_torchs_kernel_equals_dense_forward(row, blocks_of, window, kv_heads):
    blocks = blocks_of(row([41, 3, 67, 19], 4), num_anchors=15, row_budget=400, bucket=7)
    given = rows_of(blocks, torch.float32, kv_heads=kv_heads)
    got = FlexAttention(blocks, flex_attention)(*given, window)
    torch.testing.assert_close(got, DenseAttention(blocks)(*given, window), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_gradients_equal_those_of_dense(row, blocks_of, written_flex, window, kv_heads):
    blocks = blocks_of(row([41, 3, 67, 19], 4), num_anchors=15, row_budget=400, bucket=7)
    queries, context, block = rows_of(blocks, torch.float64, kv_heads=kv_heads)
    leaves = [each.requires_grad_() for each in (queries, *context, *block)]
    results = []
    for attention in (written_flex(blocks), DenseAttention(blocks)):
        out = attention(queries, context, block, window)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def step(drafter, states, blocks, dtype=torch.float64):
    torch.manual_seed(2)
    embed, head = torch.randn(2, 40, 32, dtype=dtype)
    drafter.zero_grad()
    sums = drafter_forward(drafter, embed, head, states, blocks, num_target_layer_ids=3, chunk_rows=9)
    sums.loss_sum.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in drafter.parameters()])
    return sums.loss_sum.detach(), sums.weight_sum, sums.metrics, gradient


def mixed_drafter(config):
    torch.manual_seed(0)
    return Drafter(config(layer_types="mixed", sliding_window=5)).double()


@pytest.mark.parametrize("flex", [False, True])
@pytest.mark.parametrize("bucket", [1, 5, 64])
@pytest.mark.parametrize("lengths", [[13, 21], [3, 2]], ids=["anchors", "no anchor"])
def test_padding_blocks_change_no_sum_and_no_gradient(config, row, blocks_of, written_flex, flex, bucket, lengths):
    drafter = mixed_drafter(config)
    packed = row(lengths, 3, holes=0.1)
    states = torch.randn(sum(lengths) + 3, 96, dtype=torch.float64)
    wanted = step(drafter, states, blocks_of(packed))
    padded = blocks_of(packed, bucket=bucket)
    assert len(padded.positions) % bucket == 0
    assert len(padded.positions) >= max(1, padded.count)
    if flex:
        drafter.attention = written_flex
    for ours, theirs in zip(step(drafter, states, padded), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_masks_are_built_once_for_all_layers(config, row, blocks_of):
    drafter = mixed_drafter(config)
    seen_masks: list[int] = []

    def counting(q, k, v, *, block_mask, enable_gqa):
        seen_masks.append(id(block_mask))
        return written_kernel(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa)

    drafter.attention = lambda blocks: FlexAttention(blocks, counting)
    step(drafter, torch.randn(37, 96, dtype=torch.float64), blocks_of(row([13, 21], 3)))
    assert len(seen_masks) == 3
    # Two sliding layers, one full.
    assert len(set(seen_masks)) == 2


def test_no_mask_asks_the_device(row, blocks_of, written_flex):
    blocks = blocks_of(row([13, 21], 3), bucket=5)
    with HostWaits() as waits:
        attention = written_flex(blocks)
        for window in (None, 5):
            attention.block_mask(window)
    assert waits.found == []


@pytest.mark.parametrize(("bucket", "rows", "graphs"), [(16, 20, 2), (0, 3, 3)])
def test_rows_of_one_bucket_are_compiled_once(row, blocks_of, bucket, rows, graphs):
    """Traced, not lowered: what dynamo calls another shape is what a GPU would compile for."""
    torch._dynamo.reset()
    # The kernel of a ninth shape would be an error otherwise: fullgraph, and a limit of 8.
    kernel = compiled_kernel("eager")
    assert torch._dynamo.config.recompile_limit > 100
    before = counters["stats"]["unique_graphs"]
    for number in range(rows):
        packed = row([60 + number, 4], 3, seed=number)
        blocks = blocks_of(packed, num_anchors=1 + 3 * (number % 10), row_budget=400, bucket=bucket)
        FlexAttention(blocks, kernel)(*rows_of(blocks, torch.float32), None)
    assert counters["stats"]["unique_graphs"] - before == graphs
    torch._dynamo.reset()


def test_the_kernel_is_compiled_inside_ddp_as_outside(config, row, blocks_of, monkeypatch, tmp_path):
    def cut(*_):
        raise AssertionError("dynamo cut the graph for the reducer")

    monkeypatch.setattr(DDPOptimizer, "compile_fn", cut)
    drafter = mixed_drafter(config).float()
    drafter.attention = lambda blocks: FlexAttention(blocks, compiled_kernel("eager"))
    blocks = blocks_of(row([13, 21], 3))
    embeds, states = torch.randn(blocks.positions.numel(), 32), torch.randn(37, 96)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch._dynamo.reset()
        with torch.no_grad():
            inside = DistributedDataParallel(drafter)(embeds, states, blocks)
            torch.testing.assert_close(inside, drafter(embeds, states, blocks), rtol=0, atol=1e-6)
    finally:
        distributed.destroy_process_group()
        torch._dynamo.reset()


def test_a_padding_block_has_no_context_whatever_the_row_holds(row, blocks_of):
    blocks = pad_blocks(blocks_of(row([13, 21], 3)), 5)
    context = len(blocks.context_positions)
    for window in (None, 2):
        mask = dense_mask(blocks, window)[blocks.count * blocks.block_size :]
        assert mask.shape[0] == 2 * blocks.block_size
        assert not mask[:, :context].any()
