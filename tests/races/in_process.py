"""A run whose ranks are in this process, so that a test can look into it: a target and a drafter, or one of both."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remote.protocol import events as ev
from remote.protocol.layout import RunLayout, new_run_id
from trainer.config import TrainConfig
from trainer.pipeline import leader, roles
from trainer.pipeline.channel import PeerDied
from trainer.pipeline.checksum import checksum
from trainer.pipeline.layout import Role
from trainer.pipeline.plan import RunPlan
from trainer.pipeline.post import Joint, Post, take_post
from trainer.pipeline.ring import Ring, SlotHeader
from trainer.pipeline.session import DrafterSession
from trainer.pipeline.world import World
from trainer.telemetry import PhaseLog


class Heard:
    """Telemetry that is kept."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []

    def emit(self, event: ev.Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        return


@dataclasses.dataclass(frozen=True)
class Apart(World):
    """A rank that waits for no others: it is in no process group."""

    def barrier(self, stop_wanted: bool) -> bool:
        return stop_wanted


@contextlib.contextmanager
def planned(values: dict[str, Any], directory: Path) -> Iterator[RunPlan]:
    """Yield the plan of a run as the leader makes it."""
    layout = RunLayout(directory / new_run_id())
    layout.create()
    layout.run_lock.touch()
    plan = leader.prepare(TrainConfig.from_mapping(values), layout)
    try:
        yield plan
    finally:
        plan.forget_names()


def rank_of(number: int) -> World:
    return Apart(rank=number, local_rank=number, machine=0, machines=1, drafters=None, drafter_count=1)


@contextlib.contextmanager
def shared_session(values: dict[str, Any], directory: Path) -> Iterator[DrafterSession]:
    """Yield the drafter's work of a rank that is target and drafter."""
    heard = Heard()
    with (
        planned(values, directory) as plan,
        take_post(plan, rank_of(0), heard, PhaseLog(heard, role=Role.SHARED, rank=0)) as post,
    ):
        producer = roles.load_producer(post)
        yield roles.make_session(post, producer, *roles.build_drafter(post, producer))


# CUDA remembers a registered range: unmapped, its addresses may be given out again and would be refused.
_kept: list[Joint | None] = []


@contextlib.contextmanager
def _hung_up_when_lost(post: Post) -> Iterator[None]:
    """Let the other side notice that this one has failed: there is no process whose end would tell."""
    _kept.append(post.joint)
    assert post.joint is not None
    try:
        yield
    except BaseException:
        for each in post.joint.channels.values():
            # Closing alone would not wake a thread that reads.
            with contextlib.suppress(OSError):
                each._socket.shutdown(socket.SHUT_RDWR)
        raise


def run_both(values: dict[str, Any], directory: Path) -> list[ev.Event]:
    """Run a drafter here and its target in a thread, to their end; returns the drafter's events. Raises what either raised."""
    errors: list[BaseException] = []
    heard = [Heard(), Heard()]

    def produce(plan: RunPlan) -> None:
        with take_post(plan, rank_of(0), heard[0], PhaseLog(heard[0], role=Role.TARGET, rank=0)) as post:
            try:
                with _hung_up_when_lost(post):
                    roles.run_target(post)
            except BaseException as error:
                errors.append(error)

    with planned(values, directory) as plan:
        target = threading.Thread(target=produce, args=(plan,), daemon=True)
        target.start()
        try:
            phases = PhaseLog(heard[1], role=Role.DRAFTER, rank=1)
            with take_post(plan, rank_of(1), heard[1], phases) as post, _hung_up_when_lost(post):
                roles.run_drafter(post)
        except PeerDied:
            target.join()
            raise errors[0] from None
        target.join()
    if errors:
        raise errors[0]
    return heard[1].events


def between_steps(patch: pytest.MonkeyPatch, hook: Callable[[int], None]) -> None:
    """Call `hook` in the drafter's thread with the number of each step before it begins."""
    begin = DrafterSession.begin_step

    def begin_step(session: DrafterSession, step: int) -> Any:
        hook(step)
        return begin(session, step)

    patch.setattr(DrafterSession, "begin_step", begin_step)


Slots = dict[int, tuple[Any, ...]]
"""By batch: checksum and finite flag of a slot's states, and its tokens."""


def slots_of_a_run(values: dict[str, Any], directory: Path, patch: pytest.MonkeyPatch) -> Slots:
    """Run both sides; returns what lay in each slot when its header was written."""
    slots: Slots = {}
    write = Ring.write_header

    def record(ring: Ring, pair: int, slot: int, header: SlotHeader) -> None:
        view = ring.view(pair, slot, header)
        states = int(checksum(view.states)) % (1 << 64)
        # The number that the target made from its layers' outputs is that of what lies in the slot.
        assert states == header.checksum % (1 << 64), f"batch {header.batch}"
        tokens = (view.input_ids, view.loss_mask, view.document_ids, view.position_ids)
        slots[header.batch] = (states, header.finite, *(each.tolist() for each in tokens))
        write(ring, pair, slot, header)

    with patch.context() as patched:
        patched.setattr(Ring, "write_header", record)
        events = run_both(values, directory)
    assert [each for each in events if isinstance(each, ev.AlarmRaised)] == []
    return slots
