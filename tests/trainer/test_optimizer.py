"""One optimizer step out of summed gradients: the schedule, the scale, the clip, and steps that must not happen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.config import TrainConfig
from trainer.optimizer import StepOptimizer, learning_rate


def config(**values: Any) -> TrainConfig:
    return TrainConfig(**{"lr": 1e-2, "warmup_ratio": 0.1, "weight_decay": 0.1, "max_grad_norm": 1e9} | values)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7, dtype=dtype)
        self.norm = nn.LayerNorm(7, dtype=dtype)
        self.last = nn.Linear(7, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.tanh(self.first(x))))


def batch(seed: int, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 5, generator=draw, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (rows,), generator=draw), torch.rand(rows, generator=draw, dtype=torch.float64)


def loss_sum(net: nn.Module, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    inputs, labels, weights = rows
    return (nn.functional.cross_entropy(net(inputs), labels, reduction="none") * weights).sum()


def snapshot(net: nn.Module, optimizer: StepOptimizer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in (net.state_dict() | optimizer.state_dict()).items()}


def step(optimizer: StepOptimizer, net: nn.Module, number: int, drafters: int = 1) -> Any:
    rows = batch(number)
    total = loss_sum(net, rows)
    (total / drafters).backward()  # DistributedDataParallel leaves the average over the drafters.
    return optimizer.apply(number, loss_sum=total.detach(), weight_sum=rows[2].sum(), drafters=drafters)


# ---- learning rate


@given(st.integers(1, 5000), st.floats(0, 1))
def test_the_rate_rises_to_the_peak_and_falls_to_just_above_zero(total: int, ratio: float) -> None:
    settings = config(warmup_ratio=ratio)
    rates = [learning_rate(each, total, settings) for each in range(1, total + 1)]
    warmup = round(ratio * total)
    assert all(0 < rate <= settings.lr for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert max(rates) == settings.lr


def test_the_rate_of_the_storys_recipe() -> None:
    settings = config(lr=6e-4, warmup_ratio=0.04)
    assert learning_rate(1, 1000, settings) == pytest.approx(6e-4 / 40)
    assert learning_rate(40, 1000, settings) == 6e-4
    assert learning_rate(41, 1000, settings) == 6e-4
    assert learning_rate(521, 1000, settings) == pytest.approx(3e-4)
    assert 0 < learning_rate(1000, 1000, settings) < 1e-8


# ---- the step


@pytest.mark.parametrize("drafters", [1, 3])
def test_sums_scaled_once_equal_a_plain_step_of_the_mean_loss(drafters: int) -> None:
    net, plain = Net(), Net()
    optimizer = StepOptimizer(net, config(), 10)
    groups = [
        {"params": [p for p in plain.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=False, foreach=False)
    for number in range(1, 11):
        step(optimizer, net, number, drafters)
        for group in reference.param_groups:
            group["lr"] = learning_rate(number, 10, config())
        reference.zero_grad()
        rows = batch(number)
        (loss_sum(plain, rows) / rows[2].sum()).backward()
        reference.step()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_micro_batches_add_up_to_the_whole() -> None:
    whole, parts = Net(), Net()
    one, other = (
        StepOptimizer(whole, config(max_grad_norm=0.1), 10),
        StepOptimizer(parts, config(max_grad_norm=0.1), 10),
    )
    rows = batch(1)
    loss_sum(whole, rows).backward()
    for span in (slice(0, 1), slice(1, 9), slice(9, 12)):
        loss_sum(parts, tuple(each[span] for each in rows)).backward()
    total = loss_sum(whole, rows).detach()
    for each in (one, other):
        each.apply(1, loss_sum=total, weight_sum=rows[2].sum(), drafters=1)
    for left, right in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(left, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("limit", [1e-3, 0.5, 1e6])
def test_the_norm_is_reported_before_and_clipped_by_the_mean_gradient(limit: float) -> None:
    net, plain = Net(), Net()
    outcome = step(StepOptimizer(net, config(max_grad_norm=limit), 10), net, 1)
    rows = batch(1)
    (loss_sum(plain, rows) / rows[2].sum()).backward()
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), limit))
    assert float(outcome.grad_norm) == pytest.approx(norm, rel=1e-12)
    reference = torch.optim.AdamW(
        plain.parameters(), lr=learning_rate(1, 10, config()), weight_decay=0, betas=(0.9, 0.95)
    )
    reference.step()
    moments = StepOptimizer(net, config(), 10)
    assert moments.state_dict() == {}  # Made by the first step only.
    name, one = next(iter(net.named_parameters()))
    other = dict(plain.named_parameters())[name]
    # Up to the weight decay, which the reference leaves out.
    assert torch.allclose(one, other, rtol=0, atol=1e-2 * 0.1)


def test_gradients_are_cleared_but_stay_allocated() -> None:
    net = Net()
    step(StepOptimizer(net, config(), 10), net, 1)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in net.parameters())


# ---- steps that must not happen


@pytest.mark.parametrize("broken", ["nan gradient", "inf gradient", "nan loss", "inf loss", "no weight", "bad states"])
@pytest.mark.parametrize("at", [1, 4])
def test_a_refused_step_leaves_everything_untouched(broken: str, at: int) -> None:
    net, control = Net(), Net()
    settings = config(on_nan="continue")
    optimizer, reference = StepOptimizer(net, settings, 10), StepOptimizer(control, settings, 10)
    for number in range(1, at):
        step(optimizer, net, number)
        step(reference, control, number)
    before = snapshot(net, optimizer)
    total, weight = loss_sum(net, batch(at)), torch.tensor(3.0, dtype=torch.float64)
    total.backward()
    total = total.detach()
    gradient = net.first.weight.grad
    assert gradient is not None
    if "gradient" in broken:
        gradient[2, 2] = math.nan if "nan" in broken else math.inf
    elif "loss" in broken:
        total = total * (math.nan if "nan" in broken else math.inf)
    elif broken == "no weight":
        weight, total = weight * 0, total * 0
    refuse = torch.tensor(2.0 if broken == "bad states" else 0.0)
    outcome = optimizer.apply(at, loss_sum=total, weight_sum=weight, drafters=1, refuse=refuse)
    assert float(outcome.skipped) == 1.0
    after = snapshot(net, optimizer)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(not value.any() for name, value in after.items() if name not in before)
    # And nothing of it lingers: the next step is what it would have been.
    step(optimizer, net, at + 1)
    step(reference, control, at + 1)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in control.state_dict().items())


def test_behind_a_bad_step_that_stops_the_run_the_weights_stay_those_that_it_met() -> None:
    # The host hears of it one step later; what is saved beside the bad batch must be what the batch met.
    net = Net()
    optimizer = StepOptimizer(net, config(on_nan="stop"), 10)
    rows = batch(1)
    nothing = loss_sum(net, rows) * 0
    nothing.backward()
    empty = optimizer.apply(1, loss_sum=nothing.detach(), weight_sum=rows[2].sum() * 0, drafters=1)
    assert float(empty.skipped) == 1.0
    assert float(step(optimizer, net, 2).skipped) == 0.0  # A step without weight is no reason to stop.
    before = snapshot(net, optimizer)
    loss_sum(net, rows).backward()
    optimizer.apply(3, loss_sum=torch.tensor(math.nan), weight_sum=rows[2].sum(), drafters=1)
    assert float(step(optimizer, net, 4).skipped) == 1.0
    assert all(torch.equal(snapshot(net, optimizer)[name], value) for name, value in before.items())


def test_an_applied_step_says_so() -> None:
    net = Net()
    assert float(step(StepOptimizer(net, config(), 10), net, 1).skipped) == 0.0


# ---- state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_survives_and_training_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    net = Net()
    optimizer = StepOptimizer(net, config(), 10)
    for number in range(1, 5):
        step(optimizer, net, number)
    again = Net()
    again.load_state_dict(net.state_dict())
    resumed = StepOptimizer(again, config(), 10)
    resumed.load_state_dict({name: value.clone() for name, value in optimizer.state_dict().items()})
    for number in range(5, 11):
        step(optimizer, net, number)
        step(resumed, again, number)
    one, other = snapshot(net, optimizer), snapshot(again, resumed)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_masters_of_float32_stay_float32() -> None:
    net = Net(torch.float32)
    rows = tuple(each.float() if each.is_floating_point() else each for each in batch(1))
    total = loss_sum(net, rows)
    total.backward()
    optimizer = StepOptimizer(net, config(), 10)
    optimizer.apply(1, loss_sum=total.detach().double(), weight_sum=rows[2].sum().double(), drafters=2)
    assert {value.dtype for value in (net.state_dict() | optimizer.state_dict()).values()} == {torch.float32}


def test_the_state_of_another_drafter_is_refused() -> None:
    net = Net()
    optimizer = StepOptimizer(net, config(), 10)
    step(optimizer, net, 1)
    state = optimizer.state_dict()
    wrong = state | {"0.exp_avg": torch.zeros(3, 3)}
    with pytest.raises(ValueError, match="shape"):
        optimizer.load_state_dict(wrong)
    with pytest.raises((KeyError, IndexError, ValueError)):
        optimizer.load_state_dict({"99.exp_avg": torch.zeros(3, 3)})


# ---- moments made before the first step


def test_moments_are_made_as_the_first_step_makes_them() -> None:
    one, other = Net(), Net()
    ahead, late = (StepOptimizer(net, config(), 10) for net in (one, other))
    ahead.allocate()
    before = snapshot(one, ahead)
    assert all(not bool(value.any()) for value in ahead.state_dict().values())
    # A step that is refused makes them, and changes nothing.
    loss_sum(other, batch(1)).backward()
    late.apply(1, loss_sum=torch.tensor(math.nan), weight_sum=torch.tensor(1.0), drafters=1)
    after = snapshot(other, late)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert (value.dtype, value.shape, value.device) == (after[name].dtype, after[name].shape, after[name].device)
        assert torch.equal(value, after[name])


def test_training_goes_on_the_same_with_moments_made_before() -> None:
    nets = Net(), Net()
    optimizers = [StepOptimizer(net, config(), 10) for net in nets]
    optimizers[0].allocate()
    for number in range(1, 4):
        for net, optimizer in zip(nets, optimizers, strict=True):
            step(optimizer, net, number)
    one, other = (snapshot(net, optimizer) for net, optimizer in zip(nets, optimizers, strict=True))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_moments_that_are_there_stay() -> None:
    net = Net()
    optimizer = StepOptimizer(net, config(), 10)
    step(optimizer, net, 1)
    before = snapshot(net, optimizer)
    optimizer.allocate()
    assert all(torch.equal(value, before[name]) for name, value in snapshot(net, optimizer).items())
