"""Counting what makes the host wait for a device: on a CPU by operation, which is all that one can see there."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from races.streams import ASK_THE_DEVICE
from torch.utils._python_dispatch import TorchDispatchMode


class HostWaits(TorchDispatchMode):
    """Lists each operation of the calling thread whose result the host would wait for on a GPU, with the line that asked."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        by_mask = name.startswith("index") and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool
            for each in (args[1] if len(args) > 1 else ()) or ()
        )
        if name in ASK_THE_DEVICE or by_mask:
            asked = [each for each in traceback.extract_stack() if "torch/" not in each.filename][:-1]
            self.found.append(
                f"{name}: " + " < ".join(f"{each.filename}:{each.lineno}" for each in reversed(asked[-3:]))
            )
        return func(*args, **(kwargs or {}))
