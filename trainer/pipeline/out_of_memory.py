"""Running out of memory, told so that a person can act: where, in which phase, at which shape, and which setting helps. Torch-free.

A rank may run out of memory before torch is imported, or through an error that torch, Triton or NCCL wrapped in their own;
so errors are known by class name, text and chain.
"""

from __future__ import annotations

import contextlib
import errno
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from remote.protocol.errors import DflashError
from trainer.config import TrainConfig
from trainer.pipeline.layout import Role

GIB = 1 << 30

# Others' share below this is their CUDA contexts, and what our own context and NCCL take outside of torch.
_OTHERS = GIB
_SHAPE = "shape: "

# RuntimeErrors of the driver and its libraries. Not "out of resource": a kernel that wants more shared memory a block.
_DEVICE = re.compile(
    r"CUDA (driver )?error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|Triton Error \[CUDA\]: out of "
    r"memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|Cuda failure (\d+ )?'out of memory'"
)
# Status 2 is cudaErrorMemoryAllocation.
_HOST = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|cudaHostRegister .*status 2\b")
# A driver says the same of its host memory; who asked for it shows in the stack.
_PINNING = ("pin_memory", "landing", "upload", "host_buffer", "register_with_cuda")
# Launches of what is tuned already go through the same files, by other functions.
_TUNERS = ("triton/runtime/autotuner.py", "triton/testing.py", "_inductor/runtime/triton_heuristics.py")
_TUNING = ("_bench", "bench", "benchmark", "do_bench", "do_bench_cudagraph", "benchmark_all_configs")

_TARGET_STAGES = ("read", "target_forward", "pack", "publish")


class OutOfMemory(DflashError):
    """A GPU or the host has no memory left for what a rank needs; `detail` is the original traceback."""


@contextlib.contextmanager
def at_shape(shape: str) -> Iterator[None]:
    """Note the shape on whatever is raised in the block: it stands in the traceback, and `classified` tells of it."""
    try:
        yield
    except Exception as error:
        error.add_note(_SHAPE + shape)
        raise


@dataclass(frozen=True)
class Scene:
    """Where a rank was: its name ('target 2'), role, device, phase and what that was about, and the stage."""

    name: str
    role: str
    device: str
    phase: str
    about: str
    stage: str

    @property
    def side(self) -> Role:
        """Whose work it was: with shared roles the stage tells, outside of all stages what the phase is about."""
        if self.role != Role.SHARED:
            return Role(self.role)
        targets = self.stage in _TARGET_STAGES or (not self.stage and self.about.startswith("target"))
        return Role.TARGET if targets else Role.DRAFTER


@dataclass(frozen=True)
class Memory:
    """A GPU's memory in bytes, 0 where it is not known. `ours`: of this process; `allowed`: its cap."""

    total: int = 0
    free: int = 0
    ours: int = 0
    allowed: int = 0

    @property
    def others(self) -> int:
        """What other processes hold."""
        return max(0, self.total - self.free - self.ours) if self.total and self.ours else 0


def classified(error: BaseException, scene: Scene, config: TrainConfig) -> BaseException:
    """Return the OutOfMemory that an error amounts to, by itself or by what it arose from; any other as it is."""
    for each in _chain(error):
        host = _is_host(each)
        if host or _is_device(each):
            return _told(error, each, host, scene, config)
    return error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_device(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return "OutOfMemoryError" in names or (isinstance(error, RuntimeError) and bool(_DEVICE.search(str(error))))


def _is_host(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if not isinstance(error, RuntimeError) or type(error).__name__ == "OutOfMemoryError":
        return False
    if _HOST.search(str(error)):
        return True
    # The innermost frame: what merely calls `upload` may as well have run out on the device.
    frames = traceback.extract_tb(error.__traceback__)
    return bool(_DEVICE.search(str(error))) and bool(frames) and frames[-1].name in _PINNING


def _told(error: BaseException, culprit: BaseException, host: bool, scene: Scene, config: TrainConfig) -> OutOfMemory:
    on_gpu = scene.device.startswith("cuda") and not host
    memory = _memory(str(culprit), scene.device) if on_gpu else Memory()
    number = re.search(r"GPU (\d+) has a total", str(culprit))
    gpu = number[1] if number else scene.device.removeprefix("cuda:")
    where = f"on GPU {gpu} ({scene.name})" if on_gpu else f"on the host ({scene.name})"
    phase = "warm-up" if scene.phase == "warmup" else scene.phase
    return OutOfMemory(
        f"out of memory {where} in {phase}",
        cause=_cause(error, culprit, scene, memory),
        hint="; or ".join(_hints(scene, config, memory, on_gpu=on_gpu)),
        detail="".join(traceback.format_exception(error)),
    )


def _cause(error: BaseException, culprit: BaseException, scene: Scene, memory: Memory) -> str:
    text = str(culprit)
    shapes = [note.removeprefix(_SHAPE) for each in _chain(error) for note in getattr(each, "__notes__", ())]
    doing = " of ".join(filter(None, [scene.stage or scene.about, shapes[0] if shapes else ""]))
    frames = [frame for each in _chain(error) for frame in traceback.extract_tb(each.__traceback__)]
    tunes = any(frame.filename.endswith(_TUNERS) and frame.name in _TUNING for frame in frames)
    tuning = "in Triton's autotuning" if tunes else ""
    asked = _quantity(r"(?:Tried|tried) to allocate ([\d.]+) (\w+)", text)
    parts = [doing, tuning, f"{_size(asked)} asked for" if asked else "", _use(memory)]
    if not asked and not memory.total:
        parts.append(text.strip().partition("\n")[0] or type(culprit).__name__)
    return "; ".join(filter(None, parts))


def _use(memory: Memory) -> str:
    if not memory.total:
        return ""
    shares = [f"{_size(memory.ours)} in use by this process", f"{_size(memory.others)} by others"]
    cap = f", {_size(memory.allowed)} allowed" if 0 < memory.allowed < memory.total else ""
    return (
        f"{', '.join(shares if memory.ours else [])}, {_size(memory.free)} free of {_size(memory.total)}{cap}".lstrip(
            ", "
        )
    )


def _quantity(pattern: str, text: str) -> int:
    """Return the bytes that torch's message tells, 0 where it does not: '2.50 GiB', '512 bytes'."""
    units = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}
    found = re.search(pattern, text)
    return int(float(found[1]) * units.get(found[2], 0)) if found else 0


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.1f} MiB"


def _memory(text: str, device: str) -> Memory:
    """Return what torch's message says of the moment of failure, else what torch and the driver say now."""
    total = _quantity(r"total capacity of ([\d.]+) (\w+)", text)
    if not total:
        return _memory_now(device)
    ours = _quantity(r"this process has ([\d.]+) (\w+) memory in use", text)
    if (
        not 0 < ours <= total
    ):  # No NVML, a driver that does not tell it, or process numbers of a container unknown to it.
        ours = _quantity(r"([\d.]+) (\w+) is allocated by PyTorch", text)
        ours += _quantity(r"([\d.]+) (\w+) is reserved by PyTorch but", text)
    free = _quantity(r"of which ([\d.]+) (\w+) is free", text)
    return Memory(total, free, ours, _quantity(r"([\d.]+) (\w+) allowed", text))


def _memory_now(device: str) -> Memory:
    # Only a rank that has torch can have run out of a GPU's memory, and importing it here would take memory and seconds.
    torch = sys.modules.get("torch")
    if torch is None:
        return Memory()
    try:
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free, torch.cuda.memory_reserved(device))
    except (
        RuntimeError,
        AssertionError,
    ):  # The driver may be out of order by now; an AssertionError: a CPU build of torch.
        return Memory()


_MOST_HINTS, _MOST_SETTINGS = 4, 3


def _hints(scene: Scene, config: TrainConfig, memory: Memory, *, on_gpu: bool) -> list[str]:
    found: list[str] = []
    own_flag = "--target-gpus" if scene.side is Role.TARGET else "--drafter-gpus"
    if memory.others >= _OTHERS:
        found.append(f"end the other processes on this GPU ({_size(memory.others)}), or name another with {own_flag}")
    if on_gpu and 0 < memory.allowed < memory.total:
        found.append(f"raise --gpu-memory-gib, now {config.gpu_memory_gib:g}")
    if scene.device.startswith("cuda") and not on_gpu:
        found += _host_hints(config)
    else:
        settings = _target_hints(scene, config) if scene.side is Role.TARGET else _drafter_hints(scene, config)
        found += settings[:_MOST_SETTINGS]
    if on_gpu and config.shared_roles:
        place = min(len(found), _MOST_HINTS - 1)
        found.insert(place, "give target and drafter GPUs of their own instead of shared roles")
    return found[:_MOST_HINTS]


def _host_hints(config: TrainConfig) -> list[str]:
    limits = "raise the container's memory limit, and the limit of locked memory (ulimit -l)"
    return [limits] if config.shared_roles else [f"lower --ring-mib, now {config.ring_mib}", limits]


def _fewer_tokens(config: TrainConfig) -> str:
    if config.max_length == config.token_budget:  # A document has to fit the budget.
        return f"lower --token-budget and --max-length, both {config.token_budget} now"
    return f"lower --token-budget, now {config.token_budget}"


def _target_hints(scene: Scene, config: TrainConfig) -> list[str]:
    found = [] if scene.phase == "loading" else [_fewer_tokens(config)]
    if config.dtype != "bfloat16":
        found.append("use --dtype bfloat16")
    if config.distils:
        found.append("use --kl-weight 0, which leaves out the layers behind the last captured one")
    if scene.phase == "loading":
        found.append("name a larger GPU with --target-gpus" if scene.device != "cpu" else "name a smaller target")
        if not config.distils:
            found.append(
                "capture earlier layers with --target-layer-ids: those behind the last captured one are not loaded"
            )
    return found


def _drafter_hints(scene: Scene, config: TrainConfig) -> list[str]:
    fewer_layers = f"lower --drafter-layers, now {config.drafter_layers} (16 bytes a parameter at rest)"
    if scene.phase in ("loading", "saving") or scene.stage == "optimizer":
        return [
            fewer_layers,
            "name a larger GPU with --drafter-gpus" if scene.device != "cpu" else "use a smaller target",
        ]
    found: list[str] = []
    if config.attention_backend == "dense" and config.device == "cuda":
        found.append("use --attention-backend auto")
    if config.objective_rows > config.block_size:
        thrice = ", whose logits exist three times with --kl-weight" if config.distils else ""
        found.append(f"lower --objective-rows, now {config.objective_rows}{thrice}")
    found.append(f"lower --row-anchors and --num-anchors, now {config.row_anchors} and {config.num_anchors}")
    if config.splits_fc:
        found.append("use --split-fc off")
    return [*found, _fewer_tokens(config), fewer_layers]
