"""A run's attention, from the choice to the trained weights: with both roles in this process, and the kernel written out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mutation.drafter_checks import written_kernel
from races.in_process import Heard
from torch._inductor.exc import InductorError

from remote.protocol import events as ev
from remote.protocol.errors import DflashError
from remote.protocol.layout import RunLayout, new_run_id
from trainer.config import TrainConfig
from trainer.drafter.attention_choice import DENSE, Backend, Choice
from trainer.drafter.blocks import Blocks
from trainer.drafter.flex import FlexAttention
from trainer.pipeline import leader, roles
from trainer.pipeline.layout import Role
from trainer.pipeline.post import take_post
from trainer.pipeline.session import DrafterSession
from trainer.pipeline.world import World
from trainer.telemetry import PhaseLog
from trainer.train import train

STEPS = 2
KEYS = {
    "drafter_gpus": [0], "max_steps": STEPS, "attention": "mixed", "sliding_window": 6, "noise_std": 0.1, "objective": "dpace",
}  # fmt: skip


class Log(Heard):
    """Telemetry that keeps what is said."""

    @property
    def messages(self) -> list[tuple[str, str]]:
        return [(each.level, each.text) for each in self.events if isinstance(each, ev.Message)]


@pytest.fixture
def session_with(
    tiny_values: dict[str, Any], tmp_path: Path
) -> Callable[[Choice], contextlib.AbstractContextManager[tuple[DrafterSession, Log]]]:
    """Return session_with(choice): a rank that is target and drafter and has found this of flex."""

    @contextlib.contextmanager
    def begin(choice: Choice) -> Iterator[tuple[DrafterSession, Log]]:
        layout = RunLayout(tmp_path / new_run_id())
        layout.create()
        layout.run_lock.touch()
        plan = leader.prepare(TrainConfig.from_mapping(tiny_values | KEYS), layout)
        world = World(rank=0, local_rank=0, machine=0, machines=1, drafters=None, drafter_count=1)
        log = Log()
        try:
            with take_post(plan, world, log, PhaseLog(log, role=Role.SHARED, rank=0)) as post:
                producer = roles.load_producer(post)
                *built, found = roles.build_drafter(post, None)
                # On a CPU nothing is tried and nothing said.
                assert found == Choice(DENSE)
                session = roles.make_session(post, producer, *built, choice)
                session.checkpoint_due = lambda step: False  # type: ignore[method-assign]
                yield session, log
        finally:
            plan.forget_names()

    return begin


class Watched:
    """The flex backend with its kernel written out; keeps the numbers of block rows that it met."""

    def __init__(self, fails_at: int = 10**9) -> None:
        self.rows: list[int] = []
        self.blocks: list[int] = []
        self._fails_at = fails_at

    def __call__(self, blocks: Blocks) -> FlexAttention:
        self.rows.append(len(blocks.positions))
        self.blocks.append(blocks.count)
        if len(self.rows) == self._fails_at:
            raise InductorError(RuntimeError("out of resource: shared memory"), None)
        return FlexAttention(blocks, written_kernel)


def weights(session: DrafterSession) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in session.drafter.parameters()])


def test_a_run_trains_to_the_same_weights_with_either(session_with: Any) -> None:
    flex = Watched()
    trained = []
    for choice in (Choice(DENSE), Choice(Backend("flex", flex, 8))):
        with session_with(choice) as (session, log):
            before = weights(session)
            train(session)
            assert session.step == STEPS
            trained.append(weights(session))
            assert log.messages == []
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=1e-10)
    assert (trained[0] - before).abs().max() > 1e-3
    # 24 anchors a row in eight buckets: three blocks each.
    assert len(flex.rows) == 3 * STEPS
    assert all(rows % 3 == 0 and rows - 3 < blocks <= rows for rows, blocks in zip(flex.rows, flex.blocks, strict=True))


def test_why_it_is_dense_is_in_the_log(session_with: Any) -> None:
    with session_with(Choice(DENSE, "RuntimeError: no kernel image")) as (session, log):
        assert session.backend is DENSE
    assert log.messages == [("warning", "all drafters attend with dense; flex on cpu: RuntimeError: no kernel image")]


def test_a_failure_in_mid_run_ends_it_with_the_setting_to_change(session_with: Any) -> None:
    with session_with(Choice(Backend("flex", Watched(fails_at=5), 8))) as (session, _):
        with pytest.raises(DflashError, match="flex attention failed") as caught:
            train(session)
        assert session.step == 2
    assert "out of resource" in caught.value.cause
    assert caught.value.hint == "resume from the last checkpoint with --attention-backend dense"
