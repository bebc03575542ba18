"""The compiled flex kernel on a GPU: equal to dense, few compilations, no wait. Skipped where there is no CUDA device.

`pytest -m gpu tests/trainer/drafter/test_flex_cuda.py`; compiling takes most of its minutes.
"""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from trainer.config import TrainConfig
from trainer.drafter.attention import KeysValues, dense_attention
from trainer.drafter.attention_choice import FLEX, Backend, Choice, choose, made_up_blocks, trouble
from trainer.drafter.flex import FlexAttention, compiled_kernel
from trainer.drafter.model import Drafter
from trainer.drafter.step import drafter_forward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    # The compiler's own: a hint to use TF32, its worker processes, and whatever a version adds.
    pytest.mark.filterwarnings("default"),
]

# Relative, by Euclidean norm: the bounds of attention_choice, and what is left of them behind a whole drafter.
BOUNDS = {torch.float32: 2e-3, torch.bfloat16: 2e-2}
DTYPES = list(BOUNDS)


@pytest.fixture(scope="module")
def shape(config):
    return config({"head_dim": 128}, layer_types="mixed", sliding_window=100, block_size=16)


def laid_out(row, blocks_of, lengths=(700, 90, 300), padding=30, **options):
    options = {"block_size": 16, "num_anchors": 60, "row_budget": 2048, "bucket": 13} | options
    return blocks_of(row(list(lengths), padding, holes=0.05), **options).to("cuda")


def given(blocks, dtype, heads=4, kv_heads=2, width=128):
    generator = torch.Generator().manual_seed(0)
    inside, outside = blocks.positions.numel(), len(blocks.context_positions)

    def draw(rows, heads):
        return torch.randn(rows, heads, width, generator=generator).to("cuda", dtype).requires_grad_()

    pairs = [KeysValues(draw(rows, kv_heads), draw(rows, kv_heads)) for rows in (outside, inside)]
    return draw(inside, heads), *pairs


def apart(got, wanted):
    got, wanted = got.double(), wanted.double()
    return float(torch.linalg.vector_norm(got - wanted) / torch.linalg.vector_norm(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_compiled_flex_equals_dense_forward_and_backward(row, blocks_of, dtype, window, kv_heads):
    blocks = laid_out(row, blocks_of)
    assert blocks.positions.numel() % 128
    queries, context, block = given(blocks, dtype, kv_heads=kv_heads)
    leaves = [queries, *context, *block]
    wide = [each.detach().float().requires_grad_() for each in leaves]
    probe = torch.randn(queries.shape[0], 512, device="cuda")
    got = FlexAttention(blocks)(queries, context, block, window)
    wanted = dense_attention(blocks)(wide[0], KeysValues(*wide[1:3]), KeysValues(*wide[3:]), window)
    assert got.dtype is dtype
    assert apart(got, wanted) < BOUNDS[dtype]
    pairs = zip(
        torch.autograd.grad(got, leaves, probe.to(dtype)), torch.autograd.grad(wanted, wide, probe), strict=True
    )
    assert max(apart(ours, theirs) for ours, theirs in pairs) < BOUNDS[dtype]


def test_flex_is_chosen_here(shape):
    for dtype in DTYPES:
        assert trouble(FLEX, made_up_blocks(shape).to("cuda"), shape, dtype) == ""
    assert choose(TrainConfig(), shape, torch.device("cuda", 0), torch.bfloat16) == Choice(FLEX)


def test_a_kernel_that_does_not_start_is_told_and_leaves_the_gpu_usable(shape):
    # 8 stages of keys and values of 128 rows are 512 KiB of shared memory: more than any GPU has, as one of 99 KiB says of less.
    def greedy(*given, **options):
        asked = {"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 8}
        return compiled_kernel()(*given, **options, kernel_options=asked)

    backend = Backend("flex", lambda blocks: FlexAttention(blocks, greedy), 8)
    choice = choose(TrainConfig(), shape, torch.device("cuda", 0), torch.bfloat16, backend)
    assert choice.backend.name == "dense"
    print(choice.reason)
    assert choice.reason
    assert float(torch.ones(3, device="cuda").sum()) == 3


def step(drafter, blocks, dtype):
    generator = torch.Generator().manual_seed(2)

    def draw(*size):
        return torch.randn(*size, generator=generator).to("cuda", dtype)

    drafter.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.bfloat16):
        states = draw(len(blocks.context_positions), 96)
        sums = drafter_forward(
            drafter, draw(40, 32), draw(40, 32), states, blocks, num_target_layer_ids=3, chunk_rows=512
        )
    sums.loss_sum.backward()
    return sums, {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_step_is_the_same_with_either(shape, row, blocks_of, dtype):
    torch.manual_seed(0)
    drafter = Drafter(shape).cuda()
    blocks = laid_out(row, blocks_of)
    wanted, gradients = step(drafter, blocks, dtype)
    drafter.attention = FlexAttention
    got, others = step(drafter, blocks, dtype)
    # A sum over 2,000 rows: roundings of single rows average out.
    assert apart(got.loss_sum.detach(), wanted.loss_sum.detach()) < BOUNDS[dtype] / 4
    assert torch.equal(got.weight_sum, wanted.weight_sum)
    assert torch.equal(got.metrics[1], wanted.metrics[1])
    # Dense rounds its scores to bfloat16 where flex keeps them in float32: twice the bound for both to have their own.
    for name, gradient in gradients.items():
        assert apart(others[name], gradient) < 4 * BOUNDS[dtype], name


def test_a_row_without_anchors_reaches_every_parameter(shape, row, blocks_of):
    drafter = Drafter(shape).cuda()
    drafter.attention = FlexAttention
    blocks = laid_out(row, blocks_of, lengths=(2, 1), padding=0)
    assert blocks.count == 0
    sums, gradients = step(drafter, blocks, torch.bfloat16)
    assert float(sums.loss_sum.detach()) == 0
    assert gradients.keys() == dict(drafter.named_parameters()).keys()
    assert not any(gradient.any() for gradient in gradients.values())


def test_twenty_rows_compile_once_for_each_bucket_and_window(shape, row, blocks_of):
    torch._dynamo.reset()
    drafter = Drafter(shape).cuda()
    drafter.attention = FlexAttention
    before = counters["stats"]["unique_graphs"]
    shapes = set()
    for number in range(20):
        blocks = laid_out(row, blocks_of, lengths=(700 + number, 90), num_anchors=5 + number, bucket=16)
        rows = blocks.positions.numel()
        shapes.add((rows, FlexAttention(blocks).block_mask(None).seq_lengths[1]))
        step(drafter, blocks, torch.bfloat16)
    assert len(shapes) == 3
    # A full and a sliding kernel for each.
    assert counters["stats"]["unique_graphs"] - before == 2 * len(shapes)


def test_a_step_inside_ddp_is_the_step(shape, row, blocks_of, tmp_path):
    torch.manual_seed(0)
    drafter = Drafter(shape).cuda()
    drafter.attention = FlexAttention
    # A shape of its own, so that it is compiled inside DDP.
    blocks = laid_out(row, blocks_of, num_anchors=20, bucket=7)
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(drafter, device_ids=[0], gradient_as_bucket_view=True)
        inside, gradients = step(model, blocks, torch.bfloat16)
    finally:
        distributed.destroy_process_group()
    alone, others = step(drafter, blocks, torch.bfloat16)
    assert apart(inside.loss_sum.detach(), alone.loss_sum.detach()) < 1e-3
    for name, gradient in gradients.items():
        assert apart(gradient, others[name.removeprefix("module.")]) < 1e-2, name


@pytest.fixture
def no_waiting():
    """Make every wait of the host for the device an error, from the call of the fixture on."""

    def begin():
        torch.cuda.set_sync_debug_mode("error")

    yield begin
    torch.cuda.set_sync_debug_mode("default")


def test_building_masks_and_attending_wait_for_nothing(row, blocks_of, no_waiting):
    blocks = laid_out(row, blocks_of)
    queries, context, block = given(blocks, torch.bfloat16)
    leaves = [queries, *context, *block]

    def once():
        attend = FlexAttention(blocks)
        for window in (None, 100):
            torch.autograd.grad(attend(queries, context, block, window).sum(), leaves)

    # Compiling may wait; a step of a shape that was met may not.
    once()
    no_waiting()
    once()


def test_memory_does_not_hold_the_scores(row, blocks_of):
    blocks = laid_out(row, blocks_of)
    peaks = []
    for backend in (FLEX, Backend("dense", dense_attention, 0)):
        queries, context, block = given(blocks, torch.bfloat16, heads=8)
        # Once to compile; the second time counts. Masks are made in the forward and not counted.
        for _ in range(2):
            out = backend.attention(blocks)(queries, context, block, None)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.autograd.grad(out.sum(), [queries, *context, *block])
        peaks.append(torch.cuda.max_memory_allocated() - before)
    print(f"peak of a backward: flex {peaks[0] >> 20} MiB, dense {peaks[1] >> 20} MiB")
    assert peaks[0] < peaks[1]
