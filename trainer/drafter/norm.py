"""RMSNorm, with a backward of its own for the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, accumulated in float32 (float64 for such x)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed x, same shape and dtype."""
        if x.is_cuda:
            # The fused kernel takes one type: bfloat16 rows beside a float32 master fall back to single operations.
            wide = x.to(self.weight.dtype)
            return functional.rms_norm(wide, self.weight.shape, self.weight, self.eps).to(x.dtype)
        return _CpuRMSNorm.apply(x, self.weight, self.eps)


class _CpuRMSNorm(torch.autograd.Function):
    """On CPU torch builds rms_norm of single operations: forward and backward of bf16 [2560, 576] took 31 ms."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return f[..., width]; saves x and one number a row."""
        wide = x.to(_accumulator(x.dtype))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return d/dx = (g·w - x̂ · mean(g·w·x̂)) / rms and d/dw = Σ g·x̂, where x̂ = x / rms."""
        x, weight, inverse = ctx.saved_tensors
        gradient = gradients[0].to(inverse.dtype)
        normed = x.to(inverse.dtype) * inverse
        product = (gradient * normed).flatten(0, -2)
        wide_weight = weight.to(inverse.dtype)
        mean = (product @ wide_weight).div_(x.shape[-1]).view_as(inverse)
        x_gradient = (gradient * wide_weight).addcmul_(normed, mean, value=-1).mul_(inverse)
        return x_gradient.to(x.dtype), product.sum(dim=0).to(weight.dtype), None


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
