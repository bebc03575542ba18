"""Looking for numbers that are not finite: in order, with place, and without what padding makes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from trainer.pipeline.packed import PackedRow, RowTokens
from trainer.pipeline.watch import Watch


class Layer(nn.Module):
    """Adds a constant, and returns a pair as attention does."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.tensor(constant))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + self.constant, None


class Stack(nn.Module):
    def __init__(self, *constants: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(each) for each in constants)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


def test_a_finding_says_how_many_numbers_and_which_first() -> None:
    watch = Watch()
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    watch.look("sound", tensor)
    tensor[1, 0], tensor[1, 2] = -math.inf, math.nan
    watch.look("weights", tensor)
    assert [str(each) for each in watch.findings] == [
        "weights bfloat16[2, 3]: 2 of 6 numbers, the first is -inf at [1, 0]"
    ]


def test_modules_are_looked_at_in_the_order_of_their_work_while_the_block_runs() -> None:
    watch, stack = Watch(), Stack(0.0, math.inf, 1.0)
    with watch.modules("drafter", stack):
        stack(torch.zeros(2, 3))
    assert [each.name for each in watch.findings] == [
        "output of drafter layers.1",
        "output of drafter layers.2",
        "output of drafter",
    ]
    stack(torch.zeros(2, 3))
    assert len(watch.findings) == 3
    watch.look_at_weights("drafter", stack)
    assert watch.findings[-1].name == "weight of drafter layers.1.constant"


@pytest.mark.parametrize(("position", "found"), [(0, True), (1, True), (2, False)])
def test_what_a_target_makes_of_padding_does_not_count(position: int, found: bool) -> None:
    watch = Watch()
    x = torch.zeros(2, 3, 4)
    x[1, position, 3] = math.nan
    stack = Stack(0.0)
    with watch.target(stack, [3, 2], [7, 20]):
        stack(x)
    assert [each.place for each in watch.findings] == [f"document 20, position {position}"] * 2 * found


@pytest.mark.parametrize("split", [False, True])
def test_packed_states_are_placed_by_document(split: bool) -> None:
    none = torch.zeros(0)
    row = RowTokens(0, 1, 0, none, none, torch.tensor([4, 4, 9, 9]), torch.tensor([0, 1, 0, 1]), tokens=4)
    states = torch.zeros(4, 6)
    states[3, 5] = math.nan
    watch = Watch()
    watch.states(PackedRow(row, tuple(states.split(3, dim=-1)) if split else states))
    (finding,) = watch.findings
    assert finding.name == ("states of captured layer 1" if split else "states")
    assert finding.place == "document 9, position 1"
