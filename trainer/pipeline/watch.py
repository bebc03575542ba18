"""Looking for numbers that are not finite in every module's output, in the order in which they are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.pipeline.packed import PackedRow


@dataclass(frozen=True)
class Finding:
    """A tensor that is not finite: `count` of its numbers, the first of them at `index`, which `place` says in words."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    count: int
    index: tuple[int, ...]
    value: float
    place: str = ""

    def __str__(self) -> str:
        total = torch.Size(self.shape).numel()
        where = f" at {list(self.index)}" if self.index else ""
        place = f" ({self.place})" if self.place else ""
        kind = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        return f"{self.name} {kind}: {self.count} of {total} numbers, the first is {self.value}{where}{place}"


Placing = Callable[[tuple[int, ...]], str]


class Watch:
    """Collects findings. Every look waits for the device: for a single batch, never in training."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def look(self, name: str, tensor: torch.Tensor, placing: Placing | None = None) -> None:
        """Note a tensor if any of its numbers is not finite."""
        wrong = ~torch.isfinite(tensor)
        if not bool(wrong.any()):  # CPU-GPU sync point.
            return
        index = tuple(wrong.nonzero()[0].tolist())
        place = placing(index) if placing else ""
        value = float(tensor[index])
        self.findings.append(Finding(name, tensor.dtype, tuple(tensor.shape), int(wrong.sum()), index, value, place))

    def states(self, packed: PackedRow) -> None:
        """Look at the packed states of a row."""
        row = packed.row

        def place(index: tuple[int, ...]) -> str:
            return f"document {int(row.document_ids[index[0]])}, position {int(row.position_ids[index[0]])}"

        for layer, each in enumerate(packed.states if isinstance(packed.states, tuple) else [packed.states]):
            name = f"states of captured layer {layer}" if isinstance(packed.states, tuple) else "states"
            self.look(name, each, place)

    def look_at_weights(self, name: str, module: nn.Module) -> None:
        """Look at every parameter of a module."""
        for each, parameter in module.named_parameters():
            self.look(f"weight of {name} {each}", parameter.detach())

    @contextlib.contextmanager
    def modules(self, name: str, module: nn.Module) -> Iterator[None]:
        """Look at the output of `module` and of all modules inside it while the block runs."""
        with self._hooked(name, module, lambda output: output, None):
            yield

    @contextlib.contextmanager
    def target(self, stack: nn.Module, lengths: Sequence[int], document_ids: Sequence[int]) -> Iterator[None]:
        """The same for a target that reads right-padded documents [k, L_max]; what it makes of padding does not count."""
        length = torch.tensor(lengths)

        def real(output: torch.Tensor) -> torch.Tensor:
            if output.dim() != 3 or output.shape[0] != len(lengths) or output.shape[1] < max(lengths):
                return output
            padding = torch.arange(output.shape[1]) >= length[:, None]
            return output.masked_fill(padding.to(output.device)[..., None], 0)

        def place(index: tuple[int, ...]) -> str:
            return f"document {document_ids[index[0]]}, position {index[1]}" if len(index) == 3 else ""

        with self._hooked("target", stack, real, place):
            yield

    @contextlib.contextmanager
    def _hooked(
        self, name: str, module: nn.Module, of: Callable[[torch.Tensor], torch.Tensor], placing: Placing | None
    ) -> Iterator[None]:
        def hook(path: str) -> Callable[[nn.Module, Any, Any], None]:
            def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
                first = output[0] if isinstance(output, tuple) else output
                if isinstance(first, torch.Tensor) and first.is_floating_point():
                    self.look(f"output of {name} {path}".rstrip(), of(first.detach()), placing)

            return look

        hooks = [each.register_forward_hook(hook(path)) for path, each in module.named_modules()]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()
