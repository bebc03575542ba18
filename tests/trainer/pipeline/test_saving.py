"""`best` is that of the lowest held-out loss: after a kill at any point of a save, and in the runs that are resumed behind it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remote.protocol import events as ev
from remote.protocol.errors import DflashError
from trainer.checkpoint_files import BEST, best_before, list_checkpoints, read_state, step_directory
from trainer.config import TrainConfig
from trainer.drafter.config import derive
from trainer.drafter.model import Drafter
from trainer.optimizer import StepOptimizer
from trainer.pipeline.held_out import HeldOutFigures
from trainer.pipeline.layout import Layout
from trainer.pipeline.plan import RunPlan
from trainer.pipeline.reporting import Desk, PipelineProfiler, Reporter
from trainer.pipeline.saving import Saving
from trainer.pipeline.world import World
from trainer.telemetry import StageClock

ROOT = Path(__file__).resolve().parents[3]
TARGET = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 40,
}  # fmt: skip


class Events:
    """Telemetry that remembers."""

    def __init__(self) -> None:
        self.seen: list[ev.Event] = []

    def emit(self, event: ev.Event) -> None:
        self.seen.append(event)

    def close(self) -> None:
        return

    def of(self, kind: type[ev.Event]) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]


def saving(output_dir: Path, *, resume: Path | None = None, keep: int = 1, desk: bool = True) -> Saving:
    """The checkpoints of a run of 100 steps, as its first drafter keeps them; events in `desk.telemetry`."""
    config = TrainConfig(mask_token_id=3, block_size=4, keep_checkpoints=keep, device="cpu", dtype="float32")
    plan = RunPlan(
        run_id="r", run_dir=str(output_dir.parent), config=config.to_dict(), leader_pid=1, sockets="", ring_file="",
        slot_bytes=1, slots_per_pair=2, captured_layers=2, hidden_size=16, documents="", data_fingerprint="abc",
        total_steps=100, first_step=1, output_dir=str(output_dir), resume=str(resume or ""),
    )  # fmt: skip
    drafter = Drafter(derive(TARGET, num_layers=1, block_size=4, mask_token_id=3, num_target_layer_ids=2))
    events = Events()
    reporter = Reporter(events, Layout.of(config), rank=1, total_steps=100, first_step=1)
    return Saving(
        plan, config, World(rank=1, local_rank=1, machine=0, machines=1, drafters=None, drafter_count=1), drafter,
        StepOptimizer(drafter, config, 100), StageClock(),
        Desk(events, reporter, PipelineProfiler(events, rank=1, ring_capacity=1)) if desk else None,
    )  # fmt: skip


def measured(loss: float) -> HeldOutFigures:
    return HeldOutFigures(loss, 0.1, 1.0)


def save_all(run: Saving, losses: dict[int, float | None]) -> None:
    for step, loss in losses.items():
        run.save(step, 1.0, None if loss is None else measured(loss))


def best_step(output_dir: Path) -> int:
    return read_state(output_dir / BEST).step


def said_best(run: Saving) -> list[tuple[int, bool]]:
    assert run.desk is not None
    assert isinstance(run.desk.telemetry, Events)
    return [(each.step, each.best) for each in run.desk.telemetry.of(ev.CheckpointSaved)]


def alarms(run: Saving) -> list[Any]:
    assert run.desk is not None
    assert isinstance(run.desk.telemetry, Events)
    return run.desk.telemetry.of(ev.AlarmRaised)


# ---- kill -9 at every point of a save with its link and its rotation

KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from tests_saving import measured, save_all, saving
directory, point, count = Path(sys.argv[1]), 0, 0
before = saving(directory / "whole")
save_all(before, {1: 3.0, 2: 4.0})
def die(event, arguments):
    global count
    if event in ("open", "os.rename", "os.mkdir", "os.symlink", "os.chmod", "os.remove", "os.rmdir", "shutil.rmtree"):
        count += 1
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)
for point in range(1, 200):
    output_dir = directory / str(point)
    shutil.copytree(directory / "whole", output_dir, symlinks=True)
    run = saving(output_dir, resume=output_dir / "step-00000002")
    pid = os.fork()
    if pid == 0:
        sys.addaudithook(die)
        run.save(3, 1.0, measured(2.0))
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
        print(point, flush=True)
        break
"""


def test_a_kill_at_any_point_leaves_a_best_that_a_resumed_run_finds(tmp_path: Path) -> None:
    (tmp_path / "tests_saving.py").write_bytes(Path(__file__).read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    points = int(done.stdout)
    seen = set()
    for point in range(1, points + 1):
        output_dir = tmp_path / str(point)
        newest = list_checkpoints(output_dir)[-1]
        state = read_state(newest)
        # The link always leads to a whole checkpoint, of this save or of the one before.
        seen.add((state.step, best_step(output_dir)))
        assert (output_dir / BEST / "optimizer.safetensors").is_file()
        resumed = tmp_path / "resumed" / str(point)
        run = saving(resumed, resume=newest)
        assert read_state(resumed / BEST).held_out_loss == state.best_held_out_loss == run.best_loss
    # Among them the one that the link alone would get wrong: step 3 is saved, and the link still at step 1.
    assert seen == {(2, 1), (3, 1), (3, 3)}


# ---- what a resumed run takes over


@pytest.mark.parametrize(
    ("resumed_from", "best"),
    [
        (4, 2),  # the best is older
        (2, 2),  # it is the best itself
        (1, 1),  # its best so far; the run that it comes from found a better one later
        (5, 5),
        (6, 5),  # saved by a stop, which measures nothing
    ],
)
def test_a_resumed_run_begins_with_the_best_that_led_to_it(tmp_path: Path, resumed_from: int, best: int) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save_all(saving(first, keep=9), {1: 3.0, 2: 2.0, 4: 4.0, 5: 1.0, 6: None})
    run = saving(second, resume=step_directory(first, resumed_from))
    assert (second / BEST).resolve() == step_directory(first, best)
    save_all(run, {50: 9.0})
    assert best_step(second) == best
    assert read_state(step_directory(second, 50)).best_held_out_loss == run.best_loss
    save_all(run, {51: 0.5, 52: 0.7})
    assert best_step(second) == 51
    assert said_best(run) == [(50, False), (51, True), (52, False)]
    assert [path.name for path in list_checkpoints(second)] == ["step-00000051", "step-00000052"]
    # The run before keeps what it had.
    assert best_step(first) == 5


def test_the_best_is_handed_on_from_run_to_run(tmp_path: Path) -> None:
    places = [tmp_path / name for name in "abc"]
    save_all(saving(places[0]), {1: 1.0, 2: 2.0})
    save_all(saving(places[1], resume=step_directory(places[0], 2)), {3: 3.0})
    run = saving(places[2], resume=step_directory(places[1], 3))
    assert (places[2] / BEST).resolve() == step_directory(places[0], 1)
    assert run.best_loss == 1.0


def test_a_best_that_is_gone_gives_way_to_the_best_that_is_there(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save_all(saving(first), {1: 1.0, 2: 2.0})
    shutil.rmtree(step_directory(first, 1))
    run = saving(second, resume=step_directory(first, 2))
    assert (second / BEST).resolve() == step_directory(first, 2)
    assert run.best_loss == 2.0


def test_a_run_without_held_out_data_has_no_best(tmp_path: Path) -> None:
    save_all(saving(tmp_path / "first"), {1: None})
    saving(tmp_path / "second", resume=step_directory(tmp_path / "first", 1))
    assert not (tmp_path / "second").exists()
    assert best_before(step_directory(tmp_path / "first", 1)) is None


def test_a_neighbour_that_cannot_be_read_is_nobodys_best(tmp_path: Path) -> None:
    save_all(saving(tmp_path / "first", keep=9), {1: 1.0, 2: 2.0})
    (step_directory(tmp_path / "first", 1) / "trainer_state.json").write_text("{")
    assert best_before(step_directory(tmp_path / "first", 2)) == (step_directory(tmp_path / "first", 2), 2.0)


def test_drafters_without_a_desk_link_nothing(tmp_path: Path) -> None:
    save_all(saving(tmp_path / "first"), {1: 1.0})
    run = saving(tmp_path / "second", resume=step_directory(tmp_path / "first", 1), desk=False)
    assert not (tmp_path / "second").exists()
    assert run.last == step_directory(tmp_path / "first", 1)


# ---- what cannot be done is said by its own name


def test_a_link_that_cannot_be_made_costs_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "out" / BEST).mkdir(parents=True)
    run = saving(tmp_path / "out")
    save_all(run, {1: 2.0, 100: 1.0})
    assert [(each.alarm, each.step) for each in alarms(run)] == [("best_not_linked", 1), ("best_not_linked", 100)]
    assert "the best checkpoint cannot be linked" in alarms(run)[0].message
    assert said_best(run) == [(1, False), (100, False)]
    assert run.last == step_directory(tmp_path / "out", 100)
    (tmp_path / "out" / BEST).rmdir()
    save_all(run, {101: 1.5})
    assert best_step(tmp_path / "out") == 101  # That of step 100 was rotated away or will be: nothing leads to it.


def test_old_checkpoints_that_cannot_be_removed_cost_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(output_dir: Path, keep: int) -> None:
        raise PermissionError(1, "Operation not permitted", str(output_dir))

    monkeypatch.setattr("trainer.checkpoint_files.rotate", refuse)
    run = saving(tmp_path / "out")
    save_all(run, {1: None, 100: None})
    assert [(each.alarm, each.step) for each in alarms(run)] == [
        ("old_checkpoints_kept", 1),
        ("old_checkpoints_kept", 100),
    ]
    assert run.last == step_directory(tmp_path / "out", 100)


def test_a_resumed_run_that_cannot_link_its_best_says_so_at_once(tmp_path: Path) -> None:
    save_all(saving(tmp_path / "first"), {1: 1.0})
    (tmp_path / "second" / BEST).mkdir(parents=True)
    with pytest.raises(DflashError, match="cannot be linked") as caught:
        saving(tmp_path / "second", resume=step_directory(tmp_path / "first", 1))
    assert BEST in caught.value.hint
