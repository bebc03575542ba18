"""The raw files of a data set: how much is taken of each, and their lines in batches of bounded size."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from remote.protocol.errors import preflight_error, usage_error
from trainer.data.jsonl import read_lines

# A batch ends at whichever comes first. A tokenizer's answer takes about 60 bytes a byte of text while it is built, so
# this bounds a process to some 60 MiB beside its code, however long the documents are.
_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 1024

# A weight that asks for more of each conversation, or for less than this part of them, is a slip of the pen.
_MOST_TIMES = 1e6

Mixing = Literal["shrink", "repeat"]


@dataclass(frozen=True)
class Source:
    """A file, its weight in the mix, and how often each of its conversations is taken (0.5: every second one)."""

    path: Path
    weight: float = 1.0
    times: float = 1.0


@dataclass(frozen=True)
class LineBatch:
    """Lines of one source, by its index: (line number from 1, bytes), and how far into the file, in bytes, they lead."""

    source: int
    lines: list[tuple[int, bytes]]
    position: int


def parse_source(text: str) -> Source:
    """Return the source of FILE=WEIGHT. Raises a usage error."""
    name, separator, weight = text.rpartition("=")
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not (separator and name and value > 0 and math.isfinite(value)):
        raise usage_error(
            f"--source {text} is not FILE=WEIGHT", hint="a weight is a number above 0, as in chat.jsonl=3"
        )
    return Source(Path(name), value)


def mixed(sources: Sequence[Source], mixing: Mixing) -> list[Source]:
    """Return the sources with `times` set so that their conversations stand in proportion to their weights.

    shrink takes the source that is scarcest for its weight as it is, and less of the others, so that nothing stands
    twice; repeat takes the most plentiful as it is, and the others several times.

    Raises:
        DflashError: a source cannot be read or is empty.
    """
    rows = [sum(1 for _ in read_lines(source.path)) for source in sources]
    for source, count in zip(sources, rows, strict=True):
        if not count:
            raise preflight_error(f"{source.path} has no rows", cause="it has a weight", hint="leave it out")
    choose = min if mixing == "shrink" else max
    # Of logarithms, since quotients of weights may be beyond what a float holds.
    shares = [math.log(source.weight) - math.log(count) for source, count in zip(sources, rows, strict=True)]
    whole = -choose(-share for share in shares)
    for source, share in zip(sources, shares, strict=True):
        if abs(share - whole) > math.log(_MOST_TIMES):
            how = "taken less than once in" if share < whole else "repeated more than"
            raise usage_error(
                f"the weights lie too far apart: each conversation of {source.path} would be {how} a million",
                hint="give weights that are nearer to the rows of the files",
            )
    heaviest = max(source.weight for source in sources)
    weights = [source.weight / heaviest for source in sources]
    scale = choose(count / weight for count, weight in zip(rows, weights, strict=True))
    return [
        replace(source, times=scale * weight / count)
        for source, weight, count in zip(sources, weights, rows, strict=True)
    ]


def copies(key: str, times: float) -> int:
    """Return how often a conversation is taken: `times` rounded down or up, by the hash of its key.

    By the hash and not by a random draw, so that a set made again, or with other rows beside it, takes the same ones.
    """
    whole = math.floor(times)
    return whole + (hash_share(f"mix:{key}") < times - whole)


def hash_share(text: str) -> float:
    """Return a number in [0, 1) that hangs on the text alone and is uniform over texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / (1 << 48)


def line_batches(sources: Sequence[Source]) -> Iterator[LineBatch]:
    """Yield all lines that are not blank, in order, at most 1,024 and about 1 MiB together. Raises as read_lines."""
    for index, source in enumerate(sources):
        lines: list[tuple[int, bytes]] = []
        size = position = 0
        for number, line, position in read_lines(source.path):
            if lines and (size + len(line) > _BATCH_BYTES or len(lines) == _BATCH_ROWS):
                yield LineBatch(index, lines, position)
                lines, size = [], 0
            lines.append((number, line))
            size += len(line)
        if lines:
            yield LineBatch(index, lines, position)
