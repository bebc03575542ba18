"""What a role needs of a GPU is known before the launch, to the byte for what lies there at rest."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remote.protocol.errors import DflashError, ExitCode
from trainer import gpus, preflight
from trainer.config import TrainConfig
from trainer.drafter.fresh import fresh_drafter
from trainer.gpus import GIB, drafter_bytes, target_bytes
from trainer.optimizer import StepOptimizer
from trainer.pipeline.memory import cap
from trainer.preflight import check_memory, drafter_config, parameter_count, row_states_bytes
from trainer.target.ends import load_ends
from trainer.target.facts import target_facts
from trainer.target.load import load_target

MakeTarget = Callable[..., Path]


def size_of(*tensors: torch.Tensor) -> int:
    return sum(each.numel() * each.element_size() for each in {each.data_ptr(): each for each in tensors}.values())


def config_of(model: Path, **keys: Any) -> TrainConfig:
    values = {
        "target_model": str(model),
        "mask_token_id": 3,
        "block_size": 4,
        "drafter_layers": 2,
        "captured_layers": 2,
    }
    return TrainConfig.from_mapping(values | keys)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3_5ForConditionalGeneration"])
@pytest.mark.parametrize(("dtype", "item"), [(torch.bfloat16, 2), (torch.float64, 8)])
def test_a_targets_bytes_are_those_that_it_takes(
    make_target: MakeTarget, architecture: str, dtype: torch.dtype, item: int
) -> None:
    model = make_target(architecture)
    target = load_target(model, dtype=dtype, device="cpu", target_layer_ids=(0, 3))
    assert target_bytes(target_facts(model), 3, item) == size_of(*target.stack.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 2), ("float64", 8)])
def test_a_drafters_bytes_are_those_that_it_takes(make_target: MakeTarget, dtype: str, item: int, tied: bool) -> None:
    config = config_of(make_target(tie_word_embeddings=tied), dtype=dtype)
    facts = target_facts(config.target_model)
    drafter = fresh_drafter(config).to(torch.float64 if item == 8 else torch.float32)
    optimizer = StepOptimizer(drafter, config, 10)
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    one = torch.ones(())
    optimizer.apply(1, loss_sum=one, weight_sum=one, drafters=1)
    moments = [each for each in optimizer.state_dict().values() if each.dim()]
    gradients = [each.grad for each in drafter.parameters() if each.grad is not None]
    ends = load_ends(config.target_model, getattr(torch, dtype), "cpu")
    taken = size_of(*drafter.parameters(), *gradients, *moments, *ends)
    parameters = parameter_count(drafter_config(config, facts))
    assert drafter_bytes(parameters, facts, item, whole_head=True) == taken
    assert drafter_bytes(parameters, facts, item, whole_head=False) == taken - (0 if tied else size_of(ends[1]))


def needs(config: TrainConfig) -> tuple[int, int]:
    """Return the least sizes of a target's and a drafter's GPU."""
    facts = target_facts(config.target_model)
    drafter = drafter_config(config, facts)
    last_layer = facts.num_layers - 1 if config.distils else max(drafter.target_layer_ids)
    states = row_states_bytes(config, drafter) * (1 if config.shared_roles or config.transfer == "sync" else 2)
    return (
        target_bytes(facts, last_layer, 2) + states,
        drafter_bytes(parameter_count(drafter), facts, 2, whole_head=True) + states,
    )


def judge(config: TrainConfig, sizes: list[int]) -> None:
    facts = target_facts(config.target_model)
    check_memory(config, facts, drafter_config(config, facts), sizes)


@pytest.mark.parametrize("keys", [{}, {"transfer": "sync"}, {"kl_weight": 0.5}])
def test_what_cannot_fit_is_refused_and_what_just_fits_is_not(make_target: MakeTarget, keys: dict[str, Any]) -> None:
    config = config_of(make_target(), target_gpus=(1,), drafter_gpus=(0,), **keys)
    target, drafter = needs(config)
    judge(config, [drafter, target])
    with pytest.raises(DflashError, match="GPU 1 is too small for the target") as caught:
        judge(config, [drafter, target - 1])
    assert caught.value.code is ExitCode.PREFLIGHT
    assert "--target-layer-ids" in caught.value.hint
    with pytest.raises(DflashError, match="GPU 0 is too small for the drafter") as caught:
        judge(config, [drafter - 1, target])
    assert "are needed before the first step; it has" in caught.value.cause
    assert caught.value.hint == "name a larger one with --drafter-gpus, or lower --drafter-layers"


def test_shared_roles_need_both_and_the_cap_counts(make_target: MakeTarget) -> None:
    config = config_of(make_target(), target_gpus=(0,), drafter_gpus=(0,))
    target, drafter = needs(config)
    both = target + drafter - row_states_bytes(config, drafter_config(config, target_facts(config.target_model)))
    judge(config, [both])
    with pytest.raises(DflashError, match="GPU 0 is too small for the target and the drafter") as caught:
        judge(config, [both - 1])
    assert caught.value.hint.endswith("or give target and drafter GPUs of their own")
    capped = dataclasses.replace(config, gpu_memory_gib=(both - 1) / GIB)
    with pytest.raises(DflashError, match="too small") as caught:
        judge(capped, [80 * GIB])
    assert "gpu_memory_gib allows" in caught.value.cause
    judge(dataclasses.replace(config, gpu_memory_gib=both / GIB), [80 * GIB])


def test_a_cap_above_the_gpu_is_refused(make_target: MakeTarget) -> None:
    config = config_of(make_target(), gpu_memory_gib=94)
    with pytest.raises(DflashError, match="gpu_memory_gib = 94 is more than GPU 1 has") as caught:
        judge(config, [96 * GIB, 80 * GIB])
    assert (caught.value.cause, caught.value.code) == ("it has 80.0 GiB", ExitCode.PREFLIGHT)
    # Not known, and no GPU at all: nothing to judge by.
    judge(config, [96 * GIB, 0])
    judge(config, [])
    judge(dataclasses.replace(config, device="cpu"), [1, 1])
    cap(torch.device("cpu"), 94)


def test_the_preflight_looks_at_the_gpus(
    make_target: MakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"input_ids": [5, 6, 7, 8, 9], "prompt_len": 1}\n' * 9)
    config = dataclasses.replace(config_of(make_target(), micro_batches_per_step=1), data_dir=str(data))
    monkeypatch.setattr(preflight, "gpu_sizes", lambda: [1000, 80 * GIB])
    with pytest.raises(DflashError, match="GPU 0 is too small for the target"):
        preflight.preflight(config, None)
    assert preflight.preflight(config, None, devices=False).total_steps > 0


class Driver:
    """CUDA's driver with two GPUs, the second of which does not tell its size."""

    def cuInit(self, flags: int) -> int:
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 40 + ordinal
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: ctypes.c_int) -> int:
        size._obj.value = 96 * GIB
        return 0 if device.value == 40 else 101


def test_the_driver_tells_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: Driver())
    assert gpus.gpu_sizes() == [96 * GIB, 0]
    assert preflight.visible_gpus() == 2
    monkeypatch.setattr(Driver, "cuInit", lambda self, flags: 100)  # CUDA_ERROR_NO_DEVICE
    assert gpus.gpu_sizes() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_driver_and_torch_agree_and_a_cap_holds() -> None:
    device = torch.device("cuda:0")
    total = torch.cuda.get_device_properties(device).total_memory
    # torch may leave out what the driver keeps for itself.
    assert abs(gpus.gpu_sizes()[0] - total) < GIB
    with pytest.raises(DflashError, match="more than GPU 0 has"):
        cap(device, total / GIB + 1)
    torch.cuda.empty_cache()
    try:
        cap(device, 2)
        torch.empty(GIB, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError, match="allowed"):
            torch.empty(2 * GIB + (64 << 20), dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()
