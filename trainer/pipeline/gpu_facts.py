"""What a profile says of the device: its memory, and the speed that a model's own is measured against."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from remote.protocol import events as ev

# 1.1 TFLOP: 1.4 ms on an H200, where 8192 cubed reached 803 TFLOP/s. Three matrices of bfloat16 take 0.4 GB.
_SIZE = 8192
_TRIES = 10


@dataclass(frozen=True)
class GpuFacts:
    """A GPU as a profile tells of it. `peak`: FLOP/s of one large matrix product in the run's dtype, measured before the run."""

    device: torch.device
    peak: float
    total: int

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> GpuFacts | None:
        """Look at a rank's device before anything is loaded; None on a CPU, whose share of a peak says nothing.

        Measured and not looked up: a table knows no power limit, and not every GPU.
        """
        if device.type != "cuda":
            return None
        # Up to the run's cap, where it has one.
        share = torch.cuda.get_per_process_memory_fraction(device)
        total = int(share * torch.cuda.get_device_properties(device).total_memory)
        return cls(device, matrix_product_rate(device, dtype), total)

    def add_to(self, profile: ev.StageProfile) -> ev.StageProfile:
        """Return a rank's profile with what is known of its device. Asks the allocator, not the device."""
        return replace(
            profile,
            mfu=profile.flops_per_second / self.peak,
            memory_allocated=torch.cuda.memory_allocated(self.device),
            memory_reserved=torch.cuda.memory_reserved(self.device),
            memory_peak=torch.cuda.max_memory_allocated(self.device),
            memory_total=self.total,
        )


def matrix_product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of the fastest of a few large matrix products; waits for the device, before the first step."""
    left, right = (torch.randn(_SIZE, _SIZE, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    times: list[float] = []
    for _ in range(_TRIES):
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        torch.mm(left, right, out=out)
        done.record()
        done.synchronize()
        times.append(began.elapsed_time(done) / 1e3)
    del left, right, out
    torch.cuda.empty_cache()  # What is loaded next must not have to fit around these.
    return 2 * _SIZE**3 / min(times)
