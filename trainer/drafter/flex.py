"""The blocks' attention by torch's flex_attention: one fused kernel that makes scores where `visible` says, and keeps none.

For CUDA; on a CPU flex_attention has no backward. Keys are the context rows, then the block rows, then padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from trainer.drafter.attention import CONTEXT, KeysValues, Rows, block_rows, context_rows, visible
from trainer.drafter.blocks import PADDING, Blocks

Kernel = Callable[..., torch.Tensor]
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Keys are padded to a multiple of this, so that a run of 4,096 tokens a row has four numbers of keys for each number of
# block rows instead of 32. Tiles that nobody sees cost no time; a copy of the keys is made anyway, to join them.
KEY_BUCKET = 1024

# Shapes that one process may compile the kernel for. Beyond torch's own limit, 8, it would refuse the ninth.
_MOST_SHAPES = 512


@cache
def compiled_kernel(compiler: str = "inductor") -> Kernel:
    """Return flex_attention, compiled anew for every shape it meets; `fullgraph` makes it raise where it cannot be.

    It changes settings of the process, which compiles nothing else.
    """
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = _MOST_SHAPES
    # The kernel runs inside DistributedDataParallel, where dynamo would cut graphs at the reducer's buckets; versions of it
    # refuse flex_attention for that. There are no parameters in this graph, so nothing to cut for.
    dynamo.optimize_ddp = False
    # Static shapes give the faster kernel, and buckets keep them few.
    compiled = torch.compile(flex_attention, backend=compiler, dynamic=False, fullgraph=True)
    # Fewer than 128 queries would go to the kernel for decoding, which has no variant for 96 (torch 2.11, H200).
    return partial(compiled, kernel_options={"BACKEND": "TRITON"})


class FlexAttention:
    """Attention of the blocks of one packed row (`Attend`); its block masks are built once and shared by the layers."""

    def __init__(self, blocks: Blocks, kernel: Kernel | None = None) -> None:
        """`kernel`: what is called in the place of the compiled flex_attention."""
        self._kernel = kernel or compiled_kernel()
        self._masks: dict[int | None, BlockMask] = {}
        # Half of the bytes that the kernel reads for its mask, beside int64.
        self._queries = Rows(*(each.flatten().int() for each in block_rows(blocks)))
        context = Rows(*(each.int() for each in context_rows(blocks)))
        self._padding = -(len(context.position) + len(self._queries.position)) % KEY_BUCKET
        # Of no block, and of a document that none has but padding blocks, which are anchored at 0: nobody sees them.
        nobody = {"position": 0, "document": PADDING, "anchor": CONTEXT, "block": CONTEXT}
        self._keys = Rows(
            *(
                functional.pad(torch.cat([outside, inside]), (0, self._padding), value=value)
                for outside, inside, value in zip(context, self._queries, nobody.values(), strict=True)
            )
        )

    def __call__(
        self, queries: torch.Tensor, context: KeysValues, block: KeysValues, window: int | None
    ) -> torch.Tensor:
        """See `Attend`."""
        padding = block.keys.new_zeros(self._padding, *block.keys.shape[1:])
        keys, values = (torch.cat([*pair, padding]) for pair in zip(context, block, strict=True))
        # [rows, heads, width] -> [1, heads, rows, width], as views.
        q, k, v = (each.transpose(0, 1)[None] for each in (queries, keys, values))
        mixed = self._kernel(q, k, v, block_mask=self.block_mask(window), enable_gqa=True)
        return mixed[0].transpose(0, 1).flatten(1)

    def block_mask(self, window: int | None) -> BlockMask:
        """Return which tiles of 128 by 128 are seen by none, some or all rows; made on the device, which nobody waits for."""
        if window not in self._masks:
            rows, keys = len(self._queries.position), len(self._keys.position)
            device = self._queries.position.device
            self._masks[window] = create_block_mask(
                mask_mod(self._queries, self._keys, window), None, None, rows, keys, device=device
            )
        return self._masks[window]


def mask_mod(queries: Rows, keys: Rows, window: int | None) -> MaskMod:
    """Return `visible` as flex_attention asks for it: by (batch, head, number of the query, number of the key).

    It is asked beyond the last query too, up to a whole tile of 128, where it has to answer without reading there.
    """
    # Keys are whole tiles already.
    last = len(queries.position) - 1

    def seen(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        inside = row.clamp(max=last)
        query = Rows(queries.position[inside], queries.document[inside], queries.anchor[inside], queries.block[inside])
        key = Rows(keys.position[column], keys.document[column], keys.anchor[column], keys.block[column])
        return visible(query, key, window)

    return seen
