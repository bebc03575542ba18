"""The GPUs of this machine as CUDA's driver shows them, and what a role needs of one at the very least. Torch-free."""

from __future__ import annotations

import ctypes
import math
import os
import re

from remote.protocol.errors import preflight_error
from trainer.target.facts import TargetFacts

GIB = 1 << 30


def gpu_sizes() -> list[int]:
    """Return the bytes of each GPU that the driver shows to this process (CUDA_VISIBLE_DEVICES counts); none without a driver.

    0 for one whose size it does not tell.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    # Counted as the ranks will count them: by default the fastest comes first.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_size(driver, ordinal) for ordinal in range(count.value)]


def _size(driver: ctypes.CDLL, ordinal: int) -> int:
    device, size = ctypes.c_int(0), ctypes.c_size_t(0)
    known = driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0
    # The name without _v2 is that of a function with a 32-bit size.
    return size.value if known and driver.cuDeviceTotalMem_v2(ctypes.byref(size), device) == 0 else 0


def check_cap(gib: float, size: int, gpu: int) -> None:
    """Raise a preflight error when the cap on a GPU is more than its `size` in bytes."""
    if gib * GIB > size:
        raise preflight_error(
            f"gpu_memory_gib = {gib:g} is more than GPU {gpu} has",
            cause=f"it has {size / GIB:.1f} GiB",
            hint="lower it; 0 means all of the GPU",
        )


def target_bytes(facts: TargetFacts, last_layer: int, item_bytes: int) -> int:
    """Return the bytes of a loaded target: embedding, the layers up to `last_layer`, and the norm behind them."""
    layer = re.compile(re.escape(facts.prefix) + r"layers\.(\d+)\.")
    numbers = 0
    for name, entry in facts.tensors.items():
        found = layer.match(name)
        if int(found[1]) <= last_layer if found else name.startswith(facts.prefix):
            numbers += math.prod(entry.shape)
    return numbers * item_bytes


def drafter_bytes(parameters: int, facts: TargetFacts, item_bytes: int, *, whole_head: bool) -> int:
    """Return the bytes of a drafter at rest: masters, gradients, two moments, and the target's ends in the run's dtype.

    16 bytes a parameter with float32 masters. Without `whole_head` the softmax runs over a part of the vocabulary.
    """
    ends = 2 if whole_head and not facts.tied else 1
    return parameters * 4 * max(4, item_bytes) + ends * facts.vocab_size * facts.hidden_size * item_bytes
