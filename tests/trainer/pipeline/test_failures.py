"""The real launcher: what happens to the other processes, and to what they hold, when one of a run dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from remote.protocol import events as ev
from remote.protocol.identity import ProcessIdentity, read_pidfile
from remote.protocol.layout import RunLayout, new_run_id
from remote.protocol.locks import is_held

ROOT = Path(__file__).resolve().parents[3]
BOUND = 30.0  # architecture: a rank that dies takes the others down within 30 s


class Launched:
    """`python -m trainer train` in a run directory, as the supervisor starts it."""

    def __init__(self, layout: RunLayout, values: dict[str, Any], source: Path) -> None:
        self.layout = layout
        layout.create()
        layout.config.write_text(json.dumps(values))
        with layout.train_log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer", "train", "--config-json", str(layout.config)],
                cwd=source,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "DFLASH_RUN_DIR": str(layout.path), "PYTHONPATH": str(source)},
            )

    @property
    def log(self) -> str:
        return self.layout.train_log.read_text()

    @property
    def ranks(self) -> dict[int, ProcessIdentity]:
        found = {}
        for path in (self.layout.path / "ranks").glob("rank-*.pid"):
            if identity := read_pidfile(path):
                found[int(path.stem.removeprefix("rank-"))] = identity
        return found

    def wait_for(self, condition: Callable[[], Any], what: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.log}"
            time.sleep(0.02)

    def wait_for_step(self) -> None:
        self.wait_for(lambda: b'"step"' in read(self.layout.events), "no step")

    def assert_gone(self) -> None:
        """Nothing of the run lives, holds its lock, or occupies memory."""
        ranks = self.ranks
        self.wait_for(lambda: not any(rank.is_alive() for rank in ranks.values()), "a rank lives", BOUND)
        self.wait_for(lambda: not is_held(self.layout.run_lock), "the lock is held", 5)
        sockets = Path(self.layout.sockets.read_text().strip())
        assert not sockets.exists()
        assert not (Path("/dev/shm") / sockets.name).exists()


def read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


@pytest.fixture
def launch(tiny_values: dict[str, Any], tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def begin(source: Path = ROOT, **changes: Any) -> Launched:
        run = Launched(RunLayout(tmp_path / new_run_id()), tiny_values | changes, source)
        launched.append(run)
        return run

    yield begin
    for run in launched:
        run.process.kill()
        run.process.wait()


def copied_trainer(directory: Path, module: str, old: str, new: str) -> Path:
    """Return a source tree whose `module` differs in one place; what is not changed is linked."""
    for package in ("remote", "trainer"):
        for path in (ROOT / package).rglob("*.py"):
            copy = directory / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    changed = directory / module
    text = changed.read_text()
    assert old in text
    changed.write_text(text.replace(old, new))
    return directory


def test_the_launcher_trains_like_the_forked_ranks(
    launch: Callable[..., Launched], trained: Callable[..., Any]
) -> None:
    layout = {"target_gpus": [0], "drafter_gpus": [1]}
    run = launch(**layout)
    assert run.process.wait(90) == 0, run.log
    steps = [event for event in ev.read_events(read(run.layout.events)) if isinstance(event, ev.Step)]
    assert {step.step: step.loss for step in steps} == trained(**layout).losses
    run.assert_gone()


def test_a_rank_that_raises_is_filed_and_ends_the_run(launch: Callable[..., Launched], tmp_path: Path) -> None:
    source = copied_trainer(
        tmp_path / "source",
        "trainer/pipeline/target_side.py",
        "producer.states(read, buffer,",
        "producer.states(read, bucket_ids,",
    )
    run = launch(source, target_gpus=[0], drafter_gpus=[1])
    assert run.process.wait(90) != 0
    filed = json.loads(run.layout.error(0).read_text())
    assert (filed["rank"], filed["role"], filed["kind"], filed["phase"]) == (0, "target", "NameError", "training")
    assert "bucket_ids" in filed["traceback"]
    assert "target_side.py" in filed["traceback"]
    assert "NameError" in run.log
    run.assert_gone()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_takes_the_run_down(launch: Callable[..., Launched], victim: int) -> None:
    run = launch(target_gpus=[0], drafter_gpus=[1], epochs=400)
    run.wait_for_step()
    assert run.ranks[victim].send(signal.SIGKILL)
    assert run.process.wait(BOUND) != 0
    run.assert_gone()


def test_a_killed_leader_leaves_no_rank(launch: Callable[..., Launched]) -> None:
    run = launch(target_gpus=[0], drafter_gpus=[1], epochs=400)
    run.wait_for_step()
    assert is_held(run.layout.run_lock)
    assert len(run.ranks) == 2
    run.process.kill()
    run.process.wait()
    run.assert_gone()


def test_a_leader_killed_while_loading_leaves_what_its_run_names(launch: Callable[..., Launched]) -> None:
    run = launch(target_gpus=[0], drafter_gpus=[1])
    run.wait_for(lambda: len(run.ranks) == 2, "no ranks")
    run.process.kill()
    run.process.wait()
    ranks = run.ranks
    run.wait_for(lambda: not any(rank.is_alive() for rank in ranks.values()), "a rank lives", BOUND)
    assert not is_held(run.layout.run_lock)
    # Whoever tidies up finds both by the one name; nothing holds them any more.
    from trainer.pipeline.plan import RunPlan

    plan = RunPlan.load(run.layout.path / "plan.json")
    assert Path(run.layout.sockets.read_text().strip()) == Path(plan.sockets)
    assert Path(plan.ring_file).name == Path(plan.sockets).name
    plan.forget_names()
    assert not Path(plan.sockets).exists()
    assert not Path(plan.ring_file).exists()


# ---- on GPUs, where a rank waits inside NCCL for one that is no more

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
ON_GPUS = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "dense", "epochs": 10_000}
BOTH_ROLES = {"target_gpus": [0, 1], "drafter_gpus": [0, 1]}


@pytest.mark.gpu
@two_gpus
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", [{"target_gpus": [0], "drafter_gpus": [1]}, BOTH_ROLES])
def test_a_killed_rank_takes_the_run_down_on_gpus(launch: Callable[..., Launched], layout: dict[str, Any]) -> None:
    run = launch(**ON_GPUS, **layout)
    run.wait_for(lambda: b'"step"' in read(run.layout.events), "no step", 200)
    assert run.ranks[0].send(signal.SIGKILL)
    assert run.process.wait(BOUND) != 0
    run.assert_gone()


@pytest.mark.gpu
@two_gpus
@pytest.mark.timeout(400)
def test_a_frozen_rank_is_named_by_the_one_that_waits_for_it_in_nccl(launch: Callable[..., Launched]) -> None:
    run = launch(**ON_GPUS, **BOTH_ROLES, stall_timeout=10)
    run.wait_for(lambda: b'"step"' in read(run.layout.events), "no step", 200)
    assert run.ranks[1].send(signal.SIGSTOP)
    # The bound, and the launcher's patience with a process that heeds no TERM.
    assert run.process.wait(10 + BOUND + 60) != 0
    filed = json.loads(run.layout.error(0).read_text())
    assert (filed["kind"], filed["blames"], filed["phase"]) == ("Stalled", 1, "training")
    assert filed["message"].startswith("shared 1 (rank 1, cuda:1) gives no sign of life since ")
    assert not run.layout.error(1).exists()
    run.assert_gone()
