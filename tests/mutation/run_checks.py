"""The rest of docs/algorithm.md written out a second time: target, data, schedule, optimizer, checkpoints."""

from __future__ import annotations

import math
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from remote.protocol.errors import DflashError
from trainer import checkpoint_files
from trainer.choice import Greedy
from trainer.config import TrainConfig
from trainer.data import rows as packing
from trainer.data.chunks import Chunk, Supervision
from trainer.data.scan import scan_chunk
from trainer.data.schedule import Layout, Packing, Schedule
from trainer.drafter.config import default_target_layer_ids, derive, gamma_for
from trainer.export_speculators import speculators_config, zlab_of
from trainer.on_policy import on_policy_rate
from trainer.optimizer import StepOptimizer, learning_rate
from trainer.pipeline import reader
from trainer.pipeline.held_out import checkpoint_due
from trainer.pipeline.packed import PackBuffer
from trainer.speculate import _last, _Sequence
from trainer.target.batch import PlainBatch
from trainer.target.capture import Target
from trainer.target.decode import Decoder


@cache
def fixed_target() -> tuple[Target, torch.Tensor, tuple[torch.Tensor, ...]]:
    torch.manual_seed(6)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 2}
    stack = LlamaModel(LlamaConfig(**sizes, vocab_size=40)).eval()
    facts: Any = SimpleNamespace(hybrid=False)
    ids = torch.randint(40, (2, 7))
    return Target(stack, facts, (1, 3)), ids, stack(input_ids=ids, output_hidden_states=True).hidden_states


def check_capture() -> None:
    target, ids, hidden_states = fixed_target()
    for layer, states in zip((1, 3), target.capture(ids), strict=True):
        torch.testing.assert_close(states, hidden_states[layer + 1], rtol=0, atol=0)


@torch.no_grad()
def check_cache() -> None:
    """Tokens are appended and taken back; what stays gives the states of a forward over these tokens alone."""
    target, _, _ = fixed_target()
    batch = PlainBatch(target)
    batch.append([[5, 6, 7, 8], [9, 10]])
    batch.append([[11, 12, 13], [14, 15, 16]])
    batch.keep([1, 2])
    got = batch.append([[17, 18], [19, 20]])
    for n, tokens in enumerate(([5, 6, 7, 8, 11, 17, 18], [9, 10, 14, 15, 19, 20])):
        wanted = target.stack(input_ids=torch.tensor([tokens])).last_hidden_state
        torch.testing.assert_close(got.hidden[n], wanted[0, -2:], rtol=0, atol=1e-5)


def check_acceptance() -> None:
    """Guesses, the target's choice behind each row, room: committed are those that agree and one more, never beyond."""
    for guesses, successors, room, tokens in (
        ([4, 5, 6], [9, 5, 6, 7], 9, [9]),
        ([4, 5, 6], [4, 5, 6, 7], 9, [4, 5, 6, 7]),
        ([4, 5, 6], [4, 8, 6, 7], 9, [4, 8]),
        ([4, 5, 6], [4, 5, 6, 7], 3, [4, 5, 6]),
        ([4], [4, 5], 1, [4]),
    ):
        sequence = _Sequence(0, [1, 2], 2 + room)
        logits = torch.nn.functional.one_hot(torch.tensor([successors]), 10).float()
        (verdict,) = Greedy().judge([0], [guesses], logits)
        assert sequence.commit(guesses, verdict) == len(tokens)
        assert sequence.tokens == [1, 2, *tokens]
    # A block is the anchor and as many guesses as there is room for.
    assert [_Sequence(0, [1] * 5, 5 + room).block_size(4) for room in (1, 2, 3, 9)] == [2, 3, 4, 4]
    rows = torch.arange(8.0).view(2, 4, 1)
    assert _last(rows, [4, 2]).flatten().tolist() == [3, 5]


class _Documents(list[Any]):
    """The part of a data set that is asked for here."""

    document = list[Any].__getitem__


@torch.no_grad()
def check_on_policy() -> None:
    """A label counts where it is the target's most likely token behind the tokens before it."""
    target, ids, _ = fixed_target()
    head = torch.randn(40, 16, generator=torch.Generator().manual_seed(8))
    choices = (target.stack(input_ids=ids).last_hidden_state @ head.T).argmax(dim=-1)
    # A document that is the target's own from its fourth token on, by construction; the first label has nothing before it.
    tokens = ids[0].clone()
    for place in range(3, 7):
        behind = target.stack(input_ids=tokens[None, :place]).last_hidden_state[0, -1]
        tokens[place] = (head @ behind).argmax()
    assert tokens[1] != choices[0, 0]
    mask = np.array([1, 1, 0, 1, 1, 1, 1], dtype=np.uint8)
    documents = [SimpleNamespace(input_ids=tokens.numpy().astype(np.int32), loss_mask=mask)]
    dataset: Any = _Documents(documents)
    rate = on_policy_rate(Decoder(target, head, head), dataset, 1, seed=0)
    assert (rate.labels, rate.agreeing) == (5, 4)


def check_served_layer_ids() -> None:
    """In z-lab's layout ids count from zero, in the speculators layout from one."""
    target = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 9,
        "num_attention_heads": 1,
        "vocab_size": 40,
    }
    shape = derive(target, num_layers=1, block_size=4, mask_token_id=3, target_layer_ids=(1, 5))
    served = speculators_config(shape, "float32", "target", ("LlamaForCausalLM",))
    assert shape.to_zlab("float32")["dflash_config"]["target_layer_ids"] == [1, 5]
    assert served["aux_hidden_state_layer_ids"] == [2, 6]
    assert served["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert zlab_of(served)["dflash_config"]["target_layer_ids"] == [1, 5]


def check_layer_ids() -> None:
    chosen = [default_target_layer_ids(*each) for each in ((64, 5), (36, 5), (10, 1))]
    assert chosen == [(1, 16, 31, 46, 61), (1, 9, 17, 25, 33), (5,)]
    assert [gamma_for(size) for size in (16, 10, 8)] == [7, 5, 4]
    target = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 9, "num_attention_heads": 1}
    shape: dict[str, Any] = {"num_layers": 1, "block_size": 4, "mask_token_id": 3}

    def refused(vocab_size: int, layer: int) -> bool:
        try:
            derive(target | {"vocab_size": vocab_size}, **shape, target_layer_ids=(layer,))
        except DflashError:
            return True
        return False

    # The last layer's output is seen behind the final norm alone; a mask token needs a row of the embedding.
    assert [refused(40, 7), refused(40, 8), refused(4, 7), refused(3, 7)] == [False, True, False, True]


def read_row(*lengths: int) -> reader.ReadRow:
    """Read documents of these lengths as one row; the t-th token of a document of n is 10n + t."""
    documents = [
        SimpleNamespace(input_ids=np.arange(n, dtype=np.int32) + 10 * n, loss_mask=np.ones(n)) for n in lengths
    ]
    source: Any = SimpleNamespace(document=documents.__getitem__)
    row = SimpleNamespace(documents=tuple(range(len(lengths))))
    batch: Any = SimpleNamespace(b=0, step=1, epoch=0, row=row)
    return reader.RowReader(source, bucket_tokens=4).read(batch)


def check_packing() -> None:
    """Tokens, positions and states of documents of different lengths meet in the packed row, padding behind them."""
    read = read_row(5, 3)
    assert read.padded[0].tolist()[:5] == [50, 51, 52, 53, 54]
    assert read.padded[1].tolist()[:3] == [30, 31, 32]
    assert read.row.input_ids[:8].tolist() == [50, 51, 52, 53, 54, 30, 31, 32]
    assert read.row.position_ids[:8].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    # States that are the token's own number: position t of the row must hold token t's.
    for split in (False, True):
        buffer = PackBuffer.allocate(12, 2, 1, split=split, dtype=torch.float32, device=torch.device("cpu"))
        buffer.storage.fill_(9)
        states = read.padded[..., None].float()
        packed = buffer.pack([states, -states], read.lengths, 12)
        both = packed[..., 0] if split else packed.T
        assert both.tolist() == [
            [*read.row.input_ids[:8].tolist(), *[0] * 4],
            [*(-read.row.input_ids[:8]).tolist(), *[0] * 4],
        ]


def check_buckets() -> None:
    """Few lengths exist, each the next multiple: kernels are tuned for these and for no more."""
    assert [reader.packed_length(tokens, 128) for tokens in (1, 127, 128, 129)] == [128, 128, 128, 256]
    # The target's batches: 16 widths an octave, in steps of 128 at most.
    widths = sorted({packing.padded_width(length, 128) for length in range(1, 4097)})
    assert widths == [*range(1, 32), *range(32, 64, 2), *range(64, 128, 4), *range(128, 256, 8), *range(256, 512, 16),
                      *range(512, 1024, 32), *range(1024, 2048, 64), *range(2048, 4097, 128)]  # fmt: skip
    assert all(length <= packing.padded_width(length, 128) for length in range(1, 4097))
    assert read_row(33, 30).padded.shape == (2, 34)


def check_lengths() -> None:
    """Documents of 1, 2, 3 and more tokens, cut at 6: each counted as if it were alone."""
    lengths = [1, 2, 3, 9, 6, 7]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(offsets[-1], dtype=np.uint8)
    mask[[2, 8]] = 0
    chunk = Chunk(np.arange(offsets[-1]), offsets, Supervision.LOSS_MASK, mask, Path("a"), np.arange(1, 7))
    scan = scan_chunk(chunk, 6, None)
    assert scan.lengths.tolist() == [1, 2, 3, 6, 6, 6]
    for i, length in enumerate(scan.lengths):
        own = mask[offsets[i] : offsets[i] + length]
        assert scan.supervised[i] == own.sum()
        assert scan.candidates[i] == sum(own[t] and own[t + 1] for t in range(length - 1))
    rows = packing.pack_rows(
        np.array([6, 6, 5, 3, 2, 2]), np.ones(6), seed=0, epoch=0, token_budget=12, bucket_tokens=1
    )
    assert all(len(row.documents) * max([6, 6, 5, 3, 2, 2][d] for d in row.documents) <= 12 for row in rows)
    assert len(rows) == 3


def check_schedule() -> None:
    """Every micro-batch once, in order, over the ends of epochs and steps; a resumed run goes on at the next one."""
    lengths = np.full(5, 4, dtype=np.int32)
    source = Packing(lengths, lengths, seed=0, token_budget=4, bucket_tokens=4)
    schedule = Schedule(source, Layout(1, 2, 2, False), epochs=2, micro_batches_per_step=3)
    assert (schedule.total_micro_batches, schedule.total_steps) == (10, 4)
    dealt = [(each.b, each.epoch) for step in range(1, 5) for each in schedule.step(step)]
    assert dealt == [(b, b // 5) for b in range(10)]
    for epoch in (0, 1):
        assert sorted(schedule.row(b).documents for b in range(5 * epoch, 5 * epoch + 5)) == [(i,) for i in range(5)]
    resumed = [each.b for drafter in (0, 1) for each in schedule.for_drafter(0, drafter, first_step=3)]
    assert sorted(resumed) == [6, 7, 8, 9]


SETTINGS = TrainConfig(lr=0.1, warmup_ratio=0.25, max_grad_norm=1.0, on_nan="continue")


def check_rate() -> None:
    rates = [learning_rate(step, 8, SETTINGS) for step in range(1, 9)]
    cosine = [0.05 * (1 + math.cos(math.pi * i / 6)) for i in range(6)]
    assert rates == pytest.approx([0.05, 0.1, *cosine])
    assert rates[-1] > 0


def own_steps(last: int, resume_at: int = 0, bad: int = 0) -> torch.Tensor:
    """Return a weight after steps 1..last by our optimizer, saved and restored after `resume_at`; a NaN in step `bad`."""
    linear = torch.nn.Linear(2, 1, bias=False).double()
    torch.nn.init.constant_(linear.weight, 0.5)
    optimizer = StepOptimizer(linear, SETTINGS, 8)
    for step in range(1, last + 1):
        linear.weight.grad = gradient_of(step) / 2 if step != bad else torch.full((1, 2), math.nan).double()
        # Two drafters: the gradient at hand is their average, and the step's positions weigh 5.
        one, weight = torch.tensor(1.0), torch.tensor(5.0)
        optimizer.apply(step, loss_sum=one, weight_sum=weight, drafters=2)
        if step == resume_at:
            moments, rest = optimizer.state_dict(), linear.weight.detach().clone()
            linear = torch.nn.Linear(2, 1, bias=False).double()
            linear.weight.data.copy_(rest)
            optimizer = StepOptimizer(linear, SETTINGS, 8)
            optimizer.load_state_dict(moments)
    return linear.weight.detach()


def gradient_of(step: int) -> torch.Tensor:
    return torch.tensor([[3.0 * step, -7.0]], dtype=torch.float64)


def plain_steps(steps: list[int]) -> torch.Tensor:
    """The same with torch's AdamW and everything around it by hand."""
    weight = torch.nn.Parameter(torch.full((1, 2), 0.5, dtype=torch.float64))
    adamw = torch.optim.AdamW([weight], betas=(SETTINGS.beta1, SETTINGS.beta2), weight_decay=SETTINGS.weight_decay)
    for step in steps:
        mean = gradient_of(step) / 5
        weight.grad = mean * min(1.0, 1.0 / (float(mean.norm()) + 1e-6))
        adamw.param_groups[0]["lr"] = learning_rate(step, 8, SETTINGS)
        adamw.step()
    return weight.detach()


def check_optimizer() -> None:
    wanted = plain_steps([1, 2, 3, 4, 5])
    torch.testing.assert_close(own_steps(5), wanted, rtol=0, atol=1e-9)
    torch.testing.assert_close(own_steps(5, resume_at=3), wanted, rtol=0, atol=1e-9)
    torch.testing.assert_close(own_steps(4, bad=3), plain_steps([1, 2, 4]), rtol=0, atol=1e-9)


def check_empty_step() -> None:
    """A step without a supervised position is not applied, and is no failure."""
    linear = torch.nn.Linear(2, 1, bias=False)
    before = linear.weight.detach().clone()
    linear.weight.grad = torch.zeros(1, 2)
    outcome = StepOptimizer(linear, SETTINGS, 8).apply(
        1, loss_sum=torch.zeros(()), weight_sum=torch.zeros(()), drafters=1
    )
    assert outcome.skipped == 1
    assert torch.equal(linear.weight, before)


def check_saving() -> None:
    """Checkpoints every 3 steps and at the last one, whatever the interval."""
    every_third = TrainConfig(checkpoint_every=3)
    assert [step for step in range(1, 8) if checkpoint_due(every_third, step, 7)] == [3, 6, 7]


def check_complete_checkpoints() -> None:
    """A directory counts when its state file is there, and only under a checkpoint's full name."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for step, complete in (("step-00000001", True), ("step-00000002", False), (".step-00000003", True)):
            (place / step).mkdir()
            (place / step / (checkpoint_files.STATE_FILE if complete else "drafter.safetensors")).touch()
        assert [each.name for each in checkpoint_files.list_checkpoints(place)] == ["step-00000001"]
