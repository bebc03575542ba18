"""The device that a verb was told to compute on."""

from __future__ import annotations

import torch

from remote.protocol.errors import preflight_error, usage_error


def device_named(name: str) -> torch.device:
    """Return cpu or cuda[:N].

    Raises:
        DflashError: another name (code 2), or a GPU that this machine, or this torch, does not have (code 7).
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise usage_error(f"--device {name} is not known", hint="cpu, cuda, or cuda:N for the N-th GPU counted from 0")
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise preflight_error(
            f"there is no {name} here",
            cause=f"torch {torch.__version__} sees {count} GPUs",
            hint="--device cpu, or a torch with CUDA on a machine with a GPU",
        )
    return device
