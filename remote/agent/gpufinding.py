"""The line of doctor about the GPUs: what is there, whether CUDA can open it, and who holds what."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from remote.agent.environment import RUN_VARIABLE
from remote.agent.finding import FAILED, OK, WARNING, Finding
from remote.agent.gpus import HELD_MIB, Gpu, holders, list_gpus, named
from remote.protocol.errors import DflashError
from remote.protocol.layout import is_run_id

OUTSIDE = "a holder outside this container"

_DEVICES, _MAJORS, _DRIVER = Path("/dev"), Path("/proc/devices"), Path("/proc/driver/nvidia/version")
_GPU_NODE = re.compile(r"nvidia[0-9]+")
_DRIVER_VERSION = re.compile(r"\b([0-9]{3,4}\.[0-9]{1,4}(?:\.[0-9]{1,4})?)\b")
_PASS_IN = "a container needs its devices (dev0: /dev/nvidia0, ... in its configuration), a machine its driver"


def gpu_finding(device: str, wanted: Sequence[str]) -> Finding:
    """Return the line for a run on `device` ("cuda", "cpu", "" for unknown) with the CUDA indices `wanted`."""
    # What breaks a run on GPUs is worth a word, but no failure, to one on the CPU.
    wrong = FAILED if device == "cuda" else WARNING
    try:
        gpus = list_gpus()
    except DflashError as error:
        return Finding("GPUs", wrong, f"{error.error}: {error.cause}", error.hint)
    if problem := node_problem(bool(gpus), _DEVICES, _read(_MAJORS)):
        text, hint = problem
        # A machine without GPUs is as it should be for a run that needs none.
        if not gpus and device == "cpu" and not gpu_nodes(_DEVICES):
            return Finding("GPUs", OK, "none, and the configuration trains on the CPU")
        return Finding("GPUs", wrong, f"{inventory(gpus)}; {text}" if gpus else text, hint)
    if missing := [index for index in wanted if index not in {gpu.index for gpu in gpus}]:
        text = f"{inventory(gpus)}; the configuration wants GPU {', '.join(missing)}"
        return Finding("GPUs", wrong, text, "choose with target_gpus and drafter_gpus, or device = cpu")
    return _held(gpus, wrong, wanted)


def _held(gpus: Sequence[Gpu], wrong: str, wanted: Sequence[str]) -> Finding:
    by_owner: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        if gpu.used > HELD_MIB:
            by_owner.setdefault(owner(holders(gpu.index)), []).append(gpu)
    parts = [f"GPU {_indices(held)}: {_used(held)} by {name}" for name, held in by_owner.items()]
    text = f"{inventory(gpus)}; {'; '.join(parts) or 'all free'}"
    foreign = [gpu.index for name, held in by_owner.items() if not name.startswith("run ") for gpu in held]
    if not foreign:
        return Finding("GPUs", OK, text)
    # A start that wants none of them is not in anybody's way.
    state = wrong if set(foreign) & set(wanted) else WARNING
    return Finding(
        "GPUs", state, text, "wait with `start --wait-gpus`, or choose other GPUs; nothing foreign is killed"
    )


def _indices(gpus: Sequence[Gpu]) -> str:
    return ", ".join(gpu.index for gpu in gpus)


def _used(gpus: Sequence[Gpu]) -> str:
    return f"{sum(gpu.used for gpu in gpus):,} MiB"


def inventory(gpus: Sequence[Gpu]) -> str:
    """Return e.g. "8 x NVIDIA H200, 140 GiB each, driver 570.86.15"."""
    kinds: dict[tuple[str, int], int] = {}
    for gpu in gpus:
        kinds[gpu.name, gpu.total] = kinds.get((gpu.name, gpu.total), 0) + 1
    parts = [
        f"{f'{count} x ' if count > 1 else ''}{name}, {total / 1024:.0f} GiB{' each' if count > 1 else ''}"
        for (name, total), count in kinds.items()
    ]
    version = driver_version(_read(_DRIVER))
    return "; ".join(parts) + (f", driver {version}" if version else "")


def driver_version(text: str) -> str:
    """Return the version in /proc/driver/nvidia/version, "" where it names none."""
    match = _DRIVER_VERSION.search(text.partition("\n")[0])
    return match[1] if match else ""


def gpu_nodes(devices: Path) -> list[str]:
    """Return the names of the device files of GPUs, e.g. nvidia0."""
    try:
        return sorted(path.name for path in devices.iterdir() if _GPU_NODE.fullmatch(path.name))
    except OSError:
        return []


def node_problem(seen: bool, devices: Path, majors: str) -> tuple[str, str] | None:
    """Return what is wrong with /dev/nvidia* and its way out, None when nothing is.

    `seen`: nvidia-smi lists GPUs; `majors`: text of /proc/devices, which in a container is the host's.
    """
    if not gpu_nodes(devices):
        # nvidia-smi may have made them by itself; what it lists without them is a stand-in or a driver of another kind.
        return None if seen else ("no GPU: there is no /dev/nvidia0", _PASS_IN)
    if not seen:
        return (
            "/dev/nvidia* are there, but no nvidia-smi to ask",
            "install the driver's user part, of the host's version",
        )
    uvm = devices / "nvidia-uvm"
    have = _major(uvm)
    current = device_majors(majors).get("nvidia-uvm")
    if have is None:
        return "no /dev/nvidia-uvm: CUDA cannot start", "load nvidia-uvm on the host and give the container the device"
    if current is not None and have != current:
        # The number is drawn when the module is loaded; an old device file then opens nothing.
        return (
            f"/dev/nvidia-uvm has major {have}, the driver's is {current} now",
            "the module was loaded anew on the host: restart the container (and mend its devices.allow lines)",
        )
    return None


def device_majors(text: str) -> dict[str, int]:
    """Return the major numbers of /proc/devices by driver; lines of another form are skipped."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0].isascii() and words[0].isdigit() and len(words[0]) < 10:
            # Character devices come first, and a driver of that name has no block device.
            found.setdefault(words[1], int(words[0]))
    return found


def _major(path: Path) -> int | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return os.major(status.st_rdev) if stat.S_ISCHR(status.st_mode) else None


def owner(pids: Sequence[int]) -> str:
    """Return who these processes are: one of our runs, pids, or somebody whose pids are not visible here."""
    if not pids:
        return OUTSIDE
    runs = {run_of(pid) for pid in pids}
    if "" not in runs:
        return f"run {', '.join(sorted(runs))}"
    return named([pid for pid in pids if not run_of(pid)])


def run_of(pid: int) -> str:
    """Return the id of the run that a process belongs to by its environment, "" for none of ours."""
    try:
        variables = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:  # ended meanwhile, or somebody else's
        return ""
    prefix = f"{RUN_VARIABLE}=".encode("ascii")
    values = [
        item.removeprefix(prefix).decode("ascii", errors="replace") for item in variables if item.startswith(prefix)
    ]
    return next((value for value in values if is_run_id(value)), "")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
