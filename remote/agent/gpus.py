"""What the GPUs hold. Empty lists where there is no nvidia-smi: a machine without GPUs is a normal far end."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from remote.protocol.errors import preflight_error

HELD_MIB = 1024
"""More than this in use means somebody works there; an idle driver and a display take a few hundred MiB."""

FREE_MARGIN_MIB = 256
"""How near to its baseline memory counts as free again."""

_QUERY = ["nvidia-smi", "--query-gpu=index,name,memory.used,memory.total", "--format=csv,noheader,nounits"]
_QUERY_SECONDS = 20.0
_WAIT_SECONDS = 2.0


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory in MiB."""

    index: str
    name: str
    used: int
    total: int


def list_gpus() -> list[Gpu]:
    """Ask nvidia-smi; [] when there is none.

    Raises a preflight error when it is there and fails (`Failed to initialize NVML`: the container lost its devices).
    """
    try:
        answer = subprocess.run(
            _QUERY,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_QUERY_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        return []
    except subprocess.TimeoutExpired as error:
        raise preflight_error("nvidia-smi does not answer", cause=f"no word in {_QUERY_SECONDS:.0f} s") from error
    if answer.returncode != 0:
        said = (answer.stdout + answer.stderr).strip()[:300]
        raise preflight_error(
            "nvidia-smi failed", cause=said or f"it ended with code {answer.returncode}", hint=_way_out(said)
        )
    return parse_gpus(answer.stdout)


def _way_out(said: str) -> str:
    if "driver/library version mismatch" in said.lower():
        return "the host's driver was updated under its old kernel module: reboot the host, then restart the container"
    # "Failed to initialize NVML: Unknown Error": its cgroup no longer lets it open the devices.
    return "a container loses its GPUs after a daemon-reload or a driver update on the host: restart it"


def parse_gpus(text: str) -> list[Gpu]:
    """Parse the CSV of the query above; a GPU whose memory reads `[N/A]` counts as 0 MiB."""
    gpus: list[Gpu] = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        # Drivers print warnings on stdout, and names may hold commas: index first, two numbers last.
        if len(parts) >= 4 and parts[0].isdigit():
            used, total = (int(part) if part.isdigit() else 0 for part in parts[-2:])
            gpus.append(Gpu(parts[0], ", ".join(parts[1:-2]), used, total))
    return gpus


def holders(index: str) -> list[int]:
    """Return the pids that hold /dev/nvidia<index> open. In a container nvidia-smi shows pids of the host, or none."""
    device = f"/dev/nvidia{index}"
    found: list[int] = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _has_open(process / "fd", device):
            found.append(int(process.name))
    return sorted(found)


def named(pids: Sequence[int]) -> str:
    """Return processes for a message: "pid 4711 (python3 of alice), 4712 (...)"; their numbers alone without psutil."""
    return "pid " + ", ".join(f"{pid}{_program_and_user(pid)}" for pid in pids)


def _program_and_user(pid: int) -> str:
    try:
        import psutil
    except ImportError:  # the system's Python, before --python names one that trains
        return ""
    try:
        process = psutil.Process(pid)
        return f" ({process.name()} of {process.username()})"
    except psutil.Error:  # it ended meanwhile
        return ""


def _has_open(folder: Path, device: str) -> bool:
    try:
        return any(os.path.realpath(link) == device for link in folder.iterdir())
    except OSError:  # ended meanwhile, or somebody else's
        return False


def cuda_devices(devices: Sequence[str]) -> list[str]:
    """Return the CUDA indices among a run's devices."""
    return [device for device in devices if device.isdigit()]


def memory_used(devices: Sequence[str]) -> dict[str, int]:
    """Return MiB in use of the given CUDA devices, by index. Raises a preflight error when one does not exist."""
    # A run on the cpu must not depend on a driver that is broken.
    wanted = cuda_devices(devices)
    if not wanted:
        return {}
    gpus = {gpu.index: gpu for gpu in list_gpus()}
    if not gpus:
        raise preflight_error(
            "no GPU on the far end",
            cause="nvidia-smi finds none there",
            hint="choose another destination, or train on its processor with --device cpu",
        )
    missing = [index for index in wanted if index not in gpus]
    if missing:
        raise preflight_error(
            f"no GPU {', '.join(missing)} there",
            cause=f"it has {len(gpus)}: {', '.join(gpus)}",
            hint="choose with --target-gpus and --drafter-gpus, or --device cpu",
        )
    return {index: gpus[index].used for index in wanted}


def require_free(devices: Sequence[str]) -> dict[str, int]:
    """Return the baseline of the devices. Raises a preflight error naming the GPU that is held, how much, by whom."""
    used = memory_used(devices)
    for index, mib in used.items():
        if mib > HELD_MIB:
            pids = holders(index)
            by = named(pids) if pids else "a holder outside this container"
            raise preflight_error(
                f"GPU {index} is held",
                cause=f"{mib} MiB in use by {by}",
                hint="wait with --wait-gpus, or choose other GPUs; nothing foreign is ever killed",
            )
    return used


def wait_free(devices: Sequence[str], tell: Callable[[str], None], check: Callable[[], None]) -> None:
    """Wait until no device is held, telling what is held each time that changes; `check` may raise to end the wait."""
    told = ""
    while held := [f"GPU {index}: {mib} MiB" for index, mib in memory_used(devices).items() if mib > HELD_MIB]:
        text = "waiting for " + ", ".join(item.partition(":")[0] for item in held)
        # One line when it changes, not one every two seconds of a night.
        if text != told:
            tell(f"{text} ({', '.join(held)})")
            told = text
        check()
        time.sleep(_WAIT_SECONDS)


def above_baseline(baseline: dict[str, int]) -> dict[str, int]:
    """Return the devices, and their MiB in use, that are not back at the memory they had before the launch."""
    used = memory_used(list(baseline))
    return {index: mib for index, mib in used.items() if mib > baseline[index] + FREE_MARGIN_MIB}
