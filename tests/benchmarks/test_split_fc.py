"""The benchmark of split-fc measures the same work in both forms, and memory as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.split_fc import Bench, main, measure

ROOT = Path(__file__).parents[2]
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


def test_the_peak_is_what_exists_at_once():
    # 8 MB, then 24 MB, never together. In a fresh process: this one's heap holds free blocks of any size.
    code = """
import torch
from benchmarks.split_fc import map_allocations, peak_bytes
map_allocations(1 << 16)
work = lambda: [torch.ones(size).sum() for size in (2_000_000, 6_000_000)]
# Once in advance: the pages of the code itself count as well.
work()
print(peak_bytes(torch.device("cpu"), work))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) == pytest.approx(24e6, rel=0.1)


def test_the_command_prints_a_row_for_each_side_and_form(capsys):
    assert main(["--shape", "toy", "--rounds", "1", "--dtype", "float32"]) == 0
    first, _, *table, last = capsys.readouterr().out.splitlines()
    assert first == "toy, 256 tokens, 32 blocks, float32, cpu"
    forms = [line.split()[:2] for line in table]
    assert forms == [["target", "off"], ["target", "on"], ["drafter", "off"], ["drafter", "on"]]
    assert last == "largest difference of the features, float32 at unit scale: 0.00e+00"
