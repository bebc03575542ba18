"""Handing states over: two small interfaces. Their ring implementations are in sender.py and receiver.py, each in two modes.

With shared roles nothing is handed over: SharedReceiver in target_side.py runs the target when a row is asked for.
"""

from __future__ import annotations

from typing import Protocol

from trainer.pipeline.packed import PackBuffer, PackedRow, PackedStates, RowTokens


class StreamClosed(Exception):
    """The peers said goodbye: no more states are wanted."""


class Sender(Protocol):
    """A target's end of the handover."""

    def buffer(self) -> PackBuffer:
        """Return a pack buffer that no copy reads any more. Raises StreamClosed when no more states are wanted."""
        ...

    def send(self, packed: PackedStates, row: RowTokens, drafter: int) -> None:
        """Hand a packed row over to a drafter. Raises StreamClosed, PeerDied."""
        ...

    def close(self) -> None:
        """End the stream on purpose, both ways."""
        ...


class Receiver(Protocol):
    """A drafter's end of the handover."""

    def receive(self, batch: int) -> PackedRow:
        """Wait for a batch. Batches are asked for in ascending order. Raises PeerDied, StreamClosed."""
        ...

    def release(self, row: PackedRow) -> None:
        """Say that nothing the caller enqueues from now on reads the row's states."""
        ...

    def close(self) -> None:
        """End the stream on purpose, both ways."""
        ...
