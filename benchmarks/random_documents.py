"""`python -m benchmarks.random_documents FILE.jsonl`: tokenised documents of random token ids, to be given as --data-dir.

A model learns nothing from them beyond how often each token comes, which takes the loss to the entropy of the draw.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np


def make_documents(file: Path, *, count: int, shortest: int, longest: int, vocabulary: int, seed: int = 0) -> int:
    """Write `count` documents of `shortest` to `longest` tokens below `vocabulary` as JSONL; returns the tokens in all.

    A quarter of each is its prompt, on which there is no loss.
    """
    draw = np.random.default_rng(seed)
    lengths = draw.integers(shortest, longest, size=count, endpoint=True)
    with file.open("w", encoding="ascii") as lines:
        for length in lengths.tolist():
            ids = draw.integers(vocabulary, size=length).tolist()
            lines.write(json.dumps({"input_ids": ids, "prompt_len": length // 4}) + "\n")
    return int(lengths.sum())


def main(argv: list[str] | None = None) -> int:
    """Make what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_documents", description=__doc__)
    parser.add_argument("file", type=Path, help="the file to write, which ends in .jsonl")
    parser.add_argument("--count", type=int, default=128, help="documents (default 128)")
    parser.add_argument("--shortest", type=int, default=512, help="tokens of the shortest (default 512)")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest (default 4096)")
    parser.add_argument("--vocabulary", type=int, default=248044, help="token ids lie below (default 248044)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    values = {name: value for name, value in vars(arguments).items() if name != "file"}
    tokens = make_documents(arguments.file, **values)
    print(f"{arguments.file}: {arguments.count} documents, {tokens:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
