"""split-fc says where the captured states lie, and nothing about what is computed of them."""

from __future__ import annotations

import pytest
import torch

from trainer.drafter.blocks import Run
from trainer.drafter.model import Drafter
from trainer.drafter.noise import Noise, add_noise

ULP = 2.0**-23
"""One unit in the last place of 1 in float32, 1.19e-7: the difference that is allowed at unit scale."""

SHAPES = [(3, 50, 32), (5, 911, 576), (5, 61, 1024), (2, 1, 64)]


def drafter_of(config, layers, width, dtype=torch.float32):
    torch.manual_seed(1)
    target = {"num_hidden_layers": 12, "hidden_size": width}
    return Drafter(config(target, num_layers=1, num_target_layer_ids=layers)).to(dtype)


def both_forms(layers, tokens, width):
    """Noisy states as one row f[T, L·H], and as a slot holds them with split-fc: one layer behind another."""
    states = torch.randn(tokens, layers * width)
    noise, runs = Noise(0.1, seed=3, epoch=1), (Run(0, tokens, 7),)
    apart = tuple(layer.contiguous() for layer in states.chunk(layers, dim=-1))
    return add_noise(states, runs, noise, layers), add_noise(apart, runs, noise, layers)


@pytest.mark.parametrize(("layers", "tokens", "width"), SHAPES)
def test_on_equals_off_to_the_last_place_with_the_same_noise(config, layers, tokens, width):
    drafter = drafter_of(config, layers, width)
    probe = torch.randn(tokens, width)
    results = []
    for states in both_forms(layers, tokens, width):
        features = drafter.context_features(states)
        (gradient,) = torch.autograd.grad((features * probe).sum(), drafter.fc.weight)
        results.append((features.detach(), gradient / gradient.abs().max()))
    (off, off_gradient), (on, on_gradient) = results
    # hidden_norm brings features to unit scale, whatever the size of the states.
    assert off.square().mean().item() == pytest.approx(1, abs=0.02)
    torch.testing.assert_close(on, off, rtol=0, atol=ULP)
    torch.testing.assert_close(on_gradient, off_gradient, rtol=0, atol=ULP)


@pytest.mark.parametrize(("layers", "tokens", "width"), SHAPES[1:3])
def test_one_product_over_all_layers_would_miss_the_bound(config, layers, tokens, width):
    # The released inference code sums so: the same function, further away than the two forms may be from one another.
    drafter = drafter_of(config, layers, width)
    with torch.no_grad():
        states, _ = both_forms(layers, tokens, width)
        together = drafter.hidden_norm(drafter.fc(states))
        difference = (together - drafter.context_features(states)).abs().max().item()
    assert ULP < difference < 1e-5


def test_the_slices_are_those_of_the_serving_weight(config):
    drafter = drafter_of(config, 3, 32, torch.float64)
    states = torch.randn(20, 96, dtype=torch.float64)
    wanted = drafter.hidden_norm(states @ drafter.fc.weight.T)
    torch.testing.assert_close(drafter.context_features(states), wanted, rtol=0, atol=1e-13)
    swapped = drafter.context_features(tuple(states.chunk(3, dim=-1))[::-1])
    assert (swapped - wanted).abs().max() > 0.1


def test_bfloat16_forms_agree_and_lie_near_float64(config):
    drafter = drafter_of(config, 5, 64, torch.bfloat16)
    packed, apart = both_forms(5, 40, 64)
    off = drafter.context_features(packed.bfloat16())
    on = drafter.context_features(tuple(layer.bfloat16() for layer in apart))
    torch.testing.assert_close(on, off, rtol=0, atol=0)
    wanted = drafter.double().context_features(packed.bfloat16().double())
    # Half a place of bfloat16 is 1/256 at 1 to 2; each layer's sum rounds once.
    assert (off.double() - wanted).abs().max() < 0.05
