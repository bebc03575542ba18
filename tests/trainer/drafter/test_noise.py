"""Noise depends on (seed, epoch, document, layer) and on nothing else."""

from __future__ import annotations

import pytest
import torch

from trainer.drafter.blocks import Run
from trainer.drafter.noise import Noise, add_noise

RUNS = (Run(0, 5, 70), Run(5, 12, 71))


def states(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(14, 24, dtype=dtype)


def test_packed_and_split_get_the_same_draws():
    noise = Noise(0.1, seed=1, epoch=2)
    packed = add_noise(states(), RUNS, noise, 3)
    split = add_noise(states().chunk(3, dim=-1), RUNS, noise, 3)
    assert torch.equal(packed, torch.cat(tuple(split), dim=-1))


def test_a_document_gets_the_same_draws_in_another_row():
    noise = Noise(0.1, seed=1, epoch=2)
    together = add_noise(states(), RUNS, noise, 3) - states()
    alone = add_noise(states()[5:12], (Run(0, 7, 71),), noise, 3) - states()[5:12]
    torch.testing.assert_close(together[5:12], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("other", [Noise(0.1, 2, 2), Noise(0.1, 1, 3)])
def test_seed_and_epoch_change_it(other):
    assert not torch.equal(add_noise(states(), RUNS, Noise(0.1, 1, 2), 3), add_noise(states(), RUNS, other, 3))


def test_documents_and_layers_draw_apart():
    added = add_noise(torch.zeros(10, 16), (Run(0, 5, 1), Run(5, 10, 2)), Noise(1.0, 0, 0), 2)
    pieces = [added[:5, :8], added[:5, 8:], added[5:, :8], added[5:, 8:]]
    assert all(not torch.equal(a, b) for i, a in enumerate(pieces) for b in pieces[:i])


def test_scale_padding_and_the_source_stay_as_they_are():
    source = torch.zeros(2003, 40)
    added = add_noise(source, (Run(0, 2000, 1),), Noise(0.25, 0, 0), 2)
    assert float(added[:2000].std()) == pytest.approx(0.25, rel=0.02)
    assert abs(float(added[:2000].mean())) < 0.01
    assert not added[2000:].any()
    assert not source.any()


def test_no_noise_is_no_copy():
    source = states()
    assert add_noise(source, RUNS, Noise(0.0, 0, 0), 3) is source


def test_the_draw_does_not_depend_on_the_states_type():
    wide = add_noise(torch.zeros(12, 24, dtype=torch.float64), RUNS, Noise(1.0, 0, 0), 3)
    narrow = add_noise(torch.zeros(12, 24, dtype=torch.bfloat16), RUNS, Noise(1.0, 0, 0), 3)
    assert torch.equal(wide.bfloat16(), narrow)
