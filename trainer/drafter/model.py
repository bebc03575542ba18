"""The DFlash drafter (arXiv 2602.06036): a few Qwen3-style layers that read the target's hidden states as context.

Parameter names are those of the served checkpoint, so that a state_dict is what is saved. Embedding and head are the
target's and appear nowhere here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from trainer.drafter.attention import Attend, KeysValues, dense_attention
from trainer.drafter.blocks import Blocks
from trainer.drafter.config import DrafterConfig
from trainer.drafter.norm import RMSNorm

States = torch.Tensor | Sequence[torch.Tensor]
Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation(positions: torch.Tensor, config: DrafterConfig, dtype: torch.dtype) -> Rotation:
    """Return cos and sin, f[rows, 1, head_dim], of absolute positions i64[rows]; angles in float32 (float64 for such)."""
    # bfloat16 angles would be wrong from position 256 on: it has 8 bits of mantissa.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=wide) / config.head_dim
    angles = positions[:, None].to(wide) * (1.0 / config.rope_theta**exponents)
    both = torch.cat([angles, angles], dim=-1)[:, None, :]
    return both.cos().to(dtype), both.sin().to(dtype)


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotate f[rows, heads, head_dim] over its full head_dim, first half paired with second half."""
    first, second = x.chunk(2, dim=-1)
    return x * by[0] + torch.cat([-second, first], dim=-1) * by[1]


class Attention(nn.Module):
    """Queries of the block rows; keys and values of the context and of the block, through the same projections."""

    def __init__(self, config: DrafterConfig, window: int | None) -> None:
        super().__init__()
        width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.window = window
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(width, heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.head_dim, width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, rows: torch.Tensor, at: Rotation) -> KeysValues:
        """Return keys and values of f[rows, H]; serves context rows and block rows alike."""
        # The norm is per head and comes before the rotation, as in Qwen3.
        keys = self.k_norm(self.k_proj(rows).unflatten(-1, (-1, self.head_dim)))
        return KeysValues(rotate(keys, at), self.v_proj(rows).unflatten(-1, (-1, self.head_dim)))

    def forward(self, rows: torch.Tensor, context: KeysValues, at: Rotation, attend: Attend) -> torch.Tensor:
        """Return f[P·B, H] for block rows f[P·B, H] that passed the layer's input norm."""
        queries = rotate(self.q_norm(self.q_proj(rows).unflatten(-1, (-1, self.head_dim))), at)
        return self.o_proj(attend(queries, context, self.keys_values(rows, at), self.window))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return f[rows, H] for f[rows, H]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP. The context does not pass `input_layernorm` and is never updated; the block does."""

    def __init__(self, config: DrafterConfig, window: int | None) -> None:
        super().__init__()
        self.self_attn = Attention(config, window)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, rows: torch.Tensor, context: KeysValues, at: Rotation, attend: Attend) -> torch.Tensor:
        """Return f[P·B, H] for block rows f[P·B, H]."""
        # Only the block is normed here: `hidden_norm` did it once for the context of all layers.
        rows = rows + self.self_attn(self.input_layernorm(rows), context, at, attend)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class Drafter(nn.Module):
    """The trainable part: `fc`, `hidden_norm`, decoder layers, final `norm`.

    `attention` makes the attention of a packed row. Training may set another than the dense one, which inference uses.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.attention: Callable[[Blocks], Attend] = dense_attention
        width = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList([DecoderLayer(config, config.window(i)) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(width, config.rms_norm_eps)
        # Norms start at 1; without biases and embeddings that leaves the matrices.
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def context_features(self, states: States) -> torch.Tensor:
        """Return hidden_norm(fc(states)), f[T, H], for f[T, L·H] or (split-fc) L tensors f[T, H].

        Both forms apply L slices of `fc` and sum in the same order: split-fc changes where the states lie and no bit of
        what is computed. One product over L·H would sum otherwise, 2e-6 away in float32 at unit scale.
        """
        # Views, never copies: of the packed states, and of the one parameter that both forms train and save.
        layers = states.split(self.config.hidden_size, dim=-1) if isinstance(states, torch.Tensor) else states
        slices = self.fc.weight.split(self.config.hidden_size, dim=1)
        mixed = functional.linear(layers[0], slices[0])
        for state, weight in zip(layers[1:], slices[1:], strict=True):
            # The product adds to the sum while it is made: no pass over memory more, and one rounding a layer in bfloat16.
            mixed = torch.addmm(mixed, state, weight.t())
        return self.hidden_norm(mixed)

    def context_keys_values(self, states: States, positions: torch.Tensor) -> list[KeysValues]:
        """Return every layer's keys and values of context rows at positions i64[T]; inference caches them."""
        features = self.context_features(states)
        at = rotation(positions, self.config, features.dtype)
        return [layer.self_attn.keys_values(features, at) for layer in self._decoder_layers()]

    def draft(self, block_embeds: torch.Tensor, context: Sequence[KeysValues], blocks: Blocks) -> torch.Tensor:
        """Return the normed hidden states f[P·B, H] of block rows f[P·B, H]; the target's head maps them to logits."""
        at = rotation(blocks.positions.flatten(), self.config, block_embeds.dtype)
        # One object for all layers: it holds the masks, which depend on the row and not on the layer.
        attend = self.attention(blocks)
        rows = block_embeds
        for layer, keys_values in zip(self._decoder_layers(), context, strict=True):
            rows = layer(rows, keys_values, at, attend)
        return self.norm(rows)

    def forward(self, block_embeds: torch.Tensor, states: States, blocks: Blocks) -> torch.Tensor:
        """Return f[P·B, H]: `draft` over the context of one packed row's T states."""
        return self.draft(block_embeds, self.context_keys_values(states, blocks.context_positions), blocks)

    def _decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
