"""`python -m benchmarks.split_fc --shape demo`: what split-fc costs and saves, on the target's side and on the drafter's.

The target's side packs the captured layers of a micro-batch. The drafter's side is a whole forward and backward behind
these states. Memory is what exists at its peak beyond what both forms were given: states, weights and gradients.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.random_target import QWEN36_27B, TOY
from trainer.drafter.blocks import Blocks, build_blocks
from trainer.drafter.config import DrafterConfig, derive, gamma_for
from trainer.drafter.model import Drafter
from trainer.drafter.noise import Noise
from trainer.drafter.step import drafter_forward
from trainer.pipeline.packed import PackBuffer, as_states


@dataclass(frozen=True)
class Shape:
    """A target's text config, what is derived for its drafter, and the tokens and most anchors of a micro-batch."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    tokens: int
    row_anchors: int


SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_theta": 100_000.0,
}
# Drafters of the public 27B configuration, of the demo, and one for tests.
_LARGE = {"num_layers": 5, "block_size": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SHAPES = {
    "toy": Shape(TOY, {"num_layers": 2, "block_size": 4, "num_target_layer_ids": 3}, 256, 32),
    "demo": Shape(SMOLLM2_135M, {"num_layers": 2, "block_size": 8, "num_target_layer_ids": 5}, 1024, 128),
    "qwen3.6-27b": Shape(QWEN36_27B, _LARGE | {"num_target_layer_ids": 5}, 4096, 512),
}
_DOCUMENTS = 4
_MIB = 1 << 20
SIDES = ("target", "drafter")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# glibc's highest threshold, which it comes to by itself in a process that frees large blocks.
_USUAL = 32 << 20


@dataclass(frozen=True)
class Figures:
    """One side of one form: tokens per second (fastest round) and peak bytes beyond what it was given."""

    side: str
    split: bool
    tokens_per_second: float
    peak_bytes: int


@dataclass
class Bench:
    """A drafter in the type that trains, the ends it borrows, and the states of one micro-batch as a target captures them."""

    config: DrafterConfig
    drafter: Drafter
    embed: torch.Tensor
    head: torch.Tensor
    blocks: Blocks
    captured: list[torch.Tensor]
    noise: Noise

    @classmethod
    def make(cls, shape: str, device: torch.device, dtype: torch.dtype, noise_std: float) -> Bench:
        """Draw everything on `device`; float32 masters, states and ends in `dtype`."""
        kind = SHAPES[shape]
        tokens, captured = kind.tokens, kind.drafter["num_target_layer_ids"]
        config = derive(kind.target, mask_token_id=kind.target["vocab_size"] - 1, **kind.drafter)
        torch.manual_seed(0)
        with device:
            # 25 GB of float32 would be drawn on the host first and copied.
            drafter = Drafter(config)
            embed, head = torch.randn(2, config.vocab_size, config.hidden_size, dtype=dtype).mul_(0.02).unbind()
            states = torch.randn(captured, _DOCUMENTS, tokens // _DOCUMENTS, config.hidden_size, dtype=dtype)
        blocks = _blocks(config, tokens, kind.row_anchors).to(device)
        return cls(config, drafter, embed, head, blocks, list(states.unbind()), Noise(noise_std, 0, 0))

    @property
    def tokens(self) -> int:
        return len(self.blocks.context_positions)

    def buffer(self, split: bool) -> PackBuffer:
        first = self.captured[0]
        layers, width = len(self.captured), self.config.hidden_size
        return PackBuffer.allocate(self.tokens, layers, width, split=split, dtype=first.dtype, device=first.device)

    def pack(self, buffer: PackBuffer) -> torch.Tensor:
        """The target's side: gather the documents of every captured layer into the form that travels."""
        return buffer.pack(self.captured, [self.tokens // _DOCUMENTS] * _DOCUMENTS, self.tokens)

    def train(self, packed: torch.Tensor, split: bool) -> torch.Tensor:
        """The drafter's side: forward and backward; returns the loss sum."""
        narrow = packed.dtype == torch.bfloat16
        with torch.autocast(packed.device.type, torch.bfloat16, enabled=narrow):
            sums = drafter_forward(
                self.drafter,
                self.embed,
                self.head,
                as_states(packed, split=split),
                self.blocks,
                num_target_layer_ids=len(self.captured),
                chunk_rows=2048,
                noise=self.noise,
            )
        sums.loss_sum.backward()
        return sums.loss_sum.detach()

    @torch.no_grad()
    def difference(self) -> float:
        """Return the largest difference of the context features between the forms, in float32 at unit scale."""
        wide = [layer.float() for layer in self.captured]
        forms = Bench(self.config, self.drafter, self.embed, self.head, self.blocks, wide, self.noise)
        off, on = (
            self.drafter.context_features(as_states(forms.pack(forms.buffer(split)), split=split))
            for split in (False, True)
        )
        return float((on - off).abs().max())


def _blocks(config: DrafterConfig, tokens: int, row_anchors: int) -> Blocks:
    length = tokens // _DOCUMENTS
    return build_blocks(
        np.random.default_rng(0).integers(config.mask_token_id, size=tokens).astype(np.int32),
        np.ones(tokens, dtype=np.uint8),
        np.repeat(np.arange(_DOCUMENTS), length),
        np.tile(np.arange(length, dtype=np.int32), _DOCUMENTS),
        seed=0,
        epoch=0,
        num_anchors=row_anchors,
        row_budget=row_anchors * config.block_size,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        gamma=gamma_for(config.block_size),
    )


def map_allocations(size: int) -> None:
    """Let glibc give each allocation of `size` bytes and more a mapping of its own, which ends with it.

    What lies in the heap instead stays resident when it is freed and is handed out again unseen. So this comes before the
    first large tensor where memory is measured; where time is, mapping anew for each tensor would cost some.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, size)
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * size)


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Return the bytes that existed at the peak of `work` beyond what existed before it."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    # 5: reset the high-water mark (proc(5)).
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _resident()["VmRSS"]
    work()
    return max(0, _resident()["VmHWM"] - before)


def _resident() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[0] in ("VmHWM:", "VmRSS:")}


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return how long `work` takes, on a GPU until it is done there."""
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def measure(bench: Bench, rounds: int) -> list[Figures]:
    """Measure both sides of both forms: memory first, then the time."""
    device = bench.embed.device
    packed = {split: bench.pack(bench.buffer(split)) for split in (False, True)}
    # Gradients exist from here on, and kernels have been chosen.
    bench.train(packed[False], False)
    work = {(side, split): partial(_work, bench, side, packed[split], split) for side in SIDES for split in packed}
    peaks = {key: peak_bytes(device, each) for key, each in work.items()}
    map_allocations(_USUAL)
    taken: dict[tuple[str, bool], list[float]] = {key: [] for key in work}
    # They take turns, so that a machine that slows down slows down all. The first round is not counted.
    for _ in range(rounds + 1):
        for key, each in work.items():
            taken[key].append(seconds(device, each))
    return [Figures(*key, bench.tokens / min(taken[key][1:]), peaks[key]) for key in work]


def _work(bench: Bench, side: str, packed: torch.Tensor, split: bool) -> None:
    # The buffer is the target's whole cost, so it is allocated within what is measured.
    if side == "target":
        bench.pack(bench.buffer(split))
    else:
        bench.train(packed, split)


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for and print a table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split_fc", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda[:N]")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of states and products")
    parser.add_argument("--noise-std", type=float, default=0.0, help="noise on the states (default 0)")
    parser.add_argument("--rounds", type=int, default=5, help="the fastest of so many counts (default 5)")
    arguments = parser.parse_args(argv)
    map_allocations(1 << 16)
    bench = Bench.make(
        arguments.shape, torch.device(arguments.device), getattr(torch, arguments.dtype), arguments.noise_std
    )
    print(
        f"{arguments.shape}, {bench.tokens} tokens, {bench.blocks.count} blocks, {arguments.dtype}, {arguments.device}"
    )
    print(f"{'side':<8} {'split-fc':<8} {'tok/s':>10} {'peak MiB':>9}")
    for each in measure(bench, arguments.rounds):
        form = "on" if each.split else "off"
        print(f"{each.side:<8} {form:<8} {each.tokens_per_second:10,.0f} {each.peak_bytes / _MIB:9.1f}")
    print(f"largest difference of the features, float32 at unit scale: {bench.difference():.2e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
