"""The cap on what a rank takes of its GPU: a smaller card, tried on a larger one."""

from __future__ import annotations

import torch

from trainer.gpus import GIB, check_cap


def cap(device: torch.device, gib: float) -> None:
    """Let torch's allocator refuse what goes beyond `gib` on a GPU; 0 and a CPU have no cap. Before anything is allocated.

    Raises:
        DflashError: the GPU has less (code 7).
    """
    if device.type == "cuda" and gib:
        total = torch.cuda.get_device_properties(device).total_memory
        check_cap(gib, total, device.index)
        torch.cuda.set_per_process_memory_fraction(gib * GIB / total, device)
