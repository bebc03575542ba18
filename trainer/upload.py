"""Small tensors of the host to a device, without waiting for it."""

from __future__ import annotations

import torch


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor on `device`, copied there in the order of the current stream; the host does not wait.

    From pageable memory even a `non_blocking` copy waits for all that the stream has to do before it. So it is staged in pinned
    memory, which torch's host allocator keeps: a block is given out again once the copies out of it are done, and after the
    first steps nothing is allocated any more.
    """
    if torch.device(device).type != "cuda" or tensor.is_cuda or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
