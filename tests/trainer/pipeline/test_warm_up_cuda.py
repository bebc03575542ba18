"""Warm-up on a GPU: behind it nothing is tuned or compiled any more, and no step needs more memory than it did.

`pytest -m gpu tests/trainer/pipeline/test_warm_up_cuda.py` where there is a CUDA device; everywhere else these are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from races.in_process import Heard, planned, rank_of

from remote.protocol import events as ev
from trainer.pipeline import roles
from trainer.pipeline.layout import Role
from trainer.pipeline.post import take_post
from trainer.pipeline.session import DrafterSession
from trainer.pipeline.warm_up import memory_at_peak
from trainer.telemetry import PhaseLog

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),  # Kernels are tuned and compiled, once a shape.
]


def run_shared(values: dict[str, Any], directory: Path) -> list[ev.Event]:
    """Run both roles on the first GPU, in this process."""
    heard = Heard()
    with (
        planned(values | {"device": "cuda", "dtype": "bfloat16", "drafter_gpus": [0]}, directory) as plan,
        take_post(plan, rank_of(0), heard, PhaseLog(heard, role=Role.SHARED, rank=0)) as post,
    ):
        roles.run_drafter(post)
    return heard.events


def warmed(events: list[ev.Event], role: str) -> list[ev.WarmedUp]:
    return [each for each in events if isinstance(each, ev.WarmedUp) and each.role == role]


@pytest.mark.parametrize("attention", ["dense", "flex"])
def test_nothing_is_tuned_or_compiled_behind_it(
    tiny_values: dict[str, Any],
    make_target: Any,
    data_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
) -> None:
    from torch._dynamo.utils import counters
    from triton.runtime.autotuner import Autotuner

    tuned: list[str] = []
    bench, train = Autotuner._bench, roles.train
    compiled: list[int] = []

    def note(self: Any, *arguments: Any, **more: Any) -> Any:
        tuned.append(str(self))
        return bench(self, *arguments, **more)

    def watch(session: DrafterSession) -> Any:
        tuned.clear()
        compiled.append(counters["stats"]["unique_graphs"])
        result = train(session)
        compiled.append(counters["stats"]["unique_graphs"])
        return result

    monkeypatch.setattr(Autotuner, "_bench", note)
    monkeypatch.setattr(roles, "train", watch)
    # fla's kernels multiply tiles of 16 and more, and so does flex.
    target = make_target(
        "Qwen3_5ForCausalLM", tie_word_embeddings=False, head_dim=16, linear_key_head_dim=32, linear_value_head_dim=32
    )
    values = tiny_values | {"target_model": str(target), "attention_backend": attention, "held_out_dir": str(data_file)}
    events = run_shared(values | {"profile_interval": 0}, tmp_path)
    assert tuned == []
    assert compiled[0] == compiled[1]
    # Or nothing was counted.
    assert compiled[0] > 0 or attention == "dense"
    assert len(warmed(events, "target")) > 2
    assert any("held out" in each.shape for each in warmed(events, "drafter"))


@pytest.mark.parametrize("split", ["off", "on"])
def test_no_step_needs_more_memory_than_the_warm_up_did(
    tiny_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    device, train = torch.device("cuda:0"), roles.train
    peaks: list[int] = []

    def watch(session: DrafterSession) -> Any:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        result = train(session)
        peaks.append(memory_at_peak(device)[0])
        return result

    monkeypatch.setattr(roles, "train", watch)
    events = run_shared(tiny_values | {"split_fc": split, "attention_backend": "dense"}, tmp_path)
    told = [*warmed(events, "target"), *warmed(events, "drafter")]
    total = torch.cuda.get_device_properties(device).total_memory
    assert all(0 < each.peak_bytes < each.peak_bytes + each.free_bytes <= total for each in told)
    # Figures of steps on their way, and dense attention of rows with other documents than the one of their shape that was run.
    assert peaks[0] <= 1.05 * max(each.peak_bytes for each in told) + (1 << 20)


def test_the_room_left_counts_what_others_hold_and_a_cap() -> None:
    device = torch.device("cuda:0")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    peak, room = memory_at_peak(device)
    held = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    del held
    higher, less = memory_at_peak(device)
    assert higher - peak == 1 << 28
    # What the allocator keeps is to be had; at the peak it was not.
    assert abs(room - less - (1 << 28)) < 1 << 26
    total = torch.cuda.mem_get_info(device)[1]
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(0.25, device)
    try:
        assert memory_at_peak(device)[1] <= total // 4 - higher
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
