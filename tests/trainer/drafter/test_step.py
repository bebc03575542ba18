"""One micro-batch through the drafter: the result may not depend on how documents were dealt."""

from __future__ import annotations

import pytest
import torch

from trainer.drafter.model import Drafter
from trainer.drafter.noise import Noise
from trainer.drafter.step import drafter_forward


def ends(dtype=torch.float64):
    torch.manual_seed(2)
    return torch.randn(40, 32, dtype=dtype), torch.randn(40, 32, dtype=dtype)


def part(row, start, end):
    return {name: values[start:end] for name, values in row.items()}


def run(drafter, states, blocks, **options):
    embed, head = ends()
    drafter.zero_grad()
    sums = drafter_forward(
        drafter, embed, head, states, blocks, num_target_layer_ids=3, chunk_rows=9, noise=Noise(0.1, 5, 0), **options
    )
    sums.loss_sum.backward()
    return sums, {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}


def test_two_rows_sum_to_the_packed_row(config, row, blocks_of):
    torch.manual_seed(0)
    drafter = Drafter(config(layer_types="mixed", sliding_window=5)).double()
    packed = row([13, 21], 3)
    states = torch.randn(37, 96, dtype=torch.float64)
    together, gradients = run(drafter, states, blocks_of(packed))
    first, first_gradients = run(drafter, states[:13], blocks_of(part(packed, 0, 13)))
    second, second_gradients = run(drafter, states[13:], blocks_of(part(packed, 13, 37)))
    torch.testing.assert_close(together.loss_sum, first.loss_sum + second.loss_sum, rtol=1e-12, atol=0)
    torch.testing.assert_close(together.weight_sum, first.weight_sum + second.weight_sum, rtol=1e-12, atol=0)
    assert torch.equal(together.metrics, first.metrics + second.metrics)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, first_gradients[name] + second_gradients[name], rtol=1e-10, atol=1e-10)


def test_split_fc_gives_the_same_update(config, row, blocks_of):
    torch.manual_seed(0)
    drafter = Drafter(config()).double()
    blocks = blocks_of(row([13, 21], 3))
    states = torch.randn(37, 96, dtype=torch.float64)
    _, together = run(drafter, states, blocks)
    _, apart = run(drafter, states.chunk(3, dim=-1), blocks)
    for name in together:
        torch.testing.assert_close(together[name], apart[name], rtol=1e-10, atol=1e-10)


def test_a_row_without_anchors_gives_zeros_to_every_parameter(config, row, blocks_of):
    drafter = Drafter(config(layer_types="mixed", sliding_window=5)).double()
    sums, gradients = run(drafter, torch.randn(6, 96, dtype=torch.float64), blocks_of(row([3, 2], 1)))
    assert sums.weight_sum == 0
    assert len(gradients) == len(list(drafter.parameters()))
    assert all(not gradient.any() for gradient in gradients.values())


def test_gradients_match_finite_differences(config, row, blocks_of):
    torch.manual_seed(0)
    drafter = Drafter(config(num_layers=1)).double()
    blocks = blocks_of(row([9]), num_anchors=2)
    states = torch.randn(9, 96, dtype=torch.float64)
    _, gradients = run(drafter, states, blocks)
    for name, parameter in drafter.named_parameters():
        at = (0,) * parameter.dim()
        step = 1e-6
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter[at] += sign * step
            losses.append(run(drafter, states, blocks)[0].loss_sum.item())
            with torch.no_grad():
                parameter[at] -= sign * step
        slope = (losses[0] - losses[1]) / (2 * step)
        torch.testing.assert_close(float(gradients[name][at]), slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("split", [False, True])
def test_float32_masters_under_bfloat16_autocast(config, row, blocks_of, split):
    torch.manual_seed(0)
    drafter = Drafter(config(layer_types="mixed", sliding_window=5))
    blocks = blocks_of(row([13, 21], 3))
    states = torch.randn(37, 96)
    embed, head = ends(torch.float32)

    def gradients(dtype, enabled):
        drafter.zero_grad()
        narrow = states.to(dtype)
        given = narrow.chunk(3, dim=-1) if split else narrow
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            sums = drafter_forward(
                drafter, embed.to(dtype), head.to(dtype), given, blocks, num_target_layer_ids=3, chunk_rows=9
            )
        sums.loss_sum.backward()
        return torch.cat([parameter.grad.flatten() for parameter in drafter.parameters()])

    wanted, got = gradients(torch.float32, False), gradients(torch.bfloat16, True)
    assert got.dtype is torch.float32
    assert torch.nn.functional.cosine_similarity(wanted, got, dim=0) > 0.995


def test_an_overfitted_toy_accepts_whole_blocks(config, row, blocks_of):
    torch.manual_seed(0)
    drafter = Drafter(config(num_layers=2)).float()
    embed, head = (each.float() for each in ends())
    blocks = blocks_of(row([16]), num_anchors=8)
    states = torch.randn(16, 96)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    for _ in range(60):
        sums = drafter_forward(drafter, embed, head, states, blocks, num_target_layer_ids=3, chunk_rows=64)
        optimizer.zero_grad()
        (sums.loss_sum / sums.weight_sum).backward()
        optimizer.step()
    correct, supervised = sums.metrics[:2].tolist()
    assert correct == supervised
