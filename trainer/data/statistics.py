"""What `prepare` read, wrote and left out, per source and in all, and the table that says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from trainer.data.tokenised_files import Documents


@dataclass
class Counts:
    """Conversations, except where the name says rows, turns, documents or tokens.

    A conversation is read, and then it is taken or not by its source's weight; what is taken is written or held out,
    as often as the weight says, unless no label is left in it.

    Attributes:
        lengths: documents written, by the power of two that their tokens do not exceed.
    """

    read: int = 0
    bad_rows: int = 0
    not_taken: int = 0
    truncated: int = 0
    without_supervised_tokens: int = 0
    turns_left_out: int = 0
    written: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    held_out: int = 0
    held_out_tokens: int = 0
    held_out_supervised_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)

    @property
    def all_tokens(self) -> int:
        """Tokens of both parts."""
        return self.tokens + self.held_out_tokens

    def add(self, other: Counts) -> None:
        """Add the counts of another part."""
        for each in fields(self):
            if each.name == "lengths":
                self.lengths.update(other.lengths)
            else:
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def count(self, documents: Documents, *, held_out: bool) -> None:
        """Count documents that go into one of the two parts."""
        tokens = int(documents.lengths @ documents.times)
        supervised = int(documents.loss_mask @ np.repeat(documents.times, documents.lengths))
        if held_out:
            self.held_out += len(documents)
            self.held_out_tokens += tokens
            self.held_out_supervised_tokens += supervised
        else:
            self.written += len(documents)
            self.tokens += tokens
            self.supervised_tokens += supervised
            powers = np.ceil(np.log2(np.maximum(documents.lengths, 1))).astype(int).tolist()
            for power, times in zip(powers, documents.times.tolist(), strict=True):
                self.lengths[1 << power] += times

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types, `lengths` with ascending keys."""
        return asdict(self) | {"lengths": {str(bound): self.lengths[bound] for bound in sorted(self.lengths)}}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items() if name != "lengths")


def total(parts: Sequence[Counts]) -> Counts:
    """Return the sum of all parts."""
    whole = Counts()
    for part in parts:
        whole.add(part)
    return whole


def table(parts: Mapping[str, Counts]) -> str:
    """Return the lines that a person reads at the end: one a source, their sum, and the lengths."""
    whole = total(list(parts.values()))
    rows = [("source", "read", "written", "of all", "tokens", "supervised", "held out")]
    for name, counts in [*parts.items(), *([("all", whole)] if len(parts) > 1 else [])]:
        rows.append(
            (
                name,
                f"{counts.read:,}",
                f"{counts.written:,}",
                f"{counts.tokens / max(whole.tokens, 1):.1%}",
                f"{counts.tokens:,}",
                f"{counts.supervised_tokens / max(counts.tokens, 1):.1%}",
                f"{counts.held_out:,}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    shares = (f"{whole.lengths[bound] / max(whole.written, 1):.0%} to {bound}" for bound in sorted(whole.lengths))
    left_out = ", ".join(
        f"{value:,} {what}"
        for value, what in (
            (whole.bad_rows, "bad rows"),
            (whole.not_taken, "not taken by weight"),
            (whole.without_supervised_tokens, "without a label"),
            (whole.truncated, "cut to the maximum length"),
            (whole.turns_left_out, "turns of the assistant without labels"),
        )
        if value
    )
    lines.append(f"tokens of a document: {', '.join(shares) or 'none'}")
    return "\n".join([*lines, *([f"left out or cut: {left_out}"] if left_out else [])])
