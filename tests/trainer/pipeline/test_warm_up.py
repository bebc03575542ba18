"""Warm-up: every shape that a run meets is run before its first step, is reported, and leaves no trace in the training."""

from __future__ import annotations

import functools
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from races import in_process
from races.in_process import Heard, planned, rank_of
from safetensors.torch import load_file

from remote.protocol import events as ev
from trainer.checkpoint_files import list_checkpoints
from trainer.config import TrainConfig
from trainer.pipeline import roles, warm_up
from trainer.pipeline.copier import HostCopier
from trainer.pipeline.layout import Role
from trainer.pipeline.post import Post, take_post
from trainer.pipeline.session import DrafterSession
from trainer.pipeline.target_side import Producer
from trainer.pipeline.warm_up import WarmUp
from trainer.telemetry import EventWriter, PhaseLog, Telemetry

LAYOUTS: dict[str, dict[str, Any]] = {
    "async": {},
    "sync, split-fc": {"transfer": "sync", "split_fc": "on", "dtype": "bfloat16"},
    "shared": {"drafter_gpus": [0], "dtype": "float32"},
}
# All that draws: noise, anchors, a sub-vocabulary; held-out rows are measured in between.
EVERYTHING: dict[str, Any] = {
    "noise_std": 0.05, "loss_vocab_extra": 4, "num_anchors": 4, "max_steps": 3, "checkpoint_every": 2,
    "verify_copies": "all", "profile_interval": 0,
}  # fmt: skip


@pytest.fixture
def every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(roles, "WarmUp", functools.partial(WarmUp, every_shape=True))


@contextmanager
def cold() -> Iterator[None]:
    """No warm-up at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WarmUp, "target", lambda *_: None)
        patch.setattr(WarmUp, "drafter", lambda *_: None)
        yield


class Desk(EventWriter):
    """Telemetry of a first drafter, which keeps what it writes. Without it a run would report no steps and save nothing."""

    def __init__(self, directory: Path) -> None:
        self.events: list[ev.Event] = []
        super().__init__(directory / f"events-{id(self)}.jsonl", None)

    def emit(self, event: ev.Event) -> None:
        self.events.append(event)
        super().emit(event)


Result = tuple[list[Any], list[dict[str, torch.Tensor]], list[ev.Event]]


def run(values: dict[str, Any], directory: Path) -> Result:
    """Return what each step computed, what each checkpoint holds, and the events of the drafter's rank."""
    directory.mkdir()
    if "drafter_gpus" not in values:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(in_process, "Heard", lambda: Desk(directory))
            # Two ranks in one process have one generator: the target's thread, loading, would draw from it in between.
            drawn = roles.fresh_drafter(TrainConfig.from_mapping(values))
            patch.setattr(roles, "fresh_drafter", lambda _: drawn)
            events = in_process.run_both(values, directory)
    else:
        desk = Desk(directory)
        with shared_post(values, directory, desk) as (post, _):
            roles.run_drafter(post)
        events = desk.events
    steps = [
        (each.step, each.loss, each.accuracy, each.grad_norm, each.lr, each.tokens)
        for each in events
        if isinstance(each, ev.Step)
    ]
    saved = [
        load_file(path / "drafter.safetensors") | load_file(path / "optimizer.safetensors")
        for checkpoints in directory.glob("*/checkpoints")
        for path in list_checkpoints(checkpoints)
    ]
    return steps, saved, events


@contextmanager
def shared_post(values: dict[str, Any], directory: Path, heard: Telemetry) -> Iterator[tuple[Post, Producer]]:
    with (
        planned(values | {"drafter_gpus": [0]}, directory) as plan,
        take_post(plan, rank_of(0), heard, PhaseLog(heard, role=Role.SHARED, rank=0)) as post,
    ):
        yield post, roles.load_producer(post)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_that_of_a_run_without_a_warm_up_bit_for_bit(
    tiny_values: dict[str, Any], data_file: Path, tmp_path: Path, every_shape: None, layout: str
) -> None:
    values = tiny_values | EVERYTHING | LAYOUTS[layout] | {"held_out_dir": str(data_file)}
    steps, saved, events = run(values, tmp_path / "warm")
    assert sum(isinstance(each, ev.WarmedUp) for each in events) > 3
    with cold():
        other_steps, other_saved, other_events = run(values, tmp_path / "cold")
    assert not any(isinstance(each, ev.WarmedUp) for each in other_events)
    assert len(steps) == 3
    assert steps == other_steps
    assert len(saved) == len(other_saved) == 2
    for one, other in zip(saved, other_saved, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) and value.dtype == other[name].dtype for name, value in one.items())


def test_the_comparison_sees_a_gradient_that_is_left(
    tiny_values: dict[str, Any], tmp_path: Path, every_shape: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tiny_values | EVERYTHING | LAYOUTS["shared"]
    steps, _, _ = run(values, tmp_path / "right")
    drafter = WarmUp.drafter

    def forgetful(self: WarmUp, session: DrafterSession) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session.optimizer, "clear_gradients", lambda: None)
            drafter(self, session)

    monkeypatch.setattr(WarmUp, "drafter", forgetful)
    assert run(values, tmp_path / "wrong")[0] != steps


def test_whatever_the_run_meets_was_run_before(
    tiny_values: dict[str, Any], data_file: Path, tmp_path: Path, every_shape: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: dict[str, list[Any]] = {"target": [], "drafter": []}
    states, backward = Producer.states, DrafterSession.backward
    trains = False

    def note_states(self: Producer, read: Any, *rest: Any, **more: Any) -> Any:
        ran["target"].append((trains, tuple(read.padded.shape)))
        return states(self, read, *rest, **more)

    def note_backward(self: DrafterSession, packed: Any, **more: Any) -> Any:
        ran["drafter"].append((trains, len(packed.row.input_ids)))
        return backward(self, packed, **more)

    def train(session: DrafterSession) -> Any:
        nonlocal trains
        trains = True
        return real(session)

    real = roles.train
    monkeypatch.setattr(roles, "train", train)
    monkeypatch.setattr(Producer, "states", note_states)
    monkeypatch.setattr(DrafterSession, "backward", note_backward)
    values = tiny_values | {"drafter_gpus": [0], "held_out_dir": str(data_file), "epochs": 2, "bucket_tokens": 8}
    _, _, events = run(values, tmp_path / "run")
    for role, seen in ran.items():
        before = [shape for training, shape in seen if not training]
        assert {shape for training, shape in seen if training} == set(before)
        assert len(before) == len(set(before)), role
        told = [each for each in events if isinstance(each, ev.WarmedUp) and each.role == role]
        assert len([each for each in told if "held out" not in each.shape]) == len(before)
    widest = max((rows * width for _, (rows, width) in ran["target"]), default=0)
    assert widest == ran["target"][0][1][0] * ran["target"][0][1][1]


def test_it_leaves_gradients_and_moments_allocated_and_empty(
    tiny_values: dict[str, Any], tmp_path: Path, every_shape: None
) -> None:
    heard = Heard()
    with shared_post(tiny_values, tmp_path, heard) as (post, producer):
        built = roles.build_drafter(post, None)
        weights = {name: value.clone() for name, value in built[0].state_dict().items()}
        random = torch.random.get_rng_state()
        session = roles.warm_session(post, producer, *built)
        assert torch.equal(random, torch.random.get_rng_state())
        for name, parameter in session.drafter.named_parameters():
            assert parameter.grad is not None
            assert not bool(parameter.grad.any()), name
            assert torch.equal(parameter, weights[name])
        moments = session.optimizer.state_dict()
        assert len(moments) == 3 * len(weights)
        assert not any(bool(value.any()) for value in moments.values())
        assert post.phases.detail == ""
    phase = [each for each in heard.events if isinstance(each, ev.Phase) and each.phase == "warmup"][-1]
    count = sum(isinstance(each, ev.WarmedUp) for each in heard.events)
    assert phase.detail == f"{count} shapes on cpu"
    assert phase.seconds > 0


def test_on_a_cpu_the_largest_shape_alone_is_run(tiny_values: dict[str, Any], tmp_path: Path) -> None:
    heard = Heard()
    with shared_post(tiny_values, tmp_path, heard) as (post, producer):
        session = roles.warm_session(post, producer, *roles.build_drafter(post, producer))
    told = [each for each in heard.events if isinstance(each, ev.WarmedUp)]
    assert [each.role for each in told] == ["target", "drafter"]
    assert {(each.device, each.peak_bytes, each.free_bytes, each.rank) for each in told} == {("cpu", 0, 0, 0)}
    assert session.clock.current == ""
    assert session.ends.embed.data_ptr() == producer.target.embedding.data_ptr()


def test_a_stop_ends_it_behind_the_shape_that_runs(
    tiny_values: dict[str, Any], tmp_path: Path, every_shape: None
) -> None:
    class Stopper(Heard):
        def emit(self, event: ev.Event) -> None:
            super().emit(event)
            if isinstance(event, ev.WarmedUp):
                stop.write_text("{}")

    heard = Stopper()
    with shared_post(tiny_values, tmp_path, heard) as (post, producer):
        stop = post.plan.run.stop
        session = roles.warm_session(post, producer, *roles.build_drafter(post, producer))
        assert post.end_of_warm_up()
    told = [each for each in heard.events if isinstance(each, ev.WarmedUp)]
    assert [each.role for each in told] == ["target"]
    assert all(parameter.grad is None for parameter in session.drafter.parameters())


def test_a_run_that_is_stopped_meanwhile_ends_without_a_checkpoint(
    tiny_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = WarmUp.target

    def stopped(self: WarmUp, *rest: Any) -> None:
        target(self, *rest)
        self._post.plan.run.stop.write_text("{}")

    monkeypatch.setattr(WarmUp, "target", stopped)
    steps, saved, events = run(tiny_values | {"drafter_gpus": [0]}, tmp_path / "run")
    (finished,) = (each for each in events if isinstance(each, ev.RunFinished))
    assert (finished.result, finished.step, steps, saved) == ("stopped", 0, [], [])
    assert not any(isinstance(each, ev.RunStarted) for each in events)


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_what_fails_in_a_shape_is_filed_under_it(
    tiny_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(*((Producer, "states") if role == "target" else (DrafterSession, "backward")), fail)
    with shared_post(tiny_values, tmp_path, Heard()) as (post, producer):
        built = roles.build_drafter(post, None)
        with pytest.raises(torch.OutOfMemoryError):
            roles.warm_session(post, producer, *built)
        assert post.phases.current == "warmup"
        pattern = r"target \d+ x \d+ on cpu" if role == "target" else r"drafter \d+ tokens, \d+ blocks on cpu"
        assert re.fullmatch(pattern, post.phases.detail)


def test_copies_are_under_way_meanwhile_and_none_is_left(
    tiny_values: dict[str, Any], tmp_path: Path, every_shape: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[str, int]] = []

    class Mark:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait_host(self) -> None:
            log.append(("landed", self.number))

        def seconds(self) -> float:
            return 0.0

    class Noting(HostCopier):
        def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Any) -> Any:
            super().copy(destination, source, after=after)
            log.append(("started", len(log)))
            return Mark(len(log) - 1)

    capture = Producer.states
    monkeypatch.setattr(Producer, "states", lambda *a, **k: (log.append(("forward", -1)), capture(*a, **k))[1])
    # One rank of two: its pairs' sockets are not needed before training.
    monkeypatch.setattr("trainer.pipeline.post._join_peers", lambda plan, *_: joint_of(plan))
    heard = Heard()
    with (
        planned(tiny_values, tmp_path) as plan,
        take_post(plan, rank_of(0), heard, PhaseLog(heard, role=Role.TARGET, rank=0)) as post,
    ):
        object.__setattr__(post, "copier", Noting())
        warm = WarmUp(post, every_shape=True)
        warm.target(roles.load_producer(post), roles.device_buffers(post))
    started = [number for what, number in log if what == "started"]
    forwards = sum(what == "forward" for what, _ in log)
    assert len(started) == forwards == sum(isinstance(each, ev.WarmedUp) for each in heard.events) > 2
    assert sorted(number for what, number in log if what == "landed") == started
    # Each is on its way during the forward behind it.
    for number in started:
        begin, end = log.index(("started", number)), log.index(("landed", number))
        assert ("forward", -1) in log[begin:end]


def joint_of(plan: Any) -> Any:
    from trainer.pipeline.post import Joint
    from trainer.pipeline.ring import Ring

    ring = Ring(Path(plan.ring_file), slot_size=plan.slot_bytes, slots_per_pair=plan.slots_per_pair)
    return Joint(ring, {0: 0}, {})


@pytest.mark.parametrize("split", ["on", "off"])
def test_a_slot_is_lent_and_nothing_published(
    tiny_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    monkeypatch.setattr("trainer.pipeline.post._join_peers", lambda plan, *_: joint_of(plan))
    with (
        planned(tiny_values | {"split_fc": split}, tmp_path) as plan,
        take_post(plan, rank_of(0), Heard(), PhaseLog(Heard(), role=Role.TARGET, rank=0)) as post,
    ):
        slots = [warm_up._slot_states(post, slot) for slot in (0, 1)]
        buffer = post.buffers(1)[0]
        assert {each.shape for each in slots} == {buffer.storage.shape}
        slots[0].fill_(1)
        assert not bool(slots[1].any())
        assert post.joint is not None
        for slot in (0, 1):
            with pytest.raises(ValueError, match="no slot header"):
                post.joint.ring.read_header(0, slot)


def test_two_drafters_decide_together_and_train(trained: Callable[..., Any]) -> None:
    run = trained(target_gpus=[0, 1], drafter_gpus=[2, 3])
    told = run.events(ev.WarmedUp)
    assert sorted((each.rank, each.role) for each in told) == [
        (0, "target"), (1, "target"), (2, "drafter"), (3, "drafter"),
    ]  # fmt: skip
    first = run.events(ev.Step)[0]
    assert all(each.time < first.time for each in told)


@pytest.mark.parametrize(("rank", "role"), [(0, "target"), (3, "drafter")])
def test_a_stop_while_a_rank_warms_up_is_waited_for_and_trains_nothing(
    start: Callable[..., Any], finish: Callable[[Any], Any], rank: int, role: str
) -> None:
    # Frozen before its first shape: the others come to the barrier, or to the shape that the drafters run together.
    fault = {"what": "freeze", "where": f"trainer.pipeline.warm_up:WarmUp.{role}"}
    run = start(faults={rank: fault}, target_gpus=[0, 1], drafter_gpus=[2, 3], checkpoint_every=1)
    pidfile = run.layout.rank_pid(rank)
    run.wait_for(lambda: pidfile.exists() and state_of(pid_in(pidfile)) == "T", "not frozen")
    run.ask_to_stop()
    os.kill(pid_in(pidfile), signal.SIGCONT)
    finish(run)
    assert run.codes == [0, 0, 0, 0], run.log
    assert (run.finished.result, run.finished.step) == ("stopped", 0)
    ran = [each.rank for each in run.events(ev.WarmedUp)]
    assert ran.count(rank) == (1 if role == "drafter" else 0)
    assert "training" not in {each.phase for each in run.events(ev.Phase)}
    assert run.checkpoints == []


def pid_in(file: Path) -> int:
    return int(file.read_text().split()[0])


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
