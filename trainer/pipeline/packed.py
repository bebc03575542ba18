"""The packed row that travels from a target to a drafter, and the preallocated buffers it is packed in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.pipeline.copier import Copier, Mark

States = torch.Tensor | tuple[torch.Tensor, ...]
"""Captured states of a row: one tensor [T, L*H], or with split-fc L tensors [T, H]."""

STATES, COPY = 1.0, 2.0
"""What is wrong with a row's states: they were not finite when packed, or they were and are not any more."""


@dataclass(frozen=True)
class RowTokens:
    """The host side of a packed row of T positions: documents one after another, then padding (document id -1).

    input_ids i32[T], loss_mask u8[T], document_ids i64[T], position_ids i32[T] (from 0 in each document).
    """

    batch: int
    step: int
    epoch: int
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    document_ids: torch.Tensor
    position_ids: torch.Tensor
    tokens: int
    """Positions that are no padding."""


@dataclass(frozen=True)
class PackedRow:
    """A row with its states on the drafter's device, and whether they were finite when packed (None: nobody looked there).

    `checksum`: of what had to be packed, None where the batch is not verified; `target`: who packed it.
    """

    row: RowTokens
    states: States
    packed_finite: bool | None = None
    checksum: int | None = None
    target: int = -1

    def verdict(self) -> torch.Tensor:
        """Return f64 0 where the states are finite, STATES where they are not, COPY where they were when packed.

        Judged here again, where they are used: shared roles have no header, and a copy may go wrong behind the packing.
        """
        layers = self.states if isinstance(self.states, tuple) else (self.states,)
        finite = torch.stack([torch.isfinite(each).all() for each in layers]).all()
        if self.packed_finite is False:
            return torch.full((), STATES, dtype=torch.float64, device=finite.device)
        return (~finite).double() * (COPY if self.packed_finite else STATES)


@dataclass
class PackBuffer:
    """A preallocated device buffer: [T_max, L*H], or with split-fc [L, T_max, H]. Filled on the producer's stream only."""

    storage: torch.Tensor
    split: bool

    @classmethod
    def allocate(
        cls, tokens: int, layers: int, hidden: int, *, split: bool, dtype: torch.dtype, device: torch.device
    ) -> PackBuffer:
        shape = (layers, tokens, hidden) if split else (tokens, layers * hidden)
        return cls(torch.zeros(shape, dtype=dtype, device=device), split)

    def rows(self, tokens: int) -> torch.Tensor:
        """Return the first `tokens` positions as one contiguous tensor: [T, L*H], or with split-fc [L, T, H]."""
        if not self.split:
            return self.storage[:tokens]
        layers, _, hidden = self.storage.shape
        return self.storage.view(-1)[: layers * tokens * hidden].view(layers, tokens, hidden)

    def pack(self, captured: list[torch.Tensor], lengths: list[int], tokens: int) -> torch.Tensor:
        """Gather the valid positions of `captured` (L tensors [k, L_max, H], right padded) into the first `tokens` positions.

        Positions behind the documents are zeroed: the slot's bytes must not depend on what the buffer held before.
        """
        out = self.rows(tokens)
        used = sum(lengths)
        for layer, states in enumerate(captured):
            hidden = states.shape[-1]
            into = out[layer] if self.split else out[:, layer * hidden : (layer + 1) * hidden]
            offset = 0
            for document, length in enumerate(lengths):
                into[offset : offset + length] = states[document, :length]
                offset += length
            into[used:] = 0
        return out


@dataclass(frozen=True)
class PackedStates:
    """States in a pack buffer, with what rule 13 computes on the device when they are packed.

    `proof` i64[3]: 1 where they are finite, the checksum that they must have, 0 where nobody asked for it, and the batch + 1,
    which one that was read too early does not carry. It is of this row alone: in the buffer it would be overwritten together with
    the states, and a race between them never be seen.
    """

    buffer: PackBuffer
    states: torch.Tensor
    ready: Mark
    proof: torch.Tensor

    @classmethod
    def of(
        cls, buffer: PackBuffer, states: torch.Tensor, copier: Copier, *, batch: int, check: torch.Tensor | None = None
    ) -> PackedStates:
        """Close the row of a batch: `check` is its `captured_checksum`. Called on the stream that packed it."""
        finite = torch.isfinite(states).all().to(torch.int64)
        proof = torch.stack(
            [finite, torch.zeros_like(finite) if check is None else check, torch.full_like(finite, batch + 1)]
        )
        return cls(buffer, states, copier.mark(), proof)


def as_states(tensor: torch.Tensor, *, split: bool) -> States:
    """Return a slot-shaped tensor as the drafter takes it."""
    return tuple(tensor.unbind(0)) if split else tensor
