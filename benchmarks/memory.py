"""`python -m benchmarks.memory`: whether memory stays flat over thousands of steps, of every rank, on the host and on the GPU.

A tiny hybrid target and drafter train with random documents; at some steps each rank's private host memory, open files and
threads are read from /proc, and the allocator's figures from its profile. What `--set` names goes into the configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.random_documents import make_documents
from remote.protocol.events import Event, StageProfile, Step, read_events
from remote.protocol.identity import read_pidfile
from remote.protocol.layout import RunLayout, new_run_id

_MIB = 1 << 20
_PAUSE = 0.05
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Sample:
    """One rank at a step: bytes of its private host memory, open files, threads; bytes of its GPU in tensors and kept."""

    step: int
    rank: int
    private: int
    files: int
    threads: int
    allocated: int = 0
    reserved: int = 0


class _Tail:
    """The events of a run as they come."""

    def __init__(self, run: RunLayout) -> None:
        self._path = run.events
        self._offset = 0

    def read(self) -> list[Event]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(read_events(whole))


def measure(values: Mapping[str, Any], directory: Path, steps: Sequence[int]) -> list[Sample]:
    """Train with a configuration in a new run below `directory`; return a sample of each rank at each of `steps`, or soon after.

    Raises RuntimeError with the end of the log when the run fails.
    """
    run = RunLayout(directory / new_run_id())
    run.create()
    run.config.write_text(json.dumps(dict(values)))
    with run.train_log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer", "train", "--config-json", str(run.config)],
            cwd=_ROOT,
            stdout=log,
            stderr=log,
            env={**os.environ, "DFLASH_RUN_DIR": str(run.path)},
        )
    try:
        samples = list(_watch(process, run, steps))
        if process.wait() != 0:
            raise RuntimeError(f"the run failed:\n{run.train_log.read_text()[-20_000:]}")
        return samples
    finally:
        # Ranks die with the leader.
        process.kill()
        process.wait()


def _watch(process: subprocess.Popen[bytes], run: RunLayout, steps: Sequence[int]) -> Iterator[Sample]:
    tail, due = _Tail(run), sorted(set(steps))
    profiles: dict[int, StageProfile] = {}
    while due and process.poll() is None:
        for event in tail.read():
            if isinstance(event, StageProfile):
                profiles[event.rank] = event
            elif isinstance(event, Step) and due and event.step >= due[0]:
                yield from _look(run, due.pop(0), profiles)
        time.sleep(_PAUSE)


def _look(run: RunLayout, step: int, profiles: Mapping[int, StageProfile]) -> Iterator[Sample]:
    for path in sorted((run.path / "ranks").glob("rank-*.pid")):
        rank, process = int(path.stem.removeprefix("rank-")), read_pidfile(path)
        if process is None:
            continue
        place = Path("/proc") / str(process.pid)
        try:
            status = (place / "status").read_text()
            files = len(list((place / "fd").iterdir()))
        except OSError:  # It has ended.
            continue
        words = dict(line.split(":", 1) for line in status.splitlines())
        profile = profiles.get(rank)
        yield Sample(
            step,
            rank,
            # Not the pages of files and of the ring, which others share and the kernel takes back.
            private=int(words["RssAnon"].split()[0]) << 10,
            files=files,
            threads=int(words["Threads"]),
            allocated=profile.memory_allocated if profile else 0,
            reserved=profile.memory_reserved if profile else 0,
        )


def tiny_run(directory: Path, device: str, steps: int) -> dict[str, Any]:
    """Make a toy hybrid target and random documents in `directory`; return a configuration that trains `steps` steps, 1 + 1."""
    from benchmarks.random_target import (
        TOY,
        make_target,
    )  # torch, which a run with material of its own need not load here

    make_target(directory / "target", "toy", device=device)
    make_documents(directory / "data.jsonl", count=256, shortest=16, longest=256, vocabulary=int(TOY["vocab_size"]) - 1)
    return {
        "target_model": str(directory / "target"), "data_dir": str(directory / "data.jsonl"),
        "mask_token_id": int(TOY["vocab_size"]) - 1, "block_size": 8, "drafter_layers": 2, "captured_layers": 3,
        "max_length": 256, "token_budget": 512, "num_anchors": 16, "row_anchors": 64, "objective_rows": 512,
        "device": device, "micro_batches_per_step": 2, "epochs": 1 + steps // 30, "max_steps": steps,
        "profile_interval": 2.0, "checkpoint_every": steps // 4, "ring_mib": 64,
    }  # fmt: skip


def growth(samples: Sequence[Sample], since: int) -> dict[int, Sample]:
    """Return by rank how much more there was at most behind step `since` than at it."""
    found: dict[int, Sample] = {}
    for rank in {each.rank for each in samples}:
        first, *rest = [each for each in samples if each.rank == rank and each.step >= since]
        found[rank] = Sample(
            step=rest[-1].step - first.step,
            rank=rank,
            private=max(each.private for each in rest) - first.private,
            files=max(each.files for each in rest) - first.files,
            threads=max(each.threads for each in rest) - first.threads,
            allocated=max(each.allocated for each in rest) - first.allocated,
            reserved=max(each.reserved for each in rest) - first.reserved,
        )
    return found


def table(samples: Sequence[Sample]) -> list[str]:
    """Return one line a sample."""
    heading = f"{'step':>6} {'rank':>4} {'private MiB':>12} {'files':>6} {'threads':>8} {'in tensors MiB':>15} {'kept MiB':>9}"
    return [
        heading,
        *(
            f"{each.step:>6} {each.rank:>4} {each.private / _MIB:>12.1f} {each.files:>6} {each.threads:>8} "
            f"{each.allocated / _MIB:>15.1f} {each.reserved / _MIB:>9.1f}"
            for each in samples
        ),
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="a key of the configuration")
    arguments = parser.parse_args(argv)
    changes = {key: json.loads(value) for key, _, value in (each.partition("=") for each in arguments.set)}
    with tempfile.TemporaryDirectory() as place:
        values = tiny_run(Path(place), arguments.device, arguments.steps) | changes
        # The last step is followed by the end of the ranks: what is there just before counts.
        quarters = [arguments.steps * quarter // 4 for quarter in (1, 2, 3)]
        samples = measure(values, Path(place), [*quarters, max(1, arguments.steps - 20)])
    print("\n".join(table(samples)))
    print("growth behind the first of these:")
    print("\n".join(table(list(growth(samples, samples[0].step).values()))[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
