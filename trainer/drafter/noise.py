"""Gaussian noise on the target's hidden states, in training only: it makes a drafter robust against states off its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.drafter.blocks import Run
from trainer.drafter.model import States
from trainer.drafter.randomness import key


@dataclass(frozen=True)
class Noise:
    """What decides the draws: standard deviation (in units of the states), seed and epoch. The rank does not."""

    std: float
    seed: int
    epoch: int


def add_noise(states: States, runs: Sequence[Run], noise: Noise, num_layers: int) -> States:
    """Return states plus noise, in the form they came: f[T, L·H] or L tensors f[T, H]; padding rows get none.

    One draw for each (document, captured layer), so that both forms, any packing and any rank add the same numbers.
    (A CUDA generator draws other numbers than the CPU's.)
    """
    if noise.std == 0:
        return states
    # Layer by layer in the packed form too: one draw over [S, L·H] would be another sequence of numbers.
    if isinstance(states, torch.Tensor):
        layers = states.chunk(num_layers, dim=-1)
        return torch.cat([_noisy(each, runs, noise, layer) for layer, each in enumerate(layers)], dim=-1)
    return tuple(_noisy(each, runs, noise, layer) for layer, each in enumerate(states))


def _noisy(state: torch.Tensor, runs: Sequence[Run], noise: Noise, layer: int) -> torch.Tensor:
    # The states lie in a slot that another process wrote and may verify again: never in place.
    noisy = state.clone()
    generator = torch.Generator(device=state.device)
    for run in runs:
        generator.manual_seed(key("noise", noise.seed, noise.epoch, run.document_id, layer, bits=56))
        shape = (run.end - run.start, state.shape[-1])
        # Drawn in float32 whatever the states' type: a draw made in bfloat16 would be another one.
        draw = torch.randn(shape, generator=generator, device=state.device, dtype=torch.float32)
        noisy[run.start : run.end] += (draw * noise.std).to(state.dtype)
    return noisy
