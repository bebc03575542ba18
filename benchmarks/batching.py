"""`python -m benchmarks.batching`: what a micro-batch costs the CPU before any model sees it, beside the time of its step.

Packing an epoch, reading a row, and drawing its anchors and blocks, at the shape of the 27B recipe: 4,096 tokens a row, 512
anchors of 16 rows. A step of one such row takes 0.303 s on an H200 (forward and backward of a public 27B drafter; docs/recipes.md).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.random_documents import make_documents
from trainer.data.documents import open_dataset
from trainer.data.rows import padding_share
from trainer.data.schedule import Layout, Packing, Schedule
from trainer.drafter.attention_choice import FLEX
from trainer.drafter.blocks import build_blocks
from trainer.pipeline.reader import RowReader

# Forward and backward of a public 27B drafter trainer over one such row on an H200, measured 2026-11-30; the target's
# forward of the same row takes 0.45 s, so this is the smaller of the two.
STEP_S = 0.303

TOKENS = 4096
BUCKET = 512
ANCHORS = 512
BLOCK = 16


@dataclass(frozen=True)
class Batching:
    """CPU seconds: of opening the data and packing an epoch, and of one micro-batch on its target and on its drafter."""

    opening: float
    packing: float
    reading: float
    blocks: float
    rows: int
    block_rows: int
    block_padding: float
    padding: float


def measure(documents: int, rows: int, seed: int = 0) -> Batching:
    """Measure over `documents` random documents of 512 to 4,096 tokens, and `rows` micro-batches of them."""
    clock = time.process_time
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "documents.jsonl"
        make_documents(file, count=documents, shortest=TOKENS // 8, longest=TOKENS, vocabulary=248_044, seed=seed)
        began = clock()
        dataset = open_dataset(file, max_length=TOKENS)
        opened = clock()
    packing = Packing(dataset.lengths, dataset.candidates, seed, TOKENS, BUCKET, max_documents=ANCHORS)
    schedule = Schedule(packing, Layout(1, 1, 1, shared=False), epochs=1, micro_batches_per_step=1)
    packed = clock()
    reader = RowReader(dataset, BUCKET)
    batches = [schedule.step(1 + index % schedule.total_steps)[0] for index in range(rows)]
    before = clock()
    read = [reader.read(batch) for batch in batches]
    reading = clock()
    block_rows = padded_rows = 0
    for one in read:
        blocks = build_blocks(
            one.row.input_ids.numpy(),
            one.row.loss_mask.numpy(),
            one.row.document_ids.numpy(),
            one.row.position_ids.numpy(),
            seed=seed,
            epoch=0,
            num_anchors=ANCHORS,
            row_budget=ANCHORS * BLOCK,
            block_size=BLOCK,
            mask_token_id=248_070,
            gamma=7.0,
            bucket=FLEX.bucket(ANCHORS),
        )
        block_rows += blocks.count * BLOCK
        padded_rows += blocks.positions.numel()
    return Batching(
        opening=opened - began,
        packing=packed - opened,
        reading=(reading - before) / rows,
        blocks=(clock() - reading) / rows,
        rows=len(packing.rows(0)),
        block_rows=block_rows // rows,
        block_padding=padded_rows / block_rows - 1,
        padding=padding_share(packing.rows(0), dataset.lengths, BUCKET),
    )


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batching", description=__doc__)
    parser.add_argument("--documents", type=int, default=1000, help="documents (default 1000)")
    parser.add_argument("--rows", type=int, default=200, help="micro-batches to build (default 200)")
    parser.add_argument(
        "--step", type=float, default=STEP_S, help=f"seconds of a step to compare with (default {STEP_S})"
    )
    arguments = parser.parse_args(argv)
    found = measure(arguments.documents, arguments.rows)
    print(
        f"once: opening {found.opening:.2f} s (JSONL), packing {found.rows} rows of an epoch {found.packing:.3f} s; "
        f"padding of the target {found.padding:.1%}"
    )
    for name, seconds in (("read a row (target)", found.reading), ("anchors and blocks (drafter)", found.blocks)):
        print(f"{name}: {seconds * 1000:.2f} ms of CPU, {seconds / arguments.step:.2%} of a step of {arguments.step} s")
    print(
        f"{found.block_rows} block rows a micro-batch; {found.block_padding:.1%} more are padding to a bucket of them"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
