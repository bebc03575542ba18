"""Training forward against the released inference code (PyPI dflash 0.1.0), block by block, and mutants of it.

The reference runs one block at a time behind its own cache, the way it serves; ours runs a whole packed row at once.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from dflash.model import DFlashDraftModel, _crop_to, _make_cache
from transformers import Qwen3Config

from trainer.drafter import attention as attention_module
from trainer.drafter.attention import CONTEXT
from trainer.drafter.inference import DraftBatch
from trainer.drafter.model import Drafter

LAYERS = {
    "full": {"layer_types": "full"},
    "sliding": {"layer_types": "sliding", "sliding_window": 5},
    "sliding, window below block": {"layer_types": "sliding", "sliding_window": 2},
    "mixed": {"layer_types": "mixed", "sliding_window": 5},
    "listed": {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 5},
}


def make_drafter(config, dtype=torch.float32) -> Drafter:
    torch.manual_seed(3)
    drafter = Drafter(config)
    for name, parameter in drafter.named_parameters():
        # Weights large enough that every part matters, and norms that differ from 1.
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.25)
    return drafter.to(dtype).eval()


def make_reference(drafter: Drafter, dtype=torch.float32) -> DFlashDraftModel:
    reference = DFlashDraftModel(Qwen3Config(**drafter.config.to_zlab("float32")))
    reference.load_state_dict(drafter.state_dict(), strict=True)
    return reference.to(dtype).eval()


def inputs(blocks, config, dtype=torch.float32):
    torch.manual_seed(4)
    embeds = torch.randn(config.vocab_size, config.hidden_size, dtype=dtype)[blocks.input_ids.flatten()]
    width = len(config.target_layer_ids) * config.hidden_size
    return embeds, torch.randn(len(blocks.context_positions), width, dtype=dtype)


@torch.no_grad()
def reference_forward(reference, embeds, states, blocks):
    """Draft every block as spec_generate would: the context in two pieces through the cache, then the block."""
    outputs = []
    size = blocks.block_size
    for n in range(blocks.count):
        anchor = int(blocks.anchor_positions[n])
        start = int(blocks.anchor_rows[n]) - anchor
        cache = _make_cache(reference.config)
        block = embeds[n * size : (n + 1) * size][None]
        split = anchor // 2
        for first, last in ((0, split), (split, anchor)):
            if last > first or last == anchor:
                out = reference(
                    target_hidden=states[start + first : start + last][None],
                    noise_embedding=block if last == anchor else block[:, :1],
                    position_ids=torch.arange(first, last + (size if last == anchor else 1))[None],
                    past_key_values=cache,
                    use_cache=True,
                )
                _crop_to(cache, last)
        outputs.append(out[0])
    return torch.cat(outputs)


@pytest.mark.parametrize("layers", LAYERS)
def test_training_equals_inference_at_every_anchor_of_a_packed_row(config, row, blocks_of, layers):
    drafter = make_drafter(config(**LAYERS[layers]))
    blocks = blocks_of(row([19, 4, 23, 3], 2), num_anchors=6)
    embeds, states = inputs(blocks, drafter.config)
    assert blocks.count > 10
    wanted = reference_forward(make_reference(drafter), embeds, states, blocks)
    torch.testing.assert_close(drafter(embeds, states, blocks).detach(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layers", LAYERS)
def test_training_equals_inference_in_a_row_of_one_document(config, row, blocks_of, layers):
    drafter = make_drafter(config(**LAYERS[layers]))
    blocks = blocks_of(row([23]), num_anchors=8)
    embeds, states = inputs(blocks, drafter.config)
    wanted = reference_forward(make_reference(drafter), embeds, states, blocks)
    torch.testing.assert_close(drafter(embeds, states, blocks).detach(), wanted, rtol=0, atol=1e-5)


def test_a_document_reads_the_same_alone_and_packed(config, row, blocks_of):
    drafter = make_drafter(config(**LAYERS["listed"]), torch.float64)
    packed = row([19, 23], 3)
    together = blocks_of(packed, num_anchors=6)
    alone = blocks_of({name: values[19:42] for name, values in packed.items()}, num_anchors=6)
    embeds, states = inputs(together, drafter.config, torch.float64)
    own = (together.documents == 1).repeat_interleave(together.block_size)
    wanted = drafter(embeds, states, together)[own]
    torch.testing.assert_close(drafter(embeds[own], states[19:42], alone), wanted, rtol=0, atol=1e-12)


def unshift(rows, blocks):
    inside = rows.block != CONTEXT
    true = blocks.anchor_positions[rows.block.clamp(min=0)] - 23
    return rows._replace(position=torch.where(inside, rows.position + true, rows.position))


def anchored_window(query, key, window):
    seen = attention_module.visible(query, key, None)
    if window is None:
        return seen
    inside = (key.block != CONTEXT) & (key.position <= query.position)
    return seen & (inside | ((key.block == CONTEXT) & (key.position >= query.anchor - window)))


def visible(query, key, window):
    return attention_module.visible(query, key, window)


def move_blocks(blocks, **changed):
    return dataclasses.replace(blocks, **changed)


# The mistakes that others made: name -> (blocks, states) -> (blocks, states, mask function).
MUTANTS = {
    "anchor not strictly excluded": lambda b, s: (
        b,
        s,
        lambda q, k, w: visible(q._replace(anchor=q.anchor + 1), k, w),
    ),
    # Masks keep the true positions: only the rotation is wrong.
    "rope position S+k for a+k": lambda b, s: (
        move_blocks(b, positions=b.positions - b.anchor_positions[:, None] + 23),
        s,
        lambda q, k, w: visible(unshift(q, b), unshift(k, b), w),
    ),
    "context positions shifted by one": lambda b, s: (
        move_blocks(b, context_positions=b.context_positions + 1),
        s,
        visible,
    ),
    "states shifted against the tokens": lambda b, s: (b, s.roll(1, dims=0), visible),
    "document leak in a packed row": lambda b, s: (
        b,
        s,
        lambda q, k, w: visible(q, k._replace(document=q.document), w),
    ),
    "sliding bound at the anchor for all rows": lambda b, s: (b, s, anchored_window),
    "sliding window one too wide": lambda b, s: (b, s, lambda q, k, w: visible(q, k, w and w + 1)),
    "no block order inside sliding layers": lambda b, s: (
        b,
        s,
        lambda q, k, w: visible(q, k, w) | ((k.block == q.block) & (k.block != CONTEXT)),
    ),
    "causal blocks in full layers": lambda b, s: (b, s, lambda q, k, w: visible(q, k, w or 10**6)),
    "visibility by block index": lambda b, s: (b, s, lambda q, k, w: visible(q._replace(anchor=q.block * 4), k, w)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_mistake_is_far_from_the_reference(config, row, blocks_of, monkeypatch, mutant):
    drafter = make_drafter(config(**LAYERS["mixed"]))
    blocks = blocks_of(row([19, 4, 23, 3], 2), num_anchors=6)
    # One key row more than is needed, so that a mask that looks too far finds something there.
    wide = tuple(s._replace(start=0, end=len(blocks.context_positions)) for s in blocks.segments)
    blocks = dataclasses.replace(blocks, segments=wide)
    embeds, states = inputs(blocks, drafter.config)
    wanted = reference_forward(make_reference(drafter), embeds, states, blocks)
    torch.testing.assert_close(drafter(embeds, states, blocks).detach(), wanted, rtol=0, atol=1e-5)
    mutated, moved, mask = MUTANTS[mutant](blocks, states)
    with monkeypatch.context() as patch:
        patch.setattr(attention_module, "visible", guarded(mask, attention_module.visible))
        got = drafter(embeds, moved, mutated).detach()
    assert (got - wanted).abs().max() > 1e-2


def guarded(mutant, original):
    """A mutant calls `visible` of the module, which is then itself: give it the original back while it runs."""

    def call(query, key, window):
        attention_module.visible = original
        try:
            return mutant(query, key, window)
        finally:
            attention_module.visible = call

    return call


@pytest.mark.parametrize("layers", ["full", "mixed"])
def test_drafting_behind_a_growing_context_equals_training(config, row, blocks_of, layers):
    drafter = make_drafter(config(**LAYERS[layers]))
    packed = row([12, 17])
    blocks = blocks_of(packed, num_anchors=1)
    embed = torch.randn(40, 32)
    head = torch.randn(40, 32)
    _, states = inputs(blocks, drafter.config)
    hidden = drafter(embed[blocks.input_ids.flatten()], states, blocks).unflatten(0, (-1, 4))
    wanted = (hidden[:, 1:] @ head.T).argmax(dim=-1).tolist()
    anchors = blocks.anchor_positions.tolist()
    batch = DraftBatch(drafter, 2)
    starts = [0, 12]
    longest = max(anchors)
    for step in range(longest):
        piece = torch.stack([states[min(start + step, len(states) - 1)] for start in starts])[:, None]
        batch.extend(piece, [int(step < anchor) for anchor in anchors])
    tokens = [int(packed["input_ids"][start + anchor]) for start, anchor in zip(starts, anchors, strict=True)]

    def guessed(sequences, tokens):
        return (batch.draft(sequences, tokens, 4, embed) @ head.T).argmax(dim=-1).tolist()

    assert guessed([0, 1], tokens) == wanted
    assert guessed([1], tokens[1:]) == wanted[1:]
    batch.select([1])
    assert guessed([0], tokens[1:]) == wanted[1:]


def test_the_state_has_the_serving_names_and_no_buffer(config):
    drafter = Drafter(config(num_layers=2))
    inside = [
        *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]
    ends = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert set(drafter.state_dict()) == ends | {f"layers.{i}.{name}" for i in range(2) for name in inside}


def test_bfloat16_runs_and_stays_near(config, row, blocks_of):
    blocks = blocks_of(row([19, 14]))
    drafter = make_drafter(config())
    embeds, states = inputs(blocks, drafter.config)
    wanted = drafter(embeds, states, blocks)
    narrow = make_drafter(config(), torch.bfloat16)(embeds.bfloat16(), states.bfloat16(), blocks)
    assert narrow.dtype is torch.bfloat16
    assert (narrow.float() - wanted).abs().mean() < 0.05
