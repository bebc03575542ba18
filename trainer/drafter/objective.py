"""The weighted loss of block rows against a frozen head, in chunks, with its gradient made in the forward pass.

Made at once, the logits of 512 blocks of 16 rows over 248,320 tokens would take 8 GB in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from remote.protocol.errors import preflight_error
from trainer.config import TrainConfig
from trainer.drafter.blocks import Blocks
from trainer.drafter.dpace import dpace_weights
from trainer.drafter.randomness import philox
from trainer.drafter.teacher import Lesson, teaching_rows


@dataclass(frozen=True)
class Objective:
    """What a supervised row costs: w·((1 - kl_weight)·CE + kl_weight·KL to the target's distribution).

    w is D-PACE's with this `dpace_alpha`, or, where it is None, the decay of its block.
    """

    dpace_alpha: float | None = None
    kl_weight: float = 0.0

    @classmethod
    def of(cls, config: TrainConfig) -> Objective:
        """Return the objective that a configuration names."""
        return cls(config.dpace_alpha if config.objective == "dpace" else None, config.kl_weight)


DECAY = Objective()
"""Cross-entropy weighted by exp(-(k-1)/gamma)."""


class ObjectiveSums(NamedTuple):
    """Numerators and denominators of one micro-batch; whoever reports divides after summing over ranks and batches.

    `loss_sum` is a differentiable scalar (Σ w·loss), `weight_sum` Σ w; both float32, float64 for float64 states.
    `metrics` f64[4 + 2B] = correct, supervised, accept_len_sum, blocks, correct per row [B], supervised per row [B].
    """

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    metrics: torch.Tensor


def block_objective(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    blocks: Blocks,
    *,
    chunk_rows: int,
    vocab_subset: torch.Tensor | None = None,
    objective: Objective = DECAY,
    teacher: torch.Tensor | None = None,
) -> ObjectiveSums:
    """Return the sums over the supervised rows of hidden f[N·B, H].

    `head_weight` f[V, H] is the target's, frozen: it gets no gradient. With `vocab_subset`, ascending i64[V'], it holds
    the rows of these tokens alone, f[V', H], and all softmaxes run over them. At most `chunk_rows` rows of logits, but
    always a whole block, exist at once (three times as many with KL); the softmax is float32 (float64 for such states).
    `teacher` f[T, H] is what the target's head reads at the T context rows, needed for KL alone.
    """
    if objective.kl_weight and teacher is None:
        raise ValueError("KL needs the target's last states")
    labels = blocks.labels.flatten()[blocks.supervised_rows]
    if vocab_subset is not None:
        if head_weight.shape[0] != vocab_subset.shape[0]:
            raise ValueError(f"head of {head_weight.shape[0]} rows for a vocabulary of {vocab_subset.shape[0]} tokens")
        # Exact: `make_vocab_subset` refused what is missing. A check here would wait for the device.
        labels = torch.searchsorted(vocab_subset, labels)
    loss_sum, weight_sum, correct = _ChunkedLoss.apply(
        hidden, head_weight, blocks, labels, objective, chunk_rows, teacher
    )
    return ObjectiveSums(loss_sum, weight_sum, _metrics(correct, blocks))


def make_vocab_subset(token_ids_seen: NDArray[np.integer], vocab_size: int, extra: int, seed: int) -> NDArray[np.int64]:
    """Return ascending i64[V']: every token that occurs in the data, and `extra` random others.

    Labels come from the data, so each has a place. The others keep the softmax from forgetting what the data lacks.

    Raises:
        DflashError: a token lies outside the vocabulary, and would have no row in the head (code 7).
    """
    seen = np.unique(np.asarray(token_ids_seen, dtype=np.int64))
    if seen.size and not (seen[0] >= 0 and seen[-1] < vocab_size):
        raise preflight_error(
            "the data's tokens do not fit the target's vocabulary",
            cause=f"token ids {seen[0]} to {seen[-1]} for a vocabulary of {vocab_size}",
            hint="prepare the data with the target's own tokenizer",
        )
    others = np.setdiff1d(np.arange(vocab_size, dtype=np.int64), seen)
    order = np.argsort(philox("vocabulary", seed).random_raw(len(others)), kind="stable")
    return np.sort(np.concatenate([seen, others[order[:extra]]]))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Chunk(NamedTuple):
    """Whole blocks: `part` of the M supervised rows lies in blocks [first, last)."""

    first: int
    last: int
    part: slice


def _chunks(blocks: Blocks, chunk_rows: int) -> Iterator[_Chunk]:
    """Cut between blocks only: a row's D-PACE weight needs its whole block before any gradient of it is made."""
    at_once = max(1, chunk_rows // blocks.block_size)
    for first in range(0, blocks.count, at_once):
        last = min(first + at_once, blocks.count)
        part = slice(blocks.supervised_before[first], blocks.supervised_before[last])
        if part.start < part.stop:
            yield _Chunk(first, last, part)


class _ChunkedLoss(torch.autograd.Function):
    """Σ w·loss, with d/d hidden computed beside it, so that logits are made once and never kept."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: torch.Tensor,
        head_weight: torch.Tensor,
        blocks: Blocks,
        labels: torch.Tensor,
        objective: Objective,
        chunk_rows: int,
        teacher: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (loss sum, weight sum, correct bool[M]) for hidden f[N·B, H] and the M supervised rows' labels."""
        # Rows without loss (row 0 of every block, holes, the end) keep a zero gradient and never meet the head.
        gradient = torch.zeros_like(hidden)
        decay = blocks.weights.to(_wide(hidden.dtype)).flatten()[blocks.supervised_rows]
        loss_sum, weight_sum = decay.new_zeros(()), decay.new_zeros(())
        correct = torch.zeros_like(labels, dtype=torch.bool)
        # On CPU 256 rows fit the cache: 8,000 tokens cost half of what chunks of 2,048 rows do.
        for chunk in _chunks(blocks, chunk_rows):
            part, rows = chunk.part, blocks.supervised_rows[chunk.part]
            states = teacher[teaching_rows(blocks, rows)] if objective.kl_weight and teacher is not None else None
            weigh = _weigher(objective, blocks, chunk, decay[part])
            losses, weights, correct[part], rows_gradient = _chunk_losses(
                hidden[rows], head_weight, labels[part], weigh, states, objective.kl_weight
            )
            loss_sum += losses.sum()
            weight_sum += weights.sum()
            gradient[rows] = rows_gradient.to(hidden.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight_sum, correct)
        return loss_sum, weight_sum, correct

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: torch.autograd.function.FunctionCtx, loss_gradient: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of hidden alone; the head is frozen."""
        (gradient,) = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        return gradient * loss_gradient.to(gradient.dtype), *(None,) * 6


def _weigher(
    objective: Objective, blocks: Blocks, chunk: _Chunk, decay: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what turns the probabilities f[m] of a chunk's labels into its weights f[m]."""
    alpha = objective.dpace_alpha
    if alpha is None:
        return lambda _: decay
    size = blocks.block_size
    rows = blocks.supervised_rows[chunk.part] - chunk.first * size
    return lambda confidence: dpace_weights(
        confidence, rows, blocks=chunk.last - chunk.first, block_size=size, alpha=alpha
    )


def _chunk_losses(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    weigh: Callable[[torch.Tensor], torch.Tensor],
    teacher: torch.Tensor | None,
    kl_weight: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return w·loss f[m], w f[m], whether the label is the argmax, and the gradient f[m, H] of hidden f[m, H].

    A function, so that its logits are gone before the next chunk makes its own: in the loop a name kept them until then,
    2 GB more at 2,048 rows of 248,320 tokens.
    """
    wide, dtype = _wide(hidden.dtype), head_weight.dtype
    logits = (hidden.to(dtype) @ head_weight.T).to(wide)
    lesson = None if teacher is None else Lesson.of((teacher.to(dtype) @ head_weight.T).to(wide))
    losses, weights, correct, logits_gradient = _row_losses(logits, labels, weigh, lesson, kl_weight)
    return losses, weights, correct, logits_gradient.to(dtype) @ head_weight


def _row_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weigh: Callable[[torch.Tensor], torch.Tensor],
    lesson: Lesson | None,
    kl_weight: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return w·loss f[m], w f[m], whether the label is the argmax, and the gradient f[m, V], which overwrites `logits`.

    One exponential serves loss, confidence and gradient. The weights are constants to the gradient.
    """
    chosen = logits.gather(-1, labels[:, None])
    # max with its index is cheaper than argmax and logsumexp, and takes the first of equals, as serving does.
    highest, predicted = logits.max(dim=-1, keepdim=True)
    shifted = logits.sub_(highest)
    divergence = None if lesson is None else lesson.divergence(shifted)
    exponentials = shifted.exp_()
    total = exponentials.sum(dim=-1, keepdim=True)
    log_total = total.log()
    cross_entropy = (log_total + highest - chosen)[:, 0]
    weights = weigh(cross_entropy.neg().exp())
    gradient = exponentials.mul_(weights[:, None] / total)
    losses = cross_entropy
    if lesson is not None and divergence is not None:
        losses = (1 - kl_weight) * cross_entropy + kl_weight * (divergence + log_total[:, 0])
        gradient.sub_(lesson.probabilities.mul_(kl_weight * weights[:, None]))
    gradient.scatter_add_(-1, labels[:, None], -(1 - kl_weight) * weights[:, None])
    return losses * weights, weights, predicted[:, 0] == labels, gradient


def _metrics(correct: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Stack the counts on the device: one copy to the host a step, not one for each figure."""
    # float64: float32 stops counting at 16.7 million rows, which a long sum over ranks and steps reaches.
    right = torch.zeros(blocks.supervised.numel(), dtype=torch.float64, device=correct.device)
    right[blocks.supervised_rows] = correct.to(torch.float64)
    right = right.view_as(blocks.supervised)
    per_row = blocks.supervised.sum(dim=0, dtype=torch.float64)
    # 1 + leading correct rows: what teacher forcing would commit, the bonus token included.
    accepted = (1 + right[:, 1:].cumprod(dim=-1).sum(dim=-1)).sum()
    count = torch.full((), blocks.count, dtype=torch.float64, device=correct.device)
    heads = torch.stack([right.sum(), per_row.sum(), accepted, count])
    return torch.cat([heads, right.sum(dim=0), per_row])
