"""Memory of host and GPU stays flat over 2,000 steps; so do open files and threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory import Sample, growth, main, measure, table, tiny_run

MIB = 1 << 20
STEPS = (500, 750, 1000, 1250, 1500, 1750, 1990)

# From step 500 on: 5.6 KB a step. The least that a step could keep of its states, one row of 128 tokens, is 64 KB, and would
# make 93 MiB. Measured were 0.0 MiB for the target and 0.7 for the drafter.
HOST = 8 * MIB
# What a checkpoint has open at that moment, and its thread.
FILES, THREADS = 4, 1


def flat(samples: list[Sample]) -> list[str]:
    """Return what grew beyond its bound."""
    grown = growth(samples, 500)
    bounds = {"private": HOST, "files": FILES, "threads": THREADS, "allocated": 0, "reserved": 0}
    return [
        f"rank {rank}: {what} by {getattr(each, what)}"
        for rank, each in grown.items()
        for what, bound in bounds.items()
        if getattr(each, what) > bound
    ]


def samples_of(steps: tuple[int, ...], **a_step: int) -> list[Sample]:
    start = {"private": 300 * MIB, "files": 20, "threads": 9, "allocated": 7, "reserved": 9}
    return [
        Sample(step, rank, **{what: first + step * a_step.get(what, 0) * rank for what, first in start.items()})
        for step in steps
        for rank in (0, 1)
    ]


def test_a_leak_is_told_by_its_rank() -> None:
    assert flat(samples_of(STEPS)) == []
    assert flat(samples_of(STEPS, private=64 << 10)) == [f"rank 1: private by {1490 << 16}"]
    assert flat(samples_of(STEPS, files=1, threads=1)) == ["rank 1: files by 1490", "rank 1: threads by 1490"]
    assert flat(samples_of(STEPS, reserved=1)) == ["rank 1: reserved by 1490"]
    # Before step 500 caches fill and kernels are loaded.
    assert flat([*samples_of((1,), private=-(100 << 20)), *samples_of(STEPS)]) == []
    assert "1990    1        300.0     20        9" in table(samples_of(STEPS))[-1]


def test_a_run_that_fails_says_so(tiny_values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="there is nothing at that path"):
        measure(tiny_values | {"target_model": "/nowhere"}, tmp_path, (2,))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_thousand_steps_take_no_more_than_five_hundred(tiny_values: dict[str, Any], tmp_path: Path) -> None:
    values = tiny_values | {"epochs": 400, "max_steps": 2000, "checkpoint_every": 250, "profile_interval": 5}
    samples = measure(values, tmp_path, STEPS)
    assert [(each.step, each.rank) for each in samples] == [(step, rank) for step in STEPS for rank in (0, 1)]
    assert all(each.private > 10 * MIB and each.files > 5 and each.threads > 1 for each in samples)
    print("\n".join(table(samples)))
    assert flat(samples) == []


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("split", ["off", "on"])
def test_two_thousand_steps_on_gpus(tmp_path: Path, split: str) -> None:
    samples = measure(tiny_run(tmp_path, "cuda", 2000) | {"split_fc": split}, tmp_path, STEPS)
    print("\n".join(table(samples)))
    assert all(each.allocated for each in samples if each.step > 500)
    # Rows of 500 steps show every shape; what the allocator then holds may still be cut another way: one block of 20 MiB.
    grown = growth(samples, 500)
    assert all(each.reserved <= 20 * MIB and each.allocated <= 20 * MIB for each in grown.values()), table(samples)
    assert all(each.private <= 4 * HOST and each.files <= FILES for each in grown.values()), table(samples)


def test_the_command_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[dict[str, Any], list[int]]] = []

    def pretend(values: dict[str, Any], _: Path, steps: list[int]) -> list[Sample]:
        assert Path(values["target_model"], "config.json").exists()
        asked.append((values, steps))
        return samples_of(tuple(steps))

    monkeypatch.setattr("benchmarks.memory.measure", pretend)
    assert main(["--device", "cpu", "--steps", "400", "--set", 'split_fc="on"', "--set", "threads=1"]) == 0
    (values, steps), *_ = asked
    assert steps == [100, 200, 300, 380]
    assert (values["split_fc"], values["threads"], values["max_steps"]) == ("on", 1, 400)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["step", "rank", "private", "MiB"]
    assert len(lines) == 1 + 8 + 1 + 2
