"""The drafter on a GPU computes what it computes on the CPU. Skipped where there is no CUDA device."""

from __future__ import annotations

import warnings

import pytest
import torch

from trainer.drafter.model import Drafter
from trainer.drafter.norm import RMSNorm
from trainer.drafter.objective import DECAY, Objective
from trainer.drafter.step import drafter_forward

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


def step(drafter, states, blocks, device, dtype, autocast=False, objective=DECAY):
    """Run one step on a device; returns loss, metrics and gradients on the CPU as float64."""
    torch.manual_seed(2)
    embed, head, teacher = (torch.randn(rows, 32, dtype=torch.float64).to(device, dtype) for rows in (40, 40, 37))
    drafter.to(device).zero_grad()
    states = tuple(each.to(device, dtype) for each in states) if isinstance(states, tuple) else states.to(device, dtype)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        sums = drafter_forward(
            drafter,
            embed,
            head,
            states,
            blocks.to(device),
            num_target_layer_ids=3,
            chunk_rows=9,
            objective=objective,
            teacher=teacher,
        )
    sums.loss_sum.backward()
    # Cloned: where there is nothing to convert it would be the gradient itself, which moves with the drafter.
    gradients = {name: parameter.grad.clone().cpu().double() for name, parameter in drafter.named_parameters()}
    return sums.loss_sum.detach().cpu().double(), sums.metrics.cpu(), gradients


@pytest.mark.parametrize(
    "objective", [DECAY, Objective(0.5), Objective(0.5, 0.5)], ids=["decay", "dpace", "dpace and KL"]
)
@pytest.mark.parametrize("split", [False, True])
def test_a_step_in_float64_is_the_cpus(config, row, blocks_of, split, objective):
    torch.manual_seed(0)
    drafter = Drafter(config(layer_types="mixed", sliding_window=5)).double()
    blocks = blocks_of(row([13, 21], 3))
    states = torch.randn(37, 96, dtype=torch.float64)
    given = tuple(states.split(32, dim=1)) if split else states
    wanted = step(drafter, given, blocks, "cpu", torch.float64, objective=objective)
    got = step(drafter, given, blocks, "cuda", torch.float64, objective=objective)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-12, atol=0)
    assert torch.equal(got[1], wanted[1])
    for name, gradient in wanted[2].items():
        torch.testing.assert_close(got[2][name], gradient, rtol=1e-9, atol=1e-11)


def test_a_step_in_bfloat16_over_float32_masters_stays_near(config, row, blocks_of):
    torch.manual_seed(0)
    drafter = Drafter(config(layer_types="sliding", sliding_window=5)).double()
    blocks = blocks_of(row([13, 21], 3))
    states = torch.randn(37, 96, dtype=torch.float64)
    loss, _, gradients = step(drafter, states, blocks, "cpu", torch.float64)
    near, _, others = step(drafter.float(), states, blocks, "cuda", torch.bfloat16, autocast=True)
    torch.testing.assert_close(near, loss, rtol=0.02, atol=0)
    for name, gradient in gradients.items():
        assert torch.linalg.vector_norm(others[name] - gradient) < 0.1 * torch.linalg.vector_norm(gradient) + 1e-6, name


def test_the_norm_of_bfloat16_rows_under_a_float32_master_is_fused_and_exact():
    torch.manual_seed(0)
    norm = RMSNorm(64, 1e-6)
    torch.nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    x = torch.randn(50, 64).bfloat16()
    wanted = norm(x)
    with warnings.catch_warnings():
        # torch warns where it has to leave the fused kernel.
        warnings.simplefilter("error")
        got = norm.cuda()(x.cuda())
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.cpu(), wanted, rtol=2**-7, atol=0)
