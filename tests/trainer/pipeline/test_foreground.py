"""`python -m trainer train` typed by a person: the process in front, real ranks below, signals as a terminal sends them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remote.protocol.identity import ProcessIdentity, read_pidfile
from remote.protocol.layout import RunLayout
from remote.protocol.locks import is_held
from remote.protocol.records import StopRequest, read_record
from trainer.checkpoint_files import list_checkpoints
from trainer.config import TrainConfig
from trainer.pipeline.leader import check_whole, prepare
from trainer.pipeline.plan import RunPlan

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 60.0
LAYOUT = {"target_gpus": [0], "drafter_gpus": [1]}


class Typed:
    """A command typed in a shell: a process group of its own, whose output is a file here."""

    def __init__(self, directory: Path, values: dict[str, Any], source: Path = ROOT, wrapper: str = "") -> None:
        self.directory = directory
        config = directory / "config.json"
        config.write_text(json.dumps(values | {"output_dir": str(directory / "out")}))
        self._log = directory / "said"
        command = [sys.executable, "-m", "trainer", "train", "--config-json", str(config)]
        environment = {name: value for name, value in os.environ.items() if name != "DFLASH_RUN_DIR"}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", wrapper, "sh", *command] if wrapper else command,
                cwd=source,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**environment, "PYTHONPATH": str(source)},
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def run(self) -> RunLayout:
        self.wait_for(lambda: list((self.directory / "out").glob("*/run.lock")), "no run")
        (path,) = (self.directory / "out").iterdir()
        return RunLayout(path)

    @property
    def checkpoints(self) -> list[Path]:
        return list_checkpoints(self.run.path)

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.said}"
            time.sleep(0.01)

    def wait_for_step(self) -> None:
        self.wait_for(lambda: " step step=1 " in self.said, "no step")

    def signal_group(self, number: int) -> None:
        """As a terminal does it."""
        os.killpg(self.process.pid, number)

    def ranks(self) -> list[ProcessIdentity]:
        found = map(read_pidfile, (self.run.path / "ranks").glob("rank-*.pid"))
        return [identity for identity in found if identity is not None]

    def assert_gone(self, run: RunLayout) -> None:
        assert not is_held(run.run_lock)
        sockets = Path(run.sockets.read_text().strip())
        assert sockets.name.startswith("dflash-")
        assert not sockets.exists()
        assert not (Path("/dev/shm") / sockets.name).exists()


@pytest.fixture
def typed(tiny_values: dict[str, Any], tmp_path: Path) -> Iterator[Callable[..., Typed]]:
    made: list[Typed] = []

    def begin(source: Path = ROOT, wrapper: str = "", **changes: Any) -> Typed:
        one = Typed(tmp_path, tiny_values | LAYOUT | changes, source, wrapper)
        made.append(one)
        return one

    yield begin
    for one in made:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def broken_source(tmp_path: Path) -> Path:
    """A source tree whose targets raise once a checkpoint has been saved."""
    source = tmp_path / "source"
    for package in ("remote", "trainer"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    module = source / "trainer/pipeline/target_side.py"
    line = "            read = producer.read(micro_batch)\n"
    text = module.read_text()
    assert line in text
    broken = f"            if micro_batch.step > 3:\n                bucket_ids  # noqa: F821\n{line}"
    module.write_text(text.replace(line, broken))
    return source


@pytest.mark.long
def test_a_run_that_ends_by_itself_ends_with_0(typed: Callable[..., Typed]) -> None:
    command = typed()
    assert command.process.wait(PATIENCE) == 0, command.said
    assert [path.name for path in command.checkpoints] == ["step-00000006"]
    assert RunPlan.load(command.run.path / "plan.json").leader_pid != command.process.pid
    command.assert_gone(command.run)


@pytest.mark.parametrize(
    ("number", "code", "name"),
    [(signal.SIGINT, 130, "Ctrl-C"), pytest.param(signal.SIGTERM, 143, "SIGTERM", marks=pytest.mark.long)],
)
def test_a_signal_is_a_stop_with_a_checkpoint(typed: Callable[..., Typed], number: int, code: int, name: str) -> None:
    command = typed(epochs=400)
    command.wait_for_step()
    command.signal_group(number)
    assert command.process.wait(PATIENCE) == code, command.said
    assert command.said.count(f"{name}: stopping with a checkpoint") == 1
    assert "Traceback" not in command.said
    (saved,) = command.checkpoints
    check_whole(saved)
    stop = read_record(StopRequest, command.run.stop)
    assert stop is not None
    assert (stop.by, stop.checkpoint) == (name, True)
    command.assert_gone(command.run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once_even_while_the_launcher_is_imported(
    typed: Callable[..., Typed], number: int
) -> None:
    command = typed(epochs=400)
    run = command.run
    command.wait_for(run.path.joinpath("plan.json").exists, "no plan")
    command.signal_group(number)
    command.wait_for(lambda: "stopping with a checkpoint" in command.said, "not heard")
    time.sleep(0.3)
    command.signal_group(number)
    assert command.process.wait(PATIENCE) == 128 + number
    assert "ended at once; there is no checkpoint" in command.said
    assert "Traceback" not in command.said
    command.assert_gone(run)


def test_a_rank_that_raises_is_told_once_and_last(typed: Callable[..., Typed], broken_source: Path) -> None:
    command = typed(broken_source, epochs=400, checkpoint_every=1)
    assert command.process.wait(PATIENCE) == 1
    run = command.run
    assert command.said.count("NameError") == 1
    assert "Traceback" not in command.said
    error, cause, hint = command.said.splitlines()[-3:]
    assert error == "error: NameError: name 'bucket_ids' is not defined"
    assert cause.startswith("  cause: target_side.py:")
    assert cause.endswith("rank 0 (target, cpu) in training")
    assert hint.startswith(f"  hint: the whole traceback is in {run.error(0)}")
    assert hint.endswith(f"--resume {command.checkpoints[-1]} goes on from the last checkpoint")
    command.assert_gone(run)


def test_a_killed_front_takes_all_down_and_the_next_run_takes_away_what_it_left(
    typed: Callable[..., Typed], tiny_values: dict[str, Any], tmp_path: Path
) -> None:
    command = typed(epochs=400)
    run = command.run
    command.wait_for(lambda: len(command.ranks()) == 2, "no ranks")
    ranks = command.ranks()
    command.process.kill()
    command.process.wait()
    command.wait_for(lambda: not any(rank.is_alive() for rank in ranks), "a rank lives")
    sockets = Path(run.sockets.read_text().strip())
    ring = Path("/dev/shm") / sockets.name
    assert sockets.exists()
    assert ring.exists()
    other = RunLayout(tmp_path / "other")
    other.create()
    plan = prepare(TrainConfig.from_mapping(tiny_values), other)
    assert not sockets.exists()
    assert not ring.exists()
    assert Path(plan.ring_file).exists()
    plan.forget_names()


@pytest.mark.long
def test_a_killed_rank_is_named(typed: Callable[..., Typed]) -> None:
    command = typed(epochs=400)
    command.wait_for_step()
    victim = read_pidfile(command.run.rank_pid(0))
    assert victim is not None
    assert victim.send(signal.SIGKILL)
    assert command.process.wait(PATIENCE) == 1
    assert "error: target 0 (rank 0, cpu) died without a word\n  cause: signal SIGKILL" in command.said
    assert "Traceback" not in command.said
    command.assert_gone(command.run)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_reader_that_has_gone_costs_no_checkpoint(typed: Callable[..., Typed], number: int) -> None:
    # `train | tee log`: Ctrl-C ends tee as well, and what the ranks print goes nowhere. Here it takes ten lines. A shell
    # ignores INT for what it starts in the background.
    command = typed(
        wrapper='exec 3>&1; { "$@" & echo $! >&3; wait $!; echo "code $?" >&3; } 2>&1 | head -10', epochs=400
    )
    events = command.run.events
    command.wait_for(lambda: events.exists() and b'"step"' in events.read_bytes(), "no step")
    front = ProcessIdentity.of(int(command.said.split("\n")[0]))
    assert front.send(number)
    try:
        command.wait_for(lambda: "code " in command.said, "no end")
    finally:
        front.send(signal.SIGKILL)
    assert f"code {128 + number}" in command.said
    assert len(command.checkpoints) == 1
    command.assert_gone(command.run)
