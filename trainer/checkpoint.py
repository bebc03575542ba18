"""Saving and restoring a drafter with its optimizer: written beside, fsynced, renamed into place; no kill leaves half of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from remote.protocol.errors import DflashError, preflight_error
from remote.protocol.files import write_json
from trainer import checkpoint_files
from trainer.checkpoint_files import TrainerState
from trainer.drafter.model import Drafter
from trainer.optimizer import StepOptimizer
from trainer.target.new_directory import new_directory

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in total): what a stop's patience counts from."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: where, how large, how long it took."""

    path: Path
    bytes: int
    seconds: float


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _on_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def save(
    output_dir: Path, state: TrainerState, drafter: Drafter, optimizer: StepOptimizer, *, dtype: str, progress: Progress
) -> Saved:
    """Save a checkpoint of `state.step`. Raises DflashError (no space); nothing half-written is left to be chosen later.

    Parameters are saved as they are trained: float32, or float64 for such runs.
    """
    start = time.monotonic()
    destination = checkpoint_files.step_directory(output_dir, state.step)
    weights, moments = drafter.state_dict(), optimizer.state_dict()
    total = _bytes(weights) + _bytes(moments)
    # Before anything is copied: 21 GB of a 27B drafter took 14 s to the host, in which a stop saw nothing happen.
    progress(0, total)
    try:
        with new_directory(destination) as directory:
            # File by file, so that 14 GB and not all 21 are in host memory at once.
            save_file(_on_host(weights), directory / checkpoint_files.DRAFTER_FILE)
            progress(_bytes(weights), total)
            save_file(_on_host(moments), directory / checkpoint_files.OPTIMIZER_FILE)
            write_json(directory / checkpoint_files.DRAFTER_CONFIG_FILE, drafter.config.to_zlab(dtype))
            write_json(directory / checkpoint_files.STATE_FILE, state)
            progress(total, total)
    except (OSError, SafetensorError) as error:
        raise DflashError(
            f"the checkpoint of step {state.step} cannot be written",
            cause=f"{destination}: {error}",
            hint=f"free {total >> 20} MiB there; the checkpoint before still stands",
        ) from error
    return Saved(destination, total, time.monotonic() - start)


def restore(checkpoint: Path, drafter: Drafter, optimizer: StepOptimizer) -> None:
    """Load weights and moments. Raises a preflight error when the files are not those of this drafter."""
    device = next(drafter.parameters()).device
    try:
        _fill(drafter.state_dict(), checkpoint / checkpoint_files.DRAFTER_FILE, device)
        optimizer.load_state_dict(load_file(checkpoint / checkpoint_files.OPTIMIZER_FILE, device=str(device)))
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise preflight_error(
            f"{checkpoint} cannot be restored", cause=str(error), hint="resume from an earlier checkpoint"
        ) from error


@torch.no_grad()
def _fill(tensors: Mapping[str, torch.Tensor], file: Path, device: torch.device) -> None:
    """Read a file into tensors, one after another: each goes straight to the device, where one at a time lies twice.

    Raises ValueError where names or shapes differ: what the file lacks would stay as it is, in a new drafter anything at all.
    """
    with safe_open(file, framework="pt", device=str(device)) as stored:
        if wrong := tensors.keys() ^ set(stored.keys()):
            raise ValueError(f"{', '.join(sorted(wrong))}: in the file or in the drafter, and not in both")
        for name, tensor in tensors.items():
            source = stored.get_tensor(name)
            if source.shape != tensor.shape:
                raise ValueError(f"{name} is {list(tensor.shape)} in the drafter, {list(source.shape)} in the file")
            tensor.copy_(source)
