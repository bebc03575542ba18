"""D-PACE (arXiv 2605.18810, eq. 7 to 9): row weights that follow the drafter's own confidence instead of a fixed decay.

The expected accepted length of a block is the sum over its rows of P_k, the probability that rows 1..k are all right.
Row k's part in it is w_k = P_k + P_k+1 + ...: a row counts by what it is reached with and by what lies behind it.
"""

from __future__ import annotations

import torch


@torch.no_grad()
def dpace_weights(
    confidence: torch.Tensor, rows: torch.Tensor, *, blocks: int, block_size: int, alpha: float
) -> torch.Tensor:
    """Return the weights f[m] of m supervised rows of `blocks` whole blocks, without a gradient.

    `confidence` f[m] is the drafter's probability of each row's label, `rows` i64[m] its place in the flattened
    [blocks·B]. It enters as (1 - alpha)·p + alpha, so that one hopeless row does not silence all behind it. A row without
    loss (the anchor, a hole, beyond the end) is passed for sure, adds nothing to the sums and has no weight.
    """
    smoothed = confidence.new_ones(blocks * block_size)
    smoothed[rows] = (1 - alpha) * confidence + alpha
    reached = smoothed.view(blocks, block_size).cumprod(dim=-1).flatten()
    credit = torch.zeros_like(reached)
    credit[rows] = reached[rows]
    # Suffix sums by a mask: a float cumsum has no deterministic kernel on CUDA, a product would be cast by autocast.
    behind = torch.ones(block_size, block_size, dtype=torch.bool, device=rows.device).triu()
    weights = (credit.view(blocks, 1, block_size) * behind).sum(dim=-1)
    return weights.flatten()[rows]
