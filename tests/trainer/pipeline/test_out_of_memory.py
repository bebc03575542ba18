"""Out of memory is told by phase, GPU and shape, with the setting that helps there, whatever shape the error comes in."""

from __future__ import annotations

import dataclasses
import errno
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import random_target
from benchmarks.memory import measure, tiny_run
from remote.agent.verdict import Ending, Story, judge
from remote.protocol.errors import DflashError
from remote.protocol.records import RankError, read_record
from trainer.config import TrainConfig
from trainer.drafter.attention_choice import flex_failures
from trainer.pipeline.copier import CudaCopier
from trainer.pipeline.membership import is_consequence
from trainer.pipeline.memory import cap
from trainer.pipeline.out_of_memory import OutOfMemory, Scene, at_shape, classified
from trainer.pipeline.ring import Ring
from trainer.target.staging import host_buffer
from trainer.upload import upload

# As torch 2.11 says it, on a GPU that others use as well.
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 2 has a total capacity of 139.80 GiB of which 1.10 GiB is free. "
    "Process 4711 has 38.20 GiB memory in use. Including non-PyTorch memory, this process has 100.50 GiB memory in use. "
    "Of the allocated memory 97.00 GiB is allocated by PyTorch, and 2.00 GiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)
ALONE = MESSAGE.replace("100.50 GiB memory", "138.50 GiB memory")
CAPPED = ALONE.replace("Of the", "94.00 GiB allowed; Of the")
TARGET = Scene("target 2", "target", "cuda:2", "warmup", "target", "target_forward")
DRAFTER = Scene("drafter 0", "drafter", "cuda:5", "training", "", "backward")


def out_of_memory(text: str = ALONE) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(text)


def raised(error: BaseException) -> BaseException:
    """Return an error with a traceback."""
    try:
        raise error
    except BaseException as same:
        return same


def told(error: BaseException, scene: Scene = TARGET, **keys: Any) -> OutOfMemory:
    values = {"target_gpus": (0, 1, 2), "drafter_gpus": (5,), **keys}
    found = classified(error, scene, TrainConfig.from_mapping(values))
    assert isinstance(found, OutOfMemory), found
    return found


def test_an_error_names_gpu_rank_phase_shape_and_shares() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught, at_shape("8 x 512 tokens"):
        raise out_of_memory(MESSAGE)
    error = told(caught.value)
    assert error.error == "out of memory on GPU 2 (target 2) in warm-up"
    assert error.cause == (
        "target_forward of 8 x 512 tokens; 2.5 GiB asked for; 100.5 GiB in use by this process, 38.2 GiB by others, "
        "1.1 GiB free of 139.8 GiB"
    )
    assert error.hint.startswith(
        "end the other processes on this GPU (38.2 GiB), or name another with --target-gpus; or"
    )
    assert "test_out_of_memory.py" in error.detail
    assert "Tried to allocate 2.50 GiB" in error.detail
    assert int(error.code) == 1


def test_a_cap_is_named_and_the_innermost_shape_counts() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught, at_shape("outer"), at_shape("inner"):
        raise out_of_memory(CAPPED)
    error = told(caught.value, gpu_memory_gib=94)
    assert "of inner;" in error.cause
    assert error.cause.endswith(
        "138.5 GiB in use by this process, 0.2 GiB by others, 1.1 GiB free of 139.8 GiB, 94.0 GiB allowed"
    )
    assert error.hint.startswith("raise --gpu-memory-gib, now 94; or lower --token-budget")


def test_without_the_processes_figure_what_torch_holds_is_ours() -> None:
    text = ALONE.replace("Including non-PyTorch memory, this process has 138.50 GiB memory in use. ", "")
    assert "99.0 GiB in use by this process, 39.7 GiB by others" in told(out_of_memory(text)).cause
    # As drivers say it that do not know.
    text = ALONE.replace("138.50 GiB memory", "17179869184.00 GiB memory")
    assert "99.0 GiB in use by this process, 39.7 GiB by others" in told(out_of_memory(text)).cause


HINTS = {
    "target warms up": (TARGET, {}, ["lower --token-budget and --max-length, both 4096 now"]),
    "target with short documents": (TARGET, {"max_length": 512}, ["lower --token-budget, now 4096"]),
    "target in float32": (TARGET, {"dtype": "float32"}, ["lower --token-budget", "use --dtype bfloat16"]),
    "target that teaches": (TARGET, {"kl_weight": 0.5}, ["lower --token-budget", "use --kl-weight 0"]),
    "target loads": (
        dataclasses.replace(TARGET, phase="loading", stage=""),
        {},
        ["name a larger GPU with --target-gpus", "capture earlier layers with --target-layer-ids"],
    ),
    "drafter trains": (
        DRAFTER,
        {},
        [
            "lower --objective-rows, now 2048",
            "lower --row-anchors and --num-anchors, now 512 and 512",
            "lower --token-budget",
        ],
    ),
    "drafter attends densely": (
        DRAFTER,
        {"attention_backend": "dense"},
        ["use --attention-backend auto", "lower --objective-rows", "lower --row-anchors"],
    ),
    "drafter learns from logits": (
        DRAFTER,
        {"kl_weight": 0.5},
        [
            "lower --objective-rows, now 2048, whose logits exist three times",
            "lower --row-anchors",
            "lower --token-budget",
        ],
    ),
    "drafter with few logits": (
        DRAFTER,
        {"objective_rows": 16, "split_fc": "on"},
        ["lower --row-anchors", "use --split-fc off", "lower --token-budget"],
    ),
    "drafter loads": (
        dataclasses.replace(DRAFTER, phase="loading", stage=""),
        {},
        ["lower --drafter-layers, now 5", "name a larger GPU with --drafter-gpus"],
    ),
    "optimizer": (dataclasses.replace(DRAFTER, stage="optimizer"), {}, ["lower --drafter-layers", "name a larger GPU"]),
    "shared, the target's forward": (
        Scene("shared 0", "shared", "cuda:0", "training", "", "target_forward"),
        {"target_gpus": (0,), "drafter_gpus": (0,)},
        ["lower --token-budget", "give target and drafter GPUs of their own"],
    ),
    "shared, the drafter loads": (
        Scene("shared 0", "shared", "cuda:0", "loading", "drafter on cuda:0", ""),
        {"target_gpus": (0,), "drafter_gpus": (0,)},
        [
            "lower --drafter-layers",
            "name a larger GPU with --drafter-gpus",
            "give target and drafter GPUs of their own",
        ],
    ),
}


@pytest.mark.parametrize("case", HINTS)
def test_the_hint_is_the_setting_that_helps_there(case: str) -> None:
    scene, keys, begins = HINTS[case]
    hints = told(out_of_memory(), scene, **keys).hint.split("; or ")
    assert len(hints) == len(begins), hints
    for hint, begin in zip(hints, begins, strict=True):
        assert hint.startswith(begin)


@pytest.mark.parametrize("case", HINTS)
def test_every_setting_in_a_hint_exists(case: str) -> None:
    scene, keys, _ = HINTS[case]
    known = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(TrainConfig)}
    flags = {
        word.strip(",.:;()") for word in told(out_of_memory(), scene, **keys).hint.split() if word.startswith("--")
    }
    assert flags <= known


def wrapped(culprit: BaseException, error: BaseException) -> BaseException:
    error.__cause__ = raised(culprit)
    return raised(error)


class DistBackendError(RuntimeError):
    """Named as torch's, whose base is DistError."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        DistBackendError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
        wrapped(out_of_memory(), ValueError("the autotuner found no configuration")),
    ],
    ids=lambda error: str(error).partition("\n")[0],
)
def test_errors_of_the_driver_and_its_libraries_are_known(error: BaseException) -> None:
    found = told(raised(error))
    assert found.error == "out of memory on GPU 2 (target 2) in warm-up"
    assert not is_consequence(found)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
                     "allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"),
        RuntimeError("cudaHostRegister of 4294967296 bytes failed with status 2"),
    ],
    ids=lambda error: str(error)[:40],
)  # fmt: skip
def test_the_hosts_memory_is_not_the_gpus(error: BaseException) -> None:
    found = told(raised(error))
    assert found.error == "out of memory on the host (target 2) in warm-up"
    assert found.hint.startswith("lower --ring-mib, now 4096; or raise the container's memory limit")
    assert ("4.0 GiB asked for" in found.cause) == ("allocate 42" in str(error))


@pytest.mark.parametrize(
    "pins", [upload, host_buffer, CudaCopier.landing, Ring.register_with_cuda, torch.Tensor.pin_memory]
)
def test_the_drivers_refusal_to_pin_is_the_hosts(pins: Callable[..., Any]) -> None:
    """By the name of the innermost frame: what refuses is in C and has none."""
    place: dict[str, Any] = {}
    exec(f"def {pins.__name__}():\n    raise RuntimeError('CUDA error: out of memory')\n", place)
    with pytest.raises(RuntimeError) as caught:
        place[pins.__name__]()
    assert told(caught.value).error == "out of memory on the host (target 2) in warm-up"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA error: out of memory"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("out of resource: shared memory, Required: 114688, Hardware limit: 101376"),
        OSError(errno.ENOSPC, "No space left on device"),
        DflashError("step 3 is not finite"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_anything_else_stays_what_it_is(error: BaseException) -> None:
    assert classified(raised(error), TARGET, TrainConfig()) is error


def test_what_flex_wraps_and_what_a_thread_raised_is_found() -> None:
    class InductorError(RuntimeError):
        __module__ = "torch._inductor.exc"

    with pytest.raises(DflashError, match="flex attention failed") as caught, flex_failures():
        raise InductorError("no choice left") from out_of_memory()
    assert told(caught.value, DRAFTER).error == "out of memory on GPU 2 (drafter 0) in training"

    kept: list[BaseException] = []

    def work() -> None:
        try:
            raise out_of_memory()
        except torch.OutOfMemoryError as error:
            kept.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "in work\n" in told(raised(kept[0])).detail


def test_tuning_is_told_by_the_stack() -> None:
    place = {"run_out": out_of_memory}
    source = "def _bench():\n    raise run_out()\n\ndef run():\n    raise run_out()\n"
    exec(compile(source, "/somewhere/site-packages/triton/runtime/autotuner.py", "exec"), place)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        place["_bench"]()  # type: ignore[operator]
    assert "target_forward; in Triton's autotuning; 2.5 GiB asked for" in told(caught.value).cause
    # A kernel that was tuned before is launched through the same file.
    with pytest.raises(torch.OutOfMemoryError) as caught:
        place["run"]()  # type: ignore[operator]
    assert "target_forward; 2.5 GiB asked for" in told(caught.value).cause


def test_an_error_that_names_itself_is_followed_once() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert classified(first, TARGET, TrainConfig()) is first


SEAMS = {
    "target": (0, "trainer.target.capture:Target.capture", 3, "target_forward", "--token-budget"),
    "drafter": (1, "trainer.pipeline.session:drafter_forward", 4, "forward", "--objective-rows"),
    "loading": (0, "trainer.pipeline.roles:load_target", 1, "", "name a smaller target"),
}


@pytest.mark.parametrize("seam", SEAMS)
def test_a_run_says_it_in_its_record_its_log_and_its_end(
    start: Callable[..., Any], finish: Callable[[Any], Any], seam: str
) -> None:
    rank, where, call, stage, setting = SEAMS[seam]
    run = finish(start({rank: {"what": "run out of memory", "where": where, "call": call}}))
    record = run.error(rank)
    assert record.kind == "OutOfMemory"
    assert record.phase == ("loading" if seam == "loading" else record.phase)
    place = f"{record.role} 0) in {'warm-up' if record.phase == 'warmup' else record.phase}"
    assert record.message == f"out of memory on the host ({place}"
    assert "2.5 GiB asked for" in record.cause
    assert record.cause.startswith(f"{stage} of " if stage else "target ")
    assert not stage or "tokens" in record.cause
    assert setting in record.hint
    assert "torch.OutOfMemoryError: CUDA out of memory" in record.traceback
    assert run.codes[rank] == 1
    assert f"error: {record.message}" in run.log
    assert record.hint in run.log
    ended = judge(run.layout, Story(), Ending(by="trainer", returncode=1))
    assert (ended.failed_rank, ended.message) == (rank, f"{record.message} ({record.cause})")


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class TestOnGpu:
    pytestmark = gpu

    def test_torchs_own_message_is_understood(self) -> None:
        device = torch.device("cuda:0")
        torch.cuda.empty_cache()
        cap(device, 2)
        # Without NVML what torch holds is all that is known of this process.
        held = torch.empty(1 << 27, dtype=torch.uint8, device=device)
        try:
            with pytest.raises(torch.OutOfMemoryError) as caught, at_shape("8 x 512 tokens"):
                torch.empty(3 << 30, dtype=torch.uint8, device=device)
        finally:
            del held
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        found = told(caught.value, dataclasses.replace(TARGET, device="cuda:0"), gpu_memory_gib=2)
        assert found.error == "out of memory on GPU 0 (target 2) in warm-up"
        assert "of 8 x 512 tokens; 3.0 GiB asked for" in found.cause
        assert re.search(r"in use by this process, .* by others, .* free of .*, 2.0 GiB allowed$", found.cause)
        assert "raise --gpu-memory-gib, now 2" in found.hint

    @pytest.mark.timeout(400)
    def test_a_run_that_goes_beyond_its_cap_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # 1,920 blocks of 8 rows a row of documents, with the logits of all at once: 2 GiB and their gradients.
        monkeypatch.setitem(random_target.SHAPES, "toy", random_target.TOY | {"vocab_size": 32768})
        values = tiny_run(tmp_path, "cuda", 20) | {
            "target_gpus": [0], "drafter_gpus": [0], "gpu_memory_gib": 1.0, "attention_backend": "dense", "token_budget": 8192,
            "num_anchors": 64, "row_anchors": 2048, "objective_rows": 16384, "micro_batches_per_step": 1, "epochs": 9,
        }  # fmt: skip
        with pytest.raises(RuntimeError, match=r"error: out of memory on GPU 0 \(shared 0\) in (warm-up|training)"):
            measure(values, tmp_path, (10,))
        (directory,) = (each.parent.parent for each in tmp_path.glob("*/errors/rank-0.json"))
        record = read_record(RankError, directory / "errors" / "rank-0.json")
        assert record is not None
        assert record.kind == "OutOfMemory"
        assert "block rows" in record.cause
        assert "1.0 GiB allowed" in record.cause
        assert "raise --gpu-memory-gib, now 1" in record.hint
        assert "lower --objective-rows, now 16384" in record.hint
        assert "OutOfMemoryError" in record.traceback
