"""The drafter's side of docs/algorithm.md written out a second time, a token and a head at a time, on fixed tensors.

Every `check_` raises AssertionError where our code differs.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from trainer.drafter import anchors, attention, dpace, flex, noise, objective
from trainer.drafter import teacher as teacher_module
from trainer.drafter.blocks import Blocks, Run, build_blocks, pad_blocks
from trainer.drafter.config import derive
from trainer.drafter.inference import DraftBatch
from trainer.drafter.model import Drafter
from trainer.drafter.step import drafter_forward

# A row of three documents and padding; a hole at token 5 of the first; no anchor in the second, but a label right behind the first.
SIZE, MASK_TOKEN, GAMMA = 4, 3, 4.0
LENGTHS, PADDING = (9, 2, 6), 3
STARTS, TOKENS = (0, 9, 11), 20
IDS = np.arange(4, 4 + TOKENS, dtype=np.int32)
LOSS_MASK = np.array([0, 1, 1, 1, 1, 0, 1, 1, 1] + [1, 0] + [0, 1, 1, 1, 1, 1] + [0, 0, 0], dtype=np.uint8)
DOCUMENTS = np.repeat([70, 71, 72, -1], [*LENGTHS, PADDING])
POSITIONS = np.concatenate([np.arange(length, dtype=np.int32) for length in (*LENGTHS, PADDING)])
# (document, position): itself and its successor supervised, both of the document.
ANCHORS = [(0, 1), (0, 2), (0, 3), (0, 6), (0, 7), (2, 1), (2, 2), (2, 3), (2, 4)]


def fixed_blocks(**changes: Any) -> Blocks:
    values = {"num_anchors": 9, "row_budget": 9 * SIZE, "seed": 1, "epoch": 0}
    row = (changes.pop("input_ids", IDS), changes.pop("loss_mask", LOSS_MASK), DOCUMENTS, POSITIONS)
    return build_blocks(*row, **values | changes, block_size=SIZE, mask_token_id=MASK_TOKEN, gamma=GAMMA)


def check_blocks() -> None:
    made = fixed_blocks()
    assert made.anchor_positions.tolist() == [anchor for _, anchor in ANCHORS]
    for n, (document, anchor) in enumerate(ANCHORS):
        for k in range(SIZE):
            at = STARTS[document] + anchor + k
            counts = k > 0 and anchor + k < LENGTHS[document] and bool(LOSS_MASK[at])
            assert made.input_ids[n, k] == (IDS[at] if k == 0 else MASK_TOKEN)
            assert made.labels[n, k] == (IDS[at] if counts else 0)
            assert made.weights[n, k].item() == pytest.approx(math.exp(-(k - 1) / GAMMA) if counts else 0)
            assert made.positions[n, k] == anchor + k


def check_draws() -> None:
    assert fixed_blocks(row_budget=5 * SIZE).count == 5
    assert fixed_blocks(num_anchors=2).documents.tolist() == [0, 0, 2, 2]
    # One block at least for the short document, in proportion for the rest.
    assert anchors.row_shares(np.array([1000, 1]), 10, 512).tolist() == [9, 1]
    many = np.arange(100)
    drawn = [anchors.sample_anchors(many, 10, seed=1, epoch=epoch, document_id=7).tolist() for epoch in (0, 1)]
    assert [len(set(each)) for each in drawn] == [10, 10]
    assert drawn[0] != drawn[1]


def wanted_mask(blocks: int, window: int | None) -> torch.Tensor:
    """The mask bool[blocks·B, T + blocks·B]; blocks behind those of ANCHORS are padding and see no context."""
    wanted = torch.zeros(blocks * SIZE, TOKENS + blocks * SIZE, dtype=torch.bool)
    for n, (document, anchor) in enumerate([*ANCHORS, *[(0, 0)] * (blocks - len(ANCHORS))]):
        for k in range(SIZE):
            first = 0 if window is None else max(0, anchor + k - (window - 1))
            seen = [STARTS[document] + t for t in range(first, anchor)]
            near = [j for j in range(SIZE) if window is None or 0 <= k - j <= window - 1]
            wanted[n * SIZE + k, seen + [TOKENS + n * SIZE + j for j in near]] = True
    return wanted


def check_mask() -> None:
    made = fixed_blocks()
    for window in (None, 3):
        assert torch.equal(attention.dense_mask(made, window), wanted_mask(made.count, window))


def check_flex_mask() -> None:
    """What the kernel asks, a whole tile of 128 queries against all keys; padding keys are nobody's."""
    rows, columns = torch.arange(128)[:, None], torch.arange(flex.KEY_BUCKET)[None]
    none = torch.zeros((), dtype=torch.int64)
    for made, blocks in ((fixed_blocks(), 9), (pad_blocks(fixed_blocks(), 6), 12)):
        own = flex.FlexAttention(made, kernel=torch.Tensor)
        for window in (None, 3):
            asked = own.block_mask(window)
            assert asked.seq_lengths == (blocks * SIZE, flex.KEY_BUCKET)
            seen = asked.mask_mod(none, none, rows, columns)[: blocks * SIZE]
            wanted = wanted_mask(blocks, window)
            assert torch.equal(seen[:, : wanted.shape[1]], wanted)
            assert not seen[:, wanted.shape[1] :].any()


def written_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: Any, enable_gqa: bool
) -> torch.Tensor:
    """What flex_attention computes, f[1, heads, rows, width], its mask made whole: with a backward on a CPU, in any type."""
    rows, columns = (torch.arange(each.shape[-2], device=q.device) for each in (q, k))
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    mask = block_mask.mask_mod(none, none, rows[:, None], columns[None])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)


def check_flex() -> None:
    """Keys and values meet the mask in its order: ours with the kernel written out equals dense attention."""
    made = pad_blocks(fixed_blocks(), 6)
    torch.manual_seed(3)
    queries, own = torch.randn(48, 4, 6, dtype=torch.float64), torch.randn(2, 48, 2, 6, dtype=torch.float64)
    context = attention.KeysValues(*torch.randn(2, TOKENS, 2, 6, dtype=torch.float64))
    for window in (None, 3):
        given = (queries, context, attention.KeysValues(*own), window)
        got, wanted = flex.FlexAttention(made, written_kernel)(*given), attention.DenseAttention(made)(*given)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def check_padding() -> None:
    """Behind the blocks of a row there are blocks without a document, a label or a weight, up to the next multiple."""
    made = fixed_blocks()
    for bucket, blocks in ((0, 9), (1, 9), (9, 9), (5, 10), (16, 16)):
        padded = pad_blocks(made, bucket)
        assert padded.input_ids.shape == padded.positions.shape == (blocks, SIZE)
        assert padded.documents.tolist() == made.documents.tolist() + [-1] * (blocks - 9)
        assert padded.anchor_positions.tolist() == made.anchor_positions.tolist() + [0] * (blocks - 9)
        assert padded.segments[-1].last_block == blocks
        assert padded.count == 9
    none = pad_blocks(fixed_blocks(loss_mask=np.zeros_like(LOSS_MASK)), 5)
    assert (none.count, len(none.positions)) == (0, 5)


@cache
def fixed_drafter() -> tuple[Drafter, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A float64 drafter with a sliding and a full layer, states f[T, 3H], embedding and head f[V, H]."""
    torch.manual_seed(5)
    target = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 9, "num_attention_heads": 4}
    shape = derive(
        target | {"num_key_value_heads": 2, "vocab_size": 40, "head_dim": 6},
        num_layers=2,
        block_size=SIZE,
        mask_token_id=MASK_TOKEN,
        num_target_layer_ids=3,
        sliding_window=3,
        layer_types=("sliding_attention", "full_attention"),
    )
    drafter = Drafter(shape).double()
    for name, parameter in drafter.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    states = torch.randn(TOKENS, 48, dtype=torch.float64)
    return drafter, states, *torch.randn(2, 40, 16, dtype=torch.float64).unbind()


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: torch.Tensor, position: int, base: float = 10_000.0) -> torch.Tensor:
    half = len(x) // 2
    angle = torch.tensor([position / base ** (i / half) for i in range(half)], dtype=x.dtype)
    first, second = x[:half], x[half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])


def one_layer(layer: Any, x: torch.Tensor, context: torch.Tensor, anchor: int, window: int | None) -> torch.Tensor:
    """One decoder layer on one block f[B, H] behind f[anchor, H], head by head and row by row."""
    own, width = layer.self_attn, layer.self_attn.head_dim
    inner = normed(x, layer.input_layernorm.weight)
    rows = torch.cat([context, inner])
    out = torch.zeros(SIZE, 4 * width, dtype=x.dtype)
    for head in range(4):
        q_slice, kv_slice = (slice(at * width, (at + 1) * width) for at in (head, head // 2))
        keys = normed((rows @ own.k_proj.weight.T)[:, kv_slice], own.k_norm.weight)
        keys = torch.stack([turned(key, position) for position, key in enumerate(keys)])
        values = (rows @ own.v_proj.weight.T)[:, kv_slice]
        queries = normed((inner @ own.q_proj.weight.T)[:, q_slice], own.q_norm.weight)
        for k in range(SIZE):
            at = anchor + k
            first, last = (0, len(rows)) if window is None else (max(0, at - window + 1), at + 1)
            scores = keys[first:last] @ turned(queries[k], at) / width**0.5
            out[k, q_slice] = scores.softmax(dim=0) @ values[first:last]
    x = x + out @ own.o_proj.weight.T
    gate, up, down = (getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
    inner = normed(x, layer.post_attention_layernorm.weight)
    return x + (torch.nn.functional.silu(inner @ gate.T) * (inner @ up.T)) @ down.T


def one_block(drafter: Drafter, x: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The whole drafter on one block f[B, H], anchored right behind the context's states f[anchor, 3H]."""
    context = normed(states @ drafter.fc.weight.T, drafter.hidden_norm.weight)
    x = one_layer(drafter.layers[0], x, context, len(states), 3)
    x = one_layer(drafter.layers[1], x, context, len(states), None)
    return normed(x, drafter.norm.weight)


@torch.no_grad()
def check_drafter() -> None:
    drafter, states, embed, _ = fixed_drafter()
    made = fixed_blocks()
    embeds = embed[made.input_ids]
    got = drafter(embeds.flatten(0, 1), states, made).unflatten(0, (-1, SIZE))
    for n, (document, anchor) in enumerate(ANCHORS):
        context = states[STARTS[document] : STARTS[document] + anchor]
        torch.testing.assert_close(got[n], one_block(drafter, embeds[n], context), rtol=0, atol=1e-9)


@torch.no_grad()
def check_drafting() -> None:
    """Two sequences whose contexts grow piece by piece draft what one block alone would behind the whole context."""
    drafter, states, embed, _ = fixed_drafter()
    batch = DraftBatch(drafter, 2)
    batch.extend(torch.stack([states[:5], states[10:15]]), [5, 2])
    batch.extend(torch.stack([states[5:7], states[12:14]]), [1, 2])
    got = batch.draft([0, 1], [20, 30], SIZE, embed)
    for n, (context, anchor) in enumerate(((states[:6], 20), (states[10:14], 30))):
        wanted = one_block(drafter, embed[[anchor, *[MASK_TOKEN] * (SIZE - 1)]], context)
        torch.testing.assert_close(got[n], wanted[1:], rtol=0, atol=1e-9)


def check_objective(kl_weight: float = 0.0) -> None:
    """The sums by hand, over a vocabulary without tokens 0 and 1; every other block is right throughout."""
    _, states, _, head = fixed_drafter()
    made, subset, teacher = fixed_blocks(), torch.arange(2, 40), states[:, :16]
    hidden = torch.randn(made.count, SIZE, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    hidden[::2] = 3 * head[made.labels[::2]]
    sums = objective.block_objective(
        hidden.flatten(0, 1),
        head[subset],
        made,
        chunk_rows=8,
        vocab_subset=subset,
        objective=objective.Objective(kl_weight=kl_weight),
        teacher=teacher,
    )
    loss, weight, right, accepted = 0.0, 0.0, 0, 0
    for n, (document, anchor) in enumerate(ANCHORS):
        leading = True
        accepted += 1
        for k in range(1, SIZE):
            rates, label = (head[subset] @ hidden[n, k]).log_softmax(0), int(made.labels[n, k]) - 2
            hit = bool(made.supervised[n, k]) and int(rates.argmax()) == label
            leading = leading and hit
            right, accepted = right + hit, accepted + leading
            if made.supervised[n, k]:
                # What the target says of the token at anchor + k, it says one token earlier.
                own = (head[subset] @ teacher[STARTS[document] + anchor + k - 1]).log_softmax(0)
                divergence = (own.exp() * (own - rates)).sum()
                loss += float(made.weights[n, k] * (kl_weight * divergence - (1 - kl_weight) * rates[label]))
                weight += float(made.weights[n, k])
    assert float(sums.loss_sum) == pytest.approx(loss, rel=1e-6)
    assert float(sums.weight_sum) == pytest.approx(weight, rel=1e-6)
    assert sums.metrics[:4].tolist() == [right, float(made.supervised.sum()), accepted, made.count]


def check_teacher() -> None:
    check_objective(kl_weight=0.4)
    # The drafter's layers come first, the last layer's output behind them, in both forms.
    states = torch.arange(12.0).view(2, 6)
    own, last = teacher_module.part_states(states, 2)
    assert (own.tolist(), last.tolist()) == ([[0, 1, 2, 3], [6, 7, 8, 9]], [[4, 5], [10, 11]])
    layers, last = teacher_module.part_states(tuple(states.chunk(3, dim=-1)), 2)
    assert (len(layers), last.tolist()) == (2, [[4, 5], [10, 11]])


def check_dpace() -> None:
    # First block: s = 0.9, 0.7, 0.6; P = 0.9, 0.63, 0.378. Second: a hole in row 2; P = 0.9, 0.54.
    confidence = torch.tensor([0.8, 0.4, 0.2, 0.8, 0.2], dtype=torch.float64)
    got = dpace.dpace_weights(confidence, torch.tensor([1, 2, 3, 5, 7]), blocks=2, block_size=SIZE, alpha=0.5)
    assert got.tolist() == pytest.approx([1.908, 1.008, 0.378, 1.44, 0.54])


def check_no_anchor() -> None:
    """A rank without an anchor has a zero gradient for every parameter, so that it joins the others' all-reduce."""
    drafter, states, embed, head = fixed_drafter()
    drafter.zero_grad()
    none = fixed_blocks(loss_mask=np.zeros_like(LOSS_MASK))
    sums = drafter_forward(drafter, embed, head, states, none, num_target_layer_ids=3, chunk_rows=8)
    sums.loss_sum.backward()
    assert (float(sums.loss_sum.detach()), float(sums.weight_sum)) == (0, 0)
    assert all(each.grad is not None and not each.grad.any() for each in drafter.parameters())


def check_noise() -> None:
    """One draw for each document and layer: padding gets none, the given states stay, epochs differ."""
    states = torch.zeros(TOKENS, 6)
    runs = [Run(start, start + length, 70 + i) for i, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True))]
    first, second = (noise.add_noise(states, runs, noise.Noise(1.0, 3, epoch), 2) for epoch in (0, 1))
    alone = noise.add_noise(torch.zeros(6, 6), [Run(0, 6, 72)], noise.Noise(1.0, 3, 0), 2)
    assert not states.any()
    assert not first[sum(LENGTHS) :].any()
    assert not torch.equal(first[:9, :3], first[:9, 3:])
    assert not torch.equal(first, second)
    assert torch.equal(first[11:17], alone)
