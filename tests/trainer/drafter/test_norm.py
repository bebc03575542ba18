"""RMSNorm's own backward against autograd, and its type rules."""

from __future__ import annotations

import pytest
import torch

from trainer.drafter.norm import RMSNorm


def make(width, dtype=torch.float64):
    torch.manual_seed(0)
    norm = RMSNorm(width, 1e-5)
    torch.nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    return norm.to(dtype)


def written_out(x, norm):
    return x / (x.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt() * norm.weight


@pytest.mark.parametrize("shape", [(5, 6), (3, 4, 8), (0, 6), (0, 4, 8)])
def test_forward_and_backward_are_the_text(shape):
    norm = make(shape[-1])
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(norm(x), written_out(x, norm), rtol=0, atol=1e-14)
    ours = torch.autograd.grad((norm(x) * probe).sum(), [x, norm.weight])
    theirs = torch.autograd.grad((written_out(x, norm) * probe).sum(), [x, norm.weight])
    for own, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-13)


def test_finite_differences_agree():
    norm = make(5)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,))


def test_a_zero_row_stays_finite():
    norm = make(4)
    x = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_bfloat16_is_float32_rounded_once():
    x = torch.randn(7, 64)
    wanted = make(64, torch.float32)(x.bfloat16().float()).bfloat16()
    got = make(64, torch.float32)(x.bfloat16())
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, wanted)


def test_gradients_have_the_type_of_what_they_belong_to():
    norm = make(8, torch.float32)
    x = torch.randn(3, 8).bfloat16().requires_grad_()
    norm(x).sum().backward()
    assert x.grad is not None
    assert norm.weight.grad is not None
    assert (x.grad.dtype, norm.weight.grad.dtype) == (torch.bfloat16, torch.float32)


def test_cpu_equals_torchs_own_norm():
    norm = make(16, torch.float32)
    x = torch.randn(9, 16)
    wanted = torch.nn.functional.rms_norm(x, (16,), norm.weight, norm.eps)
    torch.testing.assert_close(norm(x), wanted, rtol=0, atol=1e-6)
