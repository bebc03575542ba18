"""Which key a block row sees, said once; what a layer asks of attention; the dense one of CPU training and inference.

Keys are the context rows followed by the block rows; queries are the block rows alone. Rules of the released inference
code (PyPI dflash 0.1.0), see `visible`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from trainer.drafter.blocks import Blocks, Segment

# The block index of a context row, which belongs to no block.
CONTEXT = -1


class Rows(NamedTuple):
    """What the mask asks of rows, as integer tensors that broadcast; `anchor` and `block` are CONTEXT on context rows."""

    position: torch.Tensor
    document: torch.Tensor
    anchor: torch.Tensor
    block: torch.Tensor


def visible(query: Rows, key: Rows, window: int | None) -> torch.Tensor:
    """Return where a block row `query` sees a row `key`, as a broadcast bool tensor. By position, never by block index.

    Context rows: those of the same document STRICTLY before the anchor, on which the target has not run yet.
    Block rows: those of the same block; in both directions in a full layer, backwards only in a sliding one.
    A sliding layer of window W sees, of either kind, what is at most W-1 positions behind the query row.
    """
    # `<`, not `<=`: when the drafter is asked, the target has not run on the anchor, so its state does not exist.
    before_anchor = (key.block == CONTEXT) & (key.document == query.document) & (key.position < query.anchor)
    seen = before_anchor | ((key.block != CONTEXT) & (key.block == query.block))
    if window is None:
        return seen
    # One public trainer bounds the window at the anchor for all rows; the inference code lets it slide with the row.
    distance = query.position - key.position
    return seen & (distance >= 0) & (distance < window)


def context_rows(blocks: Blocks) -> Rows:
    """Return the T context rows of a packed row, each tensor i64[T]."""
    none = torch.full_like(blocks.context_positions, CONTEXT)
    return Rows(blocks.context_positions, blocks.context_documents, none, none)


def block_rows(blocks: Blocks) -> Rows:
    """Return the P·B block rows, each tensor i64[P, B]."""
    # Padding blocks have an ordinal each, too: no two of them see each other.
    ordinal = torch.arange(len(blocks.positions), device=blocks.positions.device)
    columns = (blocks.documents, blocks.anchor_positions, ordinal)
    document, anchor, block = (column[:, None].expand_as(blocks.positions) for column in columns)
    return Rows(blocks.positions, document, anchor, block)


def dense_mask(blocks: Blocks, window: int | None) -> torch.Tensor:
    """Return the whole mask, bool[P·B, T + P·B]: the reference that every backend is compared with."""
    query = Rows(*(each.flatten() for each in block_rows(blocks)))
    keys = Rows(*(torch.cat(pair) for pair in zip(context_rows(blocks), query, strict=True)))
    return visible(Rows(*(each[:, None] for each in query)), keys, window)


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension where `mask`, summed in float32 at least. Every row has to see something: itself."""
    # The lowest finite number, not -inf: a row of -inf is NaN, forward and backward, and no later 0 mends the gradient.
    # CPU and CUDA kernels of softmax sum bf16 in float32 by themselves; an upcast before it is a pass over the scores more.
    return torch.softmax(scores.masked_fill(~mask, torch.finfo(scores.dtype).min), dim=-1)


class KeysValues(NamedTuple):
    """Keys (normed and rotated) and values of rows: f[rows, num_key_value_heads, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor


class Attend(Protocol):
    """Attention of the blocks of one packed row over its context and themselves; one object serves all layers."""

    def __call__(
        self, queries: torch.Tensor, context: KeysValues, block: KeysValues, window: int | None
    ) -> torch.Tensor:
        """Return f[P·B, heads·head_dim] for queries f[P·B, heads, head_dim]; scores are scaled by head_dim^-1/2."""
        ...


def dense_attention(blocks: Blocks) -> Attend:
    """Return dense attention as a device needs it."""
    # 512 blocks of 16 rows over 4,096 tokens keep 6.5 GB of scores a layer: on a GPU of 94 GiB five layers do not fit
    # beside masters and moments. On CPU rows are short and time is short, memory is not.
    return DenseAttention(blocks, recompute=blocks.positions.is_cuda)


class DenseAttention:
    """Attention of the blocks of one packed row, document by document, masks built once and shared by the layers.

    A block sees one document and itself, so scores are split into [n·B, S] against the document's context and
    [n, B, B] within the blocks, under one softmax. The naive [N·B, T + N·B] would be mostly masked.
    """

    def __init__(self, blocks: Blocks, *, recompute: bool = False) -> None:
        """`recompute`: make the scores again in the backward instead of keeping them, which changes no number."""
        self._blocks = blocks
        self._recompute = recompute
        self._masks: dict[int | None, list[torch.Tensor]] = {}

    def __call__(
        self, queries: torch.Tensor, context: KeysValues, block: KeysValues, window: int | None
    ) -> torch.Tensor:
        """See `Attend`."""
        size = self._blocks.block_size
        outputs: list[torch.Tensor] = []
        for segment, mask in zip(self._blocks.segments, self._segment_masks(window), strict=True):
            rows = slice(segment.first_block * size, segment.last_block * size)
            seen = slice(segment.start, segment.end)
            own = queries[rows].unflatten(0, (segment.last_block - segment.first_block, size))
            in_segment = KeysValues(context.keys[seen], context.values[seen])
            in_block = KeysValues(block.keys[rows], block.values[rows])
            outputs.append(self._attend(own, in_segment, in_block, mask))
        return torch.cat(outputs)

    def _attend(
        self, queries: torch.Tensor, context: KeysValues, block: KeysValues, mask: torch.Tensor
    ) -> torch.Tensor:
        if not self._recompute:
            return _attend(queries, context, block, mask)
        # Nothing random happens inside, so the generators' states need not be kept.
        output = checkpoint(_attend, queries, context, block, mask, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(output, torch.Tensor)
        return output

    def _segment_masks(self, window: int | None) -> list[torch.Tensor]:
        # At most two windows occur in a drafter (none, and one), whatever its number of layers.
        if window not in self._masks:
            context, block = context_rows(self._blocks), block_rows(self._blocks)
            self._masks[window] = [_segment_mask(context, block, segment, window) for segment in self._blocks.segments]
        return self._masks[window]


def _segment_mask(context: Rows, block: Rows, segment: Segment, window: int | None) -> torch.Tensor:
    """Return bool[n, B, S + B] for the n blocks and S context rows of a segment."""
    own = Rows(*(each[segment.first_block : segment.last_block] for each in block))
    query = Rows(*(each[:, :, None] for each in own))
    keys = Rows(*(each[segment.start : segment.end] for each in context))
    inside = Rows(*(each[:, None, :] for each in own))
    return torch.cat([visible(query, keys, window), visible(query, inside, window)], dim=-1)


def _attend(queries: torch.Tensor, context: KeysValues, block: KeysValues, mask: torch.Tensor) -> torch.Tensor:
    """Attend in one segment: queries f[n, B, heads, d], mask bool[n, B, S+B]; returns f[n·B, heads·d].

    Query heads are grouped by the key/value head they share, so that keys are never repeated in memory.
    """
    count, size, heads, width = queries.shape
    kv_heads, seen = context.keys.shape[1], context.keys.shape[0]
    shared = heads // kv_heads
    # Scaling the queries is S times cheaper than scaling the scores.
    grouped = queries.view(count, size, kv_heads, shared, width).permute(2, 0, 3, 1, 4) * width**-0.5
    block_keys, block_values = (each.view(count, size, kv_heads, width).permute(2, 0, 1, 3) for each in block)
    # One product of all blocks against the context they share; a batched one would read the keys once for each block.
    flat, per_block = (kv_heads, count * shared * size), (kv_heads, count, shared * size)
    to_context = grouped.reshape(*flat, width) @ context.keys.permute(1, 2, 0)
    to_block = grouped.reshape(*per_block, width) @ block_keys.transpose(-1, -2)
    by_row = (kv_heads, count, shared, size)
    # One softmax over both kinds of keys: two, merged later, would need their normalisers.
    scores = torch.cat([to_context.view(*by_row, seen), to_block.view(*by_row, size)], dim=-1)
    probabilities = masked_softmax(scores, mask[:, None])
    from_context = probabilities[..., :seen].reshape(*flat, seen) @ context.values.transpose(0, 1)
    from_block = probabilities[..., seen:].reshape(*per_block, size) @ block_values
    mixed = from_context.view_as(grouped) + from_block.view_as(grouped)
    return mixed.permute(1, 3, 0, 2, 4).reshape(count * size, heads * width)
