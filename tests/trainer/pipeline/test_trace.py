"""Traces: the steps that were asked for, every rank, stages by name, and no number of the run changes."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from remote.protocol import events as ev
from trainer.data.rows import Row
from trainer.data.schedule import MicroBatch
from trainer.pipeline.trace import StepTrace
from trainer.telemetry import StageClock

CPU = torch.device("cpu")


class Sink:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: ev.Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        return


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def names(path: Path) -> list[str]:
    return [each["name"] for each in read(path) if each.get("cat") == "user_annotation"]


def trace(path: Path, clock: StageClock, sink: Sink, *, first_step: int = 1, count: int = 2) -> StepTrace:
    return StepTrace(path, clock, sink, rank=5, first_step=first_step, count=count, device=CPU)


def work(clock: StageClock, step: int) -> None:
    with clock.stage(f"stage of {step}"):
        torch.ones(3) @ torch.ones(3)


@pytest.mark.parametrize(("first_step", "traced"), [(1, [3, 4]), (8, [10, 11])])
def test_the_steps_behind_the_first_two_are_traced_and_no_more(
    tmp_path: Path, first_step: int, traced: list[int]
) -> None:
    clock, sink, path = StageClock(), Sink(), tmp_path / "trace" / "rank-5.json.gz"
    steps = trace(path, clock, sink, first_step=first_step)
    for step in range(first_step, first_step + 6):
        steps.at(step)
        work(clock, step)
    steps.close()
    assert names(path) == [f"stage of {step}" for step in traced]
    assert any(each["name"] == "aten::dot" or each["name"] == "aten::matmul" for each in read(path))
    (message,) = sink.events
    assert (message.level, message.rank) == ("info", 5)
    assert message.text == f"trace of steps {traced[0]} to {traced[1]} on rank 5: {path}"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert clock.annotate is contextlib.nullcontext


def test_a_run_that_ends_in_between_leaves_what_there_is(tmp_path: Path) -> None:
    clock, sink, path = StageClock(), Sink(), tmp_path / "rank-0.json.gz"
    steps = trace(path, clock, sink)
    for step in (1, 2, 3):
        steps.at(step)
        work(clock, step)
    steps.close()
    steps.close()
    assert names(path) == ["stage of 3"]
    assert [each.text.partition(" on ")[0] for each in sink.events] == ["trace of steps 3 to 3"]


def test_a_target_is_traced_by_the_step_of_its_rows(tmp_path: Path) -> None:
    clock, sink, path = StageClock(), Sink(), tmp_path / "rank-0.json.gz"
    steps = trace(path, clock, sink)

    def rows() -> Iterator[MicroBatch]:
        # No row of step 4 is this target's.
        for b, step in enumerate((1, 2, 3, 3, 5, 6)):
            yield MicroBatch(b, step, 0, Row((), 0), 0, 0, 0)

    for each in steps.following(rows()):
        work(clock, each.step)
    assert names(path) == ["stage of 3"] * 2
    assert len(sink.events) == 1


@pytest.mark.parametrize("count", [0, 2])
def test_nothing_is_traced_where_nothing_is_wanted_or_the_run_is_too_short(tmp_path: Path, count: int) -> None:
    clock, sink, path = StageClock(), Sink(), tmp_path / "rank-0.json.gz"
    steps = trace(path, clock, sink, count=count)
    for step in range(1, 3 if count else 9):
        steps.at(step)
    steps.close()
    assert sink.events == []
    assert not path.exists()


def test_a_trace_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    clock, sink = StageClock(), Sink()
    (tmp_path / "trace").write_text("in the way")
    steps = trace(tmp_path / "trace" / "rank-5.json.gz", clock, sink, count=1)
    for step in (1, 2, 3, 4, 5):
        steps.at(step)
    assert [each.level for each in sink.events] == ["warning"]
    assert "rank-5.json.gz" in sink.events[0].text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu_its_kernels_are_in_the_trace(tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    clock, sink, path = StageClock(), Sink(), tmp_path / "rank-0.json.gz"
    steps = StepTrace(path, clock, sink, rank=0, first_step=1, count=1, device=device)
    ones = torch.ones(512, 512, device=device)
    for step in range(1, 5):
        steps.at(step)
        with clock.stage("forward"):
            ones @ ones
    assert names(path) == ["forward"]
    assert "kernel" in {each.get("cat") for each in read(path)}
    assert [each.level for each in sink.events] == ["info"]


# ---- the whole pipeline


def test_every_rank_of_a_run_traces_the_same_steps_and_no_loss_changes(trained: Callable[..., Any]) -> None:
    plain = trained(target_gpus=[0, 1], drafter_gpus=[2, 3], micro_batches_per_step=4)
    run = trained(target_gpus=[0, 1], drafter_gpus=[2, 3], micro_batches_per_step=4, trace_steps=2)
    assert run.losses == plain.losses
    paths = [run.layout.trace(rank) for rank in range(4)]
    assert sorted(each.text.rpartition(": ")[2] for each in run.events(ev.Message) if "trace" in each.text) == [
        str(path) for path in paths
    ]
    for path in paths[:2]:
        assert {"read", "target_forward", "pack", "wait_buffer", "publish"} <= set(names(path))
    for path in paths[2:]:
        assert {"wait_states", "blocks", "forward", "backward", "all_reduce", "optimizer"} <= set(names(path))
        assert names(path).count("optimizer") == 2  # One a step.


def test_shared_ranks_trace_both_roles(trained: Callable[..., Any]) -> None:
    run = trained(target_gpus=[0], drafter_gpus=[0], trace_steps=1)
    found = names(run.layout.trace(0))
    assert {"target_forward", "pack", "forward", "backward", "optimizer"} <= set(found)
    assert found.count("optimizer") == 1
    assert run.losses == trained(target_gpus=[0], drafter_gpus=[0]).losses
