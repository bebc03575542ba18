"""Issue 4, check 6, below the pipeline: any cut of a step's documents into micro-batches and ranks is the same update.

Here some micro-batches have no anchor at all, which a data set never yields: it drops such documents.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from trainer.config import TrainConfig
from trainer.drafter.model import Drafter
from trainer.drafter.noise import Noise
from trainer.drafter.objective import Objective
from trainer.drafter.step import drafter_forward
from trainer.optimizer import StepOptimizer

OBJECTIVES = {"decay": Objective(), "dpace": Objective(dpace_alpha=0.5), "dpace and KL": Objective(0.5, 0.5)}
LENGTHS = [13, 2, 21, 9, 6, 17]
EMPTY = (3, 4)  # Documents without a supervised token.
CONFIG = TrainConfig(mask_token_id=3, block_size=4, lr=1e-2, warmup_ratio=0.0)


@pytest.fixture(scope="module")
def documents(row):
    """Return the rows of six documents, their states f[T, L·H] and what their teacher's head reads, f[T, H]."""
    packed = row(LENGTHS, holes=0.2, seed=4)
    for number in EMPTY:
        packed["loss_mask"][packed["document_ids"] == 100 + number] = 0
    torch.manual_seed(1)
    states, teacher = (torch.randn(sum(LENGTHS), width, dtype=torch.float64) for width in (96, 32))
    cuts = np.cumsum([0, *LENGTHS])
    rows = [{name: each[a:b] for name, each in packed.items()} for a, b in pairwise(cuts)]
    return rows, states.split(LENGTHS), teacher.split(LENGTHS)


@pytest.fixture(scope="module")
def micro_batch(documents, blocks_of):
    """Return micro_batch(documents, drafter, objective): the sums of these documents packed into one row."""
    rows, states, teacher = documents
    torch.manual_seed(2)
    embed, head = torch.randn(2, 40, 32, dtype=torch.float64)

    def forward(numbers, drafter, objective, epoch=0):
        packed = {name: np.concatenate([rows[n][name] for n in numbers]) for name in rows[0]}
        return drafter_forward(
            drafter,
            embed,
            head,
            torch.cat([states[n] for n in numbers]),
            blocks_of(packed, num_anchors=5, row_budget=400, epoch=epoch),
            num_target_layer_ids=3,
            chunk_rows=12,
            noise=Noise(0.1, 5, epoch),
            objective=objective,
            teacher=torch.cat([teacher[n] for n in numbers]),
        )

    return forward


def fresh(config):
    torch.manual_seed(0)
    return Drafter(config(layer_types="mixed", sliding_window=5)).double()


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=6, max_size=6))
def test_any_cut_into_micro_batches_sums_to_the_same(config, micro_batch, objective, places):
    def total(cut):
        drafter = fresh(config)
        sums = [micro_batch(numbers, drafter, objective) for numbers in cut]
        for each in sums:
            each.loss_sum.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in drafter.parameters()])
        return sum(each.loss_sum.detach() for each in sums), sum(each.weight_sum for each in sums), gradient

    cut = [numbers for place in range(5) if (numbers := [n for n in range(6) if places[n] == place])]
    for ours, whole in zip(total(cut), total([range(6)]), strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-12)


# Micro-batches of each rank. Documents 3 and 4 are empty: a rank may have nothing else, or end its step with one.
DEALS = {
    "2 ranks": [[[0, 1], [3]], [[2], [5, 4]]],
    "2 ranks, one empty": [[[0, 1, 2], [5]], [[3], [4]]],
    "3 ranks, one empty": [[[2, 1]], [[4, 3]], [[5], [0]]],
    "3 ranks": [[[0], [1], [3]], [[2]], [[4], [5]]],
}


def updates(deal, forward, drafter, model, objective, group):
    """Return the weights after two steps of one rank, by the rules of the pipeline's session."""
    optimizer = StepOptimizer(drafter, CONFIG, 10)
    for step in (1, 2):
        sums = torch.zeros(2, dtype=torch.float64)
        for position, numbers in enumerate(deal):
            last = position == len(deal) - 1
            with contextlib.nullcontext() if last or group is None else model.no_sync():
                result = forward(numbers, model, objective, epoch=step)
                result.loss_sum.backward()
            sums += torch.stack([result.loss_sum.detach(), result.weight_sum])
        ranks = 1
        if group is not None:
            distributed.all_reduce(sums)
            ranks = distributed.get_world_size()
        optimizer.apply(step, loss_sum=sums[0], weight_sum=sums[1], drafters=ranks)
    return torch.cat([parameter.detach().flatten() for parameter in drafter.parameters()])


def start_rank(rank: int, ranks: int, place: Path, work) -> int:
    """Fork a rank that saves what `work` returns; returns its pid."""
    if pid := os.fork():
        return pid
    try:
        distributed.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=ranks)
        torch.save(work(), place / f"rank-{rank}.pt")
        distributed.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.mark.parametrize("name", DEALS)
def test_any_deal_to_ranks_is_the_same_update(config, micro_batch, name, tmp_path):
    deal, objective = DEALS[name], OBJECTIVES["dpace and KL"]
    drafter = fresh(config)
    wanted = updates([range(6)], micro_batch, drafter, drafter, objective, None)

    def rank_work(rank):
        own = fresh(config)
        model = DistributedDataParallel(own, gradient_as_bucket_view=True)
        return updates(deal[rank], micro_batch, own, model, objective, distributed.group.WORLD)

    ranks = range(len(deal))
    pids = [start_rank(rank, len(deal), tmp_path, lambda rank=rank: rank_work(rank)) for rank in ranks]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * len(deal)
    for rank in ranks:
        torch.testing.assert_close(torch.load(tmp_path / f"rank-{rank}.pt"), wanted, rtol=0, atol=1e-10)
    assert (wanted - torch.cat([each.detach().flatten() for each in fresh(config).parameters()])).abs().max() > 1e-3
