"""Checkpoints: equal after restoring, never half there, rotated, and never of another drafter."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from remote.protocol.errors import DflashError, ExitCode
from trainer import checkpoint
from trainer.checkpoint_files import (
    STATE_FILE,
    TrainerState,
    check_resumable,
    list_checkpoints,
    mark_best,
    read_state,
    rotate,
    step_directory,
)
from trainer.config import TrainConfig
from trainer.drafter.config import DrafterConfig, derive
from trainer.drafter.model import Drafter
from trainer.optimizer import StepOptimizer

ROOT = Path(__file__).resolve().parents[2]
CONFIG = TrainConfig(mask_token_id=3, block_size=4)


def drafter_config(**changes: Any) -> DrafterConfig:
    target = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 40, "rms_norm_eps": 1e-5, "rope_theta": 1000.0,
    }  # fmt: skip
    values = {"num_layers": 2, "block_size": 4, "mask_token_id": 3, "num_target_layer_ids": 2}
    return derive(target, **(values | changes))


def trained(dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Drafter, StepOptimizer]:
    torch.manual_seed(1)
    drafter = Drafter(drafter_config(**changes)).to(dtype)
    optimizer = StepOptimizer(drafter, CONFIG, 100)
    for step in range(1, 4):
        loss = torch.stack([(parameter**2).sum() for parameter in drafter.parameters()]).sum()
        loss.backward()
        optimizer.apply(step, loss_sum=loss.detach(), weight_sum=torch.tensor(1.0), drafters=1)
    return drafter, optimizer


def state(step: int, **changes: Any) -> TrainerState:
    values = {"step": step, "total_steps": 100, "data_fingerprint": "abc", "config": CONFIG.to_dict(), "loss": 3.5,
              "target_fingerprint": "model"}  # fmt: skip
    return TrainerState(**(values | changes))


def save(directory: Path, step: int, pair: tuple[Drafter, StepOptimizer] | None = None) -> checkpoint.Saved:
    return checkpoint.save(directory, state(step), *(pair or trained()), dtype="float32", progress=lambda *_: None)


def tensors(drafter: Drafter, optimizer: StepOptimizer) -> dict[str, torch.Tensor]:
    return drafter.state_dict() | optimizer.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    drafter, optimizer = trained(dtype)
    saved = save(tmp_path, 3, (drafter, optimizer))
    fresh = Drafter(drafter_config()).to(dtype)
    resumed = StepOptimizer(fresh, CONFIG, 100)
    checkpoint.restore(saved.path, fresh, resumed)
    one, other = tensors(drafter, optimizer), tensors(fresh, resumed)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) and value.dtype == other[name].dtype for name, value in one.items())
    assert read_state(saved.path) == state(3)


def poisoned(**changes: Any) -> Drafter:
    """A drafter as `empty_drafter` makes it, whose memory holds the worst that it may."""
    with torch.device("meta"):
        drafter = Drafter(drafter_config(**changes))
    drafter.to_empty(device="cpu")
    for tensor in [*drafter.parameters(), *drafter.buffers()]:
        tensor.data.fill_(torch.nan)
    return drafter


def test_every_parameter_and_buffer_of_an_empty_drafter_comes_from_the_checkpoint(tmp_path: Path) -> None:
    drafter, optimizer = trained()
    saved = save(tmp_path, 3, (drafter, optimizer))
    fresh = poisoned()
    resumed = StepOptimizer(fresh, CONFIG, 100)
    checkpoint.restore(saved.path, fresh, resumed)
    resumed.allocate()
    one, other = tensors(drafter, optimizer), tensors(fresh, resumed)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    everything = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
    assert everything.keys() == drafter.state_dict().keys()
    assert all(bool(torch.isfinite(value).all()) for value in everything.values())


@pytest.mark.parametrize("change", ["lacks", "has more"])
def test_a_checkpoint_with_other_names_is_refused(tmp_path: Path, change: str) -> None:
    # What it lacks would stay what the memory held before.
    file = save(tmp_path, 3).path / "drafter.safetensors"
    weights = load_file(file)
    if change == "lacks":
        del weights["norm.weight"]
    else:
        weights["norm.bias"] = weights["norm.weight"].clone()
    save_file(weights, file)
    fresh = poisoned()
    with pytest.raises(DflashError, match="cannot be restored") as caught:
        checkpoint.restore(file.parent, fresh, StepOptimizer(fresh, CONFIG, 100))
    assert caught.value.cause.startswith("norm.weight:" if change == "lacks" else "norm.bias:")


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    # Not broadcast: copy_ would.
    file = save(tmp_path, 3).path / "drafter.safetensors"
    weights = load_file(file)
    weights["norm.weight"] = weights["norm.weight"][:1].clone()
    save_file(weights, file)
    fresh = poisoned()
    with pytest.raises(DflashError, match="cannot be restored") as caught:
        checkpoint.restore(file.parent, fresh, StepOptimizer(fresh, CONFIG, 100))
    assert caught.value.cause == "norm.weight is [16] in the drafter, [1] in the file"


def test_a_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    drafter, optimizer = trained()
    saved = checkpoint.save(
        tmp_path, state(3), drafter, optimizer, dtype="bfloat16", progress=lambda *each: seen.append(each)
    )
    size = sum(value.numel() * value.element_size() for value in tensors(drafter, optimizer).values())
    assert saved.path == step_directory(tmp_path, 3)
    assert (saved.bytes, saved.seconds > 0) == (size, True)
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)
    assert DrafterConfig.from_zlab(json.loads((saved.path / "drafter_config.json").read_text())) == drafter.config


def test_progress_is_said_before_the_first_byte_is_copied(tmp_path: Path) -> None:
    # A stop's patience counts from it, and 21 GB take 14 s from a GPU.
    seen: list[tuple[int, int]] = []
    drafter, optimizer = trained()
    checkpoint.save(
        tmp_path,
        state(3),
        drafter,
        optimizer,
        dtype="float32",
        progress=lambda written, _: seen.append((written, len(list(tmp_path.glob("**/*.safetensors"))))),
    )
    assert [files for _, files in seen] == [0, 1, 2]
    assert seen[0][0] == 0


def test_the_drafter_of_another_shape_is_refused_and_named(tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    other = Drafter(drafter_config(num_layers=3))
    with pytest.raises(DflashError) as caught:
        checkpoint.restore(saved.path, other, StepOptimizer(other, CONFIG, 100))
    assert caught.value.code == ExitCode.PREFLIGHT
    assert str(saved.path) in caught.value.error
    assert "layers.2" in caught.value.cause


@pytest.mark.parametrize("file", ["drafter.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "torn", "empty"])
def test_damaged_files_are_refused(tmp_path: Path, file: str, damage: str) -> None:
    pair = trained()
    path = save(tmp_path, 3, pair).path / file
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 1000 if damage == "torn" else 0])
    with pytest.raises(DflashError, match="cannot be restored"):
        checkpoint.restore(path.parent, *pair)


def test_a_checkpoint_is_never_written_over_another(tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    before = (saved.path / STATE_FILE).read_bytes()
    with pytest.raises(DflashError, match="exists already"):
        save(tmp_path, 3)
    assert (saved.path / STATE_FILE).read_bytes() == before


# ---- kill -9 at every point of a save

KILLED = """
import os, signal, sys
from pathlib import Path
from tests_checkpoint import save, trained
point, directory = 0, Path(sys.argv[1])
count = 0
def die(event, arguments):
    # Every file that is opened, renamed or made while saving is a point to die at.
    global count
    if event in ("open", "os.rename", "os.mkdir", "os.chmod", "os.remove", "os.rmdir", "shutil.rmtree"):
        count += 1
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)
pair = trained()
for child in range(1, 100):
    # One fork for each point: torch is imported once.
    pid = os.fork()
    if pid == 0:
        point = child
        sys.addaudithook(die)
        save(directory / str(child), 7, pair)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        print(child, flush=True)
        break
"""


def test_a_kill_at_any_point_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "tests_checkpoint.py").write_bytes(Path(__file__).read_bytes())
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
    assert points > 10  # So many ways to die, and the next child got through.
    fresh = Drafter(drafter_config())
    complete = 0
    for point in range(1, points + 1):
        found = list_checkpoints(tmp_path / str(point))
        for path in found:
            complete += 1
            assert read_state(path).step == 7
            checkpoint.restore(path, fresh, StepOptimizer(fresh, CONFIG, 100))
        if (tmp_path / str(point)).is_dir():
            rotate(tmp_path / str(point), 3)
            assert sorted((tmp_path / str(point)).iterdir()) == found  # Leftovers of the killed save are gone.
    # The last got through; some before it died behind the rename.
    assert 1 <= complete < points


ROTATED = """
import os, shutil, signal, sys
from pathlib import Path
from tests_checkpoint import rotate, save, trained
directory, count = Path(sys.argv[1]), 0
pair = trained()
for step in (1, 2, 3):
    save(directory / "whole", step, pair)
def die(event, arguments):
    # Every name that is changed or removed is a point to die at.
    global count
    if event in ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
        count += 1
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)
for point in range(1, 100):
    shutil.copytree(directory / "whole", directory / str(point))
    pid = os.fork()
    if pid == 0:
        sys.addaudithook(die)
        rotate(directory / str(point), 1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
        print(point, flush=True)
        break
"""


def test_a_kill_at_any_point_of_a_rotation_leaves_whole_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "tests_checkpoint.py").write_bytes(Path(__file__).read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", ROTATED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    points = int(done.stdout)
    assert points > 10  # Two checkpoints of four files each.
    fresh = Drafter(drafter_config())
    for point in range(1, points + 1):
        output_dir = tmp_path / str(point)
        found = list_checkpoints(output_dir)
        assert found[-1] == step_directory(output_dir, 3)
        for path in found:
            checkpoint.restore(path, fresh, StepOptimizer(fresh, CONFIG, 100))
            assert (path / "drafter_config.json").is_file()
        # The next rotation removes what the killed one was at.
        rotate(output_dir, 1)
        assert list(output_dir.iterdir()) == [step_directory(output_dir, 3)]


FULL = """
import resource, signal, sys
from pathlib import Path
from tests_checkpoint import save, trained
from remote.protocol.errors import DflashError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
pair = trained()
save(Path(sys.argv[1]), 1, pair)
for limit in (0, 4096, 20_000):
    # No file may grow beyond the limit: how a full disk looks from inside.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save(Path(sys.argv[1]), 2, pair)
    except DflashError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(error.error, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_a_full_disk_leaves_the_checkpoint_before_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "tests_checkpoint.py").write_bytes(Path(__file__).read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the checkpoint of step 2 cannot be written") == 3
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["step-00000001"]


# ---- the directory of checkpoints


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    pair = trained()
    for step in (5, 10, 100, 1000):
        save(tmp_path, step, pair)
        rotate(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000100", "step-00001000"]


def test_rotation_keeps_the_best_until_there_is_a_better_one(tmp_path: Path) -> None:
    pair, names = trained(), []
    for step, is_best in ((1, True), (2, False), (3, False), (4, True), (5, False)):
        path = save(tmp_path, step, pair).path
        if is_best:
            mark_best(tmp_path, path)
        rotate(tmp_path, 1)
        names.append(sorted(int(each.name.removeprefix("step-")) for each in list_checkpoints(tmp_path)))
    assert names == [[1], [1, 2], [1, 3], [4], [4, 5]]
    assert read_state(tmp_path / "best").step == 4
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert read_state(moved / "best").step == 4


def test_rotation_touches_nothing_that_is_not_its_own(tmp_path: Path) -> None:
    pair = trained()
    for name in ("step-1", "step-00000001.bak", "notes", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000002").mkdir()  # Has no state: not complete, so not ours to judge.
    for step in (5, 10):
        save(tmp_path, step, pair)
    rotate(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-1", "step-00000001.bak", "notes", "best", "step-00000002", "step-00000010",
    }  # fmt: skip


def test_there_are_no_checkpoints_where_there_is_no_directory(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "missing") == []


def test_a_directory_without_state_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DflashError) as caught:
        read_state(tmp_path)
    assert caught.value.code == ExitCode.PREFLIGHT
    assert "no complete checkpoint" in caught.value.hint


@pytest.mark.parametrize("content", ["{", "[]", '{"step": "five"}', "{}"])
def test_a_state_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(DflashError, match="no usable checkpoint"):
        read_state(tmp_path)


def test_the_state_of_a_newer_version_still_opens(tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    path = saved.path / STATE_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2, "invented_later": [1]}))
    assert dataclasses.replace(read_state(saved.path), schema=1) == state(3)


# ---- may a run go on from it

FREE_TO_CHANGE: list[Callable[[TrainConfig], TrainConfig]] = [
    lambda c: dataclasses.replace(c, target_gpus=(0, 1), drafter_gpus=(2, 3)),
    lambda c: dataclasses.replace(c, transfer="sync"),
    lambda c: dataclasses.replace(c, split_fc="on"),
    lambda c: dataclasses.replace(c, checkpoint_every=7, profile_interval=1.0, ring_mib=1),
    lambda c: dataclasses.replace(c, data_dir="/elsewhere", output_dir="/elsewhere", target_model="/moved"),
]


@pytest.mark.parametrize("change", FREE_TO_CHANGE)
def test_what_computes_the_same_numbers_may_change(change: Callable[[TrainConfig], TrainConfig]) -> None:
    check_resumable(state(3), change(CONFIG), fingerprint="abc", target="model", held_out="", total_steps=100)


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 1), ("lr", 1.0), ("gamma", 2.0), ("target_layer_ids", (1, 2)), ("dtype", "float64"), ("noise_std", 0.5)],
)
def test_what_computes_other_numbers_may_not(key: str, value: Any) -> None:
    with pytest.raises(DflashError) as caught:
        check_resumable(
            state(3),
            dataclasses.replace(CONFIG, **{key: value}),
            fingerprint="abc",
            target="model",
            held_out="",
            total_steps=100,
        )
    assert caught.value.code == ExitCode.PREFLIGHT
    assert f"{key}: " in caught.value.cause


def test_a_checkpoint_from_before_a_key_goes_on_with_its_default() -> None:
    old = state(3)
    known = {key: value for key, value in old.config.items() if key not in ("loss_vocab_extra", "gamma")}
    old = dataclasses.replace(old, config=known)
    check_resumable(old, CONFIG, fingerprint="abc", target="model", held_out="", total_steps=100)
    changed = dataclasses.replace(CONFIG, loss_vocab_extra=7)
    with pytest.raises(DflashError, match="another configuration") as caught:
        check_resumable(old, changed, fingerprint="abc", target="model", held_out="", total_steps=100)
    assert caught.value.cause == "loss_vocab_extra: -1 then, 7 now"


def test_every_key_is_known_to_be_binding_or_free() -> None:
    """A key that is added has to be thought about: silently free would let a resumed run compute other numbers."""
    from trainer.checkpoint_files import _BINDING

    free = {
        "target_model", "held_out_dir", "init_from_target", "init_from_drafter", "data_dir",
        "attention_backend", "objective_rows", "on_nan", "device", "target_gpus", "drafter_gpus",
        "gpu_memory_gib", "threads", "transfer", "split_fc", "ring_mib", "verify_copies", "profile_interval", "trace_steps",
        "collective_timeout", "stall_timeout", "output_dir", "checkpoint_every", "keep_checkpoints", "resume",
    }  # fmt: skip
    keys = {field.name for field in dataclasses.fields(TrainConfig)}
    assert free | set(_BINDING) == keys
    assert not free & set(_BINDING)


def test_other_data_and_a_complete_run_are_refused() -> None:
    with pytest.raises(DflashError, match="another configuration"):
        check_resumable(state(3), CONFIG, fingerprint="other", target="model", held_out="", total_steps=100)
    with pytest.raises(DflashError, match="another configuration") as caught:
        check_resumable(state(3), CONFIG, fingerprint="abc", target="other", held_out="", total_steps=100)
    assert caught.value.cause == "the target is another model"
    # A checkpoint from before targets had fingerprints.
    check_resumable(
        state(3, target_fingerprint=""), CONFIG, fingerprint="abc", target="model", held_out="", total_steps=100
    )
    with pytest.raises(DflashError, match="complete at step 100"):
        check_resumable(state(100), CONFIG, fingerprint="abc", target="model", held_out="", total_steps=100)
