"""What a run reports of where its time went, through the whole pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from remote.protocol import events as ev
from trainer.pipeline.reporting import DRAFTER_WAITS, TARGET_WAITS
from trainer.telemetry import WORK_STAGES

TARGET = {"read", "target_forward", "pack", "wait_buffer", "publish"}
DRAFTER = {"wait_states", "blocks", "forward", "backward", "all_reduce", "optimizer"}
# So short an interval that a profile is due after every row and step.
EVERY_ROW = {"target_gpus": [0, 1], "drafter_gpus": [2, 3], "micro_batches_per_step": 4, "profile_interval": 1e-4}


def stages_of(run: Any, role: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for profile in run.events(ev.StageProfile):
        if profile.role == role:
            for name, seconds in profile.stages.items():
                found[name] = found.get(name, 0.0) + seconds
    return found


@pytest.mark.parametrize("transfer", ["async", "sync"])
def test_every_rank_says_where_its_time_went(trained: Callable[..., Any], transfer: str) -> None:
    run = trained(**EVERY_ROW, transfer=transfer)
    profiles = run.events(ev.StageProfile)
    assert {(each.rank, each.role) for each in profiles} == {
        (0, "target"), (1, "target"), (2, "drafter"), (3, "drafter"),
    }  # fmt: skip
    for each in profiles:
        # Whole and without overlap; what is missing lies between the stages.
        assert sum(each.stages.values()) <= each.interval + 1e-6
        assert 0 <= each.busy <= 1
        assert (each.mfu, each.memory_total) == (0, 0)  # Of a CPU nothing is known.
    assert TARGET | ({"wait_slot"} if transfer == "sync" else set()) <= stages_of(run, "target").keys()
    assert stages_of(run, "drafter").keys() >= DRAFTER
    assert sum(each.copy_out for each in profiles if each.role == "target") > 0
    assert sum(each.copy_in for each in profiles if each.role == "drafter") > 0
    assert any(each.flops_per_second > 0 and each.tokens > 0 for each in profiles if each.role == "target")
    assert any(each.flops_per_second > 0 and each.tokens > 0 for each in profiles if each.role == "drafter")
    together = run.events(ev.PipelineProfile)
    assert together
    assert all(0 <= each.target_wait <= 1 and 0 <= each.drafter_wait <= 1 for each in together)


def test_loading_is_no_part_of_the_first_profile(trained: Callable[..., Any]) -> None:
    run = trained(**EVERY_ROW, transfer="async")
    began = min(each.time for each in run.events(ev.Phase) if each.phase == "training")
    for each in run.events(ev.StageProfile):
        assert each.time - each.interval >= began - 0.05


def test_shared_ranks_have_the_stages_of_both_roles(trained: Callable[..., Any]) -> None:
    run = trained(target_gpus=[0], drafter_gpus=[0])
    assert {"read", "target_forward", "pack", "blocks", "forward", "backward", "optimizer"} <= stages_of(
        run, "shared"
    ).keys()
    assert not {"wait_states", "wait_buffer"} & stages_of(run, "shared").keys()


def test_no_profile_where_none_is_wanted(trained: Callable[..., Any]) -> None:
    run = trained(profile_interval=0)
    assert run.events(ev.StageProfile) == run.events(ev.PipelineProfile) == []


def test_no_stage_is_work_and_a_wait() -> None:
    assert not WORK_STAGES & {*TARGET_WAITS, *DRAFTER_WAITS}
