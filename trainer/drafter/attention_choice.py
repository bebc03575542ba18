"""Which attention a run trains with: flex where it compiles and agrees with dense on this very device, else dense.

Each drafter looks by itself, before the first step; then all take the same. A kernel that a driver, a shape or a GPU with
little shared memory refuses is found here, and costs speed instead of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from remote.protocol.errors import DflashError
from trainer.config import TrainConfig
from trainer.drafter.attention import Attend, KeysValues, dense_attention
from trainer.drafter.blocks import Blocks, build_blocks, padded_count
from trainer.drafter.config import DrafterConfig
from trainer.drafter.flex import KEY_BUCKET, FlexAttention

# The largest relative distance (Euclidean norm) of an output or gradient from dense attention in float32. bfloat16 has 8
# bits: rounding the probabilities, the result and its gradient costs 2^-9 each, together below 0.6%. float32 leaves room
# for TF32, which a user may have switched on: 10 bits.
_BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 2e-3, torch.float64: 1e-9}

# Block rows of a packed row are padded to one of this many numbers, for a kernel that is compiled for each. Less than an
# eighth of the budget is padding then, and none where the budget is full, as it is in most rows.
_BUCKETS = 8

_HINT = "train with --attention-backend dense"


@dataclass(frozen=True)
class Backend:
    """One way to compute the same attention. `buckets`: how many numbers of block rows it is to meet; 0: any number."""

    name: str
    attention: Callable[[Blocks], Attend]
    buckets: int

    def bucket(self, row_anchors: int) -> int:
        """Return what the number of blocks is padded to a multiple of (see `pad_blocks`), for a row of at most `row_anchors`."""
        return -(-row_anchors // self.buckets) if self.buckets else 0

    def shape(self, tokens: int, blocks: int, row_anchors: int, block_size: int) -> tuple[int, ...]:
        """Return what tells rows of T `tokens` and `blocks` apart for this backend: those with the same use the same kernels."""
        if not self.buckets:
            # Nothing is compiled: the positions of a row are what its other products are made for.
            return (tokens,)
        padded = padded_count(blocks, self.bucket(row_anchors))
        return padded, -(-(tokens + padded * block_size) // KEY_BUCKET)


DENSE = Backend("dense", dense_attention, 0)
FLEX = Backend("flex", FlexAttention, _BUCKETS)


@dataclass(frozen=True)
class Choice:
    """The backend that is taken, and, where it is dense for want of flex, why flex cannot be."""

    backend: Backend
    reason: str = ""


def wants_flex(config: TrainConfig) -> bool:
    """Whether flex is to be tried. On a CPU it has no backward, and the configuration refuses to ask for it."""
    return config.device == "cuda" and config.attention_backend != "dense"


def choose(
    config: TrainConfig, shape: DrafterConfig, device: torch.device, dtype: torch.dtype, flex: Backend = FLEX
) -> Choice:
    """Try flex as this rank would use it, with queries, keys and values of `dtype`; return what it would take.

    Raises:
        DflashError: flex was asked for, and fails here.
    """
    reason = trouble(flex, made_up_blocks(shape).to(device), shape, dtype)
    if not reason:
        return Choice(flex)
    if config.attention_backend == "flex":
        raise DflashError(f"flex attention fails on {device}", cause=reason, hint=_HINT)
    return Choice(DENSE, reason)


def agree(choice: Choice, all_of_us: Callable[[bool], bool]) -> Choice:
    """Return the choice that all drafters take: flex if it works on each of them. A collective of the drafters.

    `all_of_us` tells whether every drafter says yes.
    """
    # Different roundings on different ranks would do no harm; one that needs ten times the memory would end the run.
    if all_of_us(choice.backend is not DENSE) or choice.backend is DENSE:
        return choice
    return Choice(DENSE, "it fails on another drafter, which says why")


def made_up_blocks(shape: DrafterConfig) -> Blocks:
    """Return the blocks of a row of three documents and padding, with padding blocks; every kind of mask tile occurs."""
    lengths, padding = (300, 40, 150), 22
    tokens = sum(lengths) + padding
    # Visibility goes by position. Spread out, so that a window of any size ends inside the longest document.
    stride = max(1, 2 * (shape.sliding_window or 0) // max(lengths))
    positions = np.concatenate([np.arange(length) for length in (*lengths, padding)]) * stride
    documents = np.repeat([0, 1, 2, -1], [*lengths, padding])
    return build_blocks(
        np.zeros(tokens, dtype=np.int32),
        (documents >= 0).astype(np.uint8),
        documents.astype(np.int64),
        positions.astype(np.int32),
        seed=0,
        epoch=0,
        num_anchors=16,
        row_budget=40 * shape.block_size,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        gamma=1.0,
        # Not a divisor of 128, so that tiles end in the middle.
        bucket=25,
    )


def trouble(backend: Backend, blocks: Blocks, shape: DrafterConfig, dtype: torch.dtype) -> str:
    """Return why a backend cannot train on such blocks, on their device: what it raises, or how far it is from dense; or ""."""
    for window in sorted({shape.window(layer) for layer in range(shape.num_hidden_layers)}, key=lambda each: each or 0):
        try:
            distance = _distance(backend, blocks, shape, dtype, window)
        # Compilers, drivers and devices fail in ways of their own; each is a reason, which the caller reports.
        except Exception as error:
            return _in_a_line(error)
        if not distance <= _BOUNDS[dtype]:
            kind = "full" if window is None else f"sliding ({window})"
            return f"{kind} attention is {distance:.2g} away from dense, relative; {_BOUNDS[dtype]:.2g} is allowed"
    return ""


def _distance(backend: Backend, blocks: Blocks, shape: DrafterConfig, dtype: torch.dtype, window: int | None) -> float:
    """Return the largest relative distance of output and gradients from dense attention, which reads the same numbers."""
    device, generator = blocks.positions.device, torch.Generator().manual_seed(0)

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, shape.head_dim, generator=generator).to(device, dtype)

    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    inside, outside = blocks.positions.numel(), len(blocks.context_positions)
    given = [draw(inside, heads), *(draw(rows, kv_heads) for rows in (outside, outside, inside, inside))]
    probe = draw(inside, heads).flatten(1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    wanted = _output_and_gradients(dense_attention(blocks), [each.to(wide) for each in given], probe.to(wide), window)
    got = _output_and_gradients(backend.attention(blocks), given, probe, window)
    distances = [
        torch.linalg.vector_norm(ours.to(wide) - theirs) / torch.linalg.vector_norm(theirs).clamp(min=1e-6)
        for ours, theirs in zip(got, wanted, strict=True)
    ]
    return float(torch.stack(distances).max())  # CPU-GPU sync point, before the first step


def _output_and_gradients(
    attend: Attend, given: list[torch.Tensor], probe: torch.Tensor, window: int | None
) -> list[torch.Tensor]:
    queries, *rest = leaves = [each.detach().requires_grad_() for each in given]
    # The caller may be in a step's autocast, which would round the reference.
    with torch.autocast(probe.device.type, enabled=False):
        output = attend(queries, KeysValues(*rest[:2]), KeysValues(*rest[2:]), window)
        return [output.detach(), *torch.autograd.grad(output, leaves, probe)]


# Where exceptions of a compiler come from: tracing, lowering, and starting the kernel (too much shared memory, for instance).
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")


@contextmanager
def flex_failures() -> Iterator[None]:
    """Name the setting to change where a compiled kernel fails in mid-run, for a shape that was not tried before.

    Raises DflashError; whatever does not come from a compiler passes as it is. Only attention is compiled here.
    """
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(_COMPILERS):
            raise
        hint = "resume from the last checkpoint with --attention-backend dense"
        raise DflashError("flex attention failed", cause=_in_a_line(error), hint=hint) from error


def _in_a_line(error: Exception) -> str:
    # A compiler's message runs over pages, with the reason in front.
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
