"""The benchmark of split-fc measures the same work in both forms, and memory as it is."""

from __future__ import annotations

import pytest
import torch

from benchmarks.split_fc import Bench, main, measure, peak_bytes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench():
    return Bench.make("toy", CPU, torch.float32, noise_std=0.1)


def test_both_forms_train_the_same(bench):
    losses, gradients = [], []
    for split in (False, True):
        bench.drafter.zero_grad()
        losses.append(bench.train(bench.pack(bench.buffer(split)), split))
        gradients.append(bench.drafter.fc.weight.grad.clone())
    assert bench.blocks.count == 32
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-6 * gradients[0].abs().max().item())
    assert bench.difference() <= 2.0**-23


def test_every_side_and_form_has_its_figures(bench):
    figures = measure(bench, rounds=1)
    assert [(each.side, each.split) for each in figures] == [
        ("target", False),
        ("target", True),
        ("drafter", False),
        ("drafter", True),
    ]
    assert all(each.tokens_per_second > 0 for each in figures)
    # What the target packs into: 3 layers of 256 tokens, 64 wide, in float32.
    assert figures[0].peak_bytes >= 3 * 256 * 64 * 4
    assert figures[2].peak_bytes > figures[0].peak_bytes


def test_the_peak_is_what_exists_at_once():
    # 8 MB, then 24 MB, never together; pages that were given back before do not count.
    def work():
        for size in (2_000_000, 6_000_000):
            torch.ones(size)

    work()
    assert peak_bytes(CPU, work) == pytest.approx(24e6, rel=0.1)


def test_the_command_prints_a_row_for_each(capsys):
    assert main(["--shape", "toy", "--rounds", "1", "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "toy, 256 tokens, 32 blocks, float32, cpu"
    assert [line.split()[:2] for line in lines[2:6]] == [
        ["target", "off"],
        ["target", "on"],
        ["drafter", "off"],
        ["drafter", "on"],
    ]
    assert lines[6].startswith("largest difference")
