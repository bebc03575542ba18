"""One micro-batch through the drafter: embed, add noise, draft, compare."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from trainer.drafter.blocks import Blocks
from trainer.drafter.model import States
from trainer.drafter.noise import Noise, add_noise
from trainer.drafter.objective import DECAY, Objective, ObjectiveSums, block_objective


def drafter_forward(
    drafter: Callable[[torch.Tensor, States, Blocks], torch.Tensor],
    embed_weight: torch.Tensor,
    head_weight: torch.Tensor,
    states: States,
    blocks: Blocks,
    *,
    num_target_layer_ids: int,
    chunk_rows: int,
    vocab_subset: torch.Tensor | None = None,
    noise: Noise | None = None,
    objective: Objective = DECAY,
    teacher: torch.Tensor | None = None,
) -> ObjectiveSums:
    """Return the micro-batch's sums; `loss_sum.backward()` gives the gradient of the SUM, to be scaled once a step.

    `drafter` is a Drafter or one wrapped in DistributedDataParallel. `embed_weight` f[V, H] and `head_weight` (see
    `block_objective`) are the target's, frozen. `states` f[T, L·H], or L tensors f[T, H], of the blocks' packed row, in
    the drafter's dtype and on its device, L = `num_target_layer_ids`. They get the noise; `teacher` (see
    `block_objective`) never does.
    """
    if noise is not None:
        states = add_noise(states, blocks.runs, noise, num_target_layer_ids)
    # Frozen, so a plain look-up: no gradient, no module, and DistributedDataParallel never sees the target's weights.
    block_embeds = functional.embedding(blocks.input_ids.flatten(), embed_weight)
    hidden = drafter(block_embeds, states, blocks)
    return block_objective(
        hidden,
        head_weight,
        blocks,
        chunk_rows=chunk_rows,
        vocab_subset=vocab_subset,
        objective=objective,
        teacher=teacher,
    )
