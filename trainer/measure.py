"""What an evaluation measures: acceptance, where in the block it ends, speed-up, and whether output is the target's own.

Greedy output equals the target's for ANY drafter; equality says that the decoding is right, acceptance that the drafter is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.choice import Sampling
from trainer.data.progress import Progress
from trainer.drafter.model import Drafter
from trainer.speculate import Report, alone, speculate
from trainer.target.decode import Decoder

GREEDY = Sampling()
BATCH_SIZE = 16
"""Prompts decoded together, as many as the standard set has; 1,000 of 1,000 tokens make 250 GB of cache for a 27B target."""

Prompts = Sequence[Sequence[int]]
Decoded = TypeVar("Decoded")


@dataclass(frozen=True)
class PromptResult:
    """One prompt: new tokens by speculative decoding and by the target alone, committed tokens of each verification.

    `acceptance_lengths` is the list of that name of PyPI dflash 0.1.0: the last entry is cut at the token limit, and
    the token that the prefill yields is in none of them.
    """

    prompt_tokens: int
    output_ids: list[int]
    acceptance_lengths: list[int]
    target_ids: list[int]

    @property
    def identical(self) -> bool:
        """Whether the output is the target's own; by a draw, two right outputs may well differ."""
        return self.output_ids == self.target_ids


@dataclass(frozen=True)
class TargetAlone:
    """The target's own continuation of each prompt, and its wall seconds."""

    outputs: list[list[int]]
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """All prompts for one drafter; `seconds` is the wall time of its speculative decoding, prefill included."""

    results: list[PromptResult]
    block_size: int
    sampling: Sampling
    seconds: float
    target_seconds: float

    @property
    def committed_tokens(self) -> int:
        """Tokens committed by verifications."""
        return sum(sum(result.acceptance_lengths) for result in self.results)

    @property
    def verifications(self) -> int:
        """Forwards of the target over a drafted block."""
        return sum(len(result.acceptance_lengths) for result in self.results)

    @property
    def acceptance(self) -> float:
        """Committed tokens for each verification, pooled over the prompts; 1 is what no drafter at all would give."""
        return self.committed_tokens / max(1, self.verifications)

    @property
    def identical_count(self) -> int:
        """Prompts whose output is the target's own."""
        return sum(result.identical for result in self.results)

    @property
    def speedup(self) -> float:
        """Seconds of the target alone for each second of speculative decoding, the same prompts in the same batches."""
        return self.target_seconds / self.seconds if self.seconds else 0.0

    def acceptance_by_position(self) -> list[float]:
        """Return for k = 1 .. block_size - 1 the share of verifications that accept at least k guesses.

        Of those that have room for k guesses and one token more: near the token limit the rest cannot be seen.
        """
        tried, accepted = [0] * self.block_size, [0] * self.block_size
        for result in self.results:
            room = len(result.output_ids) - 1
            for committed in result.acceptance_lengths:
                for k in range(1, min(self.block_size, room)):
                    tried[k] += 1
                    accepted[k] += committed > k
                room -= committed
        return [yes / max(1, of) for yes, of in zip(accepted[1:], tried[1:], strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Return the figures and every prompt's lists; what equality would say of sampled output is left out."""
        greedy = self.sampling.temperature == 0
        return {
            "acceptance": self.acceptance,
            "acceptance_by_position": self.acceptance_by_position(),
            "committed_tokens": self.committed_tokens,
            "verifications": self.verifications,
            "prompts": len(self.results),
            "identical": self.identical_count == len(self.results) if greedy else None,
            "identical_count": self.identical_count if greedy else None,
            "seconds": self.seconds,
            "target_seconds": self.target_seconds,
            "speedup": self.speedup,
            "results": [vars(result) | ({"identical": result.identical} if greedy else {}) for result in self.results],
        }


def decode_alone(
    decoder: Decoder,
    prompts: Prompts,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    *,
    batch_size: int = BATCH_SIZE,
) -> TargetAlone:
    """Let the target continue every prompt without a drafter, stop tokens ignored."""
    choice = sampling.choice(len(prompts))

    def decode(batch: Prompts, first_place: int, report: Report) -> list[list[int]]:
        return alone(decoder, batch, max_new_tokens, choice, first_place=first_place, report=report)

    begin = time.perf_counter()
    outputs = _in_batches("the target alone", decode, prompts, max_new_tokens, batch_size)
    return TargetAlone(outputs, time.perf_counter() - begin)


def evaluate(
    decoder: Decoder,
    drafter: Drafter,
    prompts: Prompts,
    max_new_tokens: int = 64,
    *,
    sampling: Sampling = GREEDY,
    own: TargetAlone | None = None,
    batch_size: int = BATCH_SIZE,
) -> Evaluation:
    """Decode every prompt with the drafter, stop tokens ignored, and compare with the target alone.

    `own` is what `decode_alone` gives for the same prompts, made here if not given. Prompts are decoded `batch_size`
    at once; what is drawn goes by a prompt's place in the whole list, so that the size changes nothing but the speed.
    """
    own = own or decode_alone(decoder, prompts, max_new_tokens, sampling, batch_size=batch_size)
    choice = sampling.choice(len(prompts))

    def decode(batch: Prompts, first_place: int, report: Report) -> list[tuple[list[int], list[int]]]:
        return speculate(decoder, drafter, batch, max_new_tokens, choice, first_place=first_place, report=report)

    begin = time.perf_counter()
    decoded = _in_batches("with the drafter", decode, prompts, max_new_tokens, batch_size)
    seconds = time.perf_counter() - begin
    results = [
        PromptResult(len(prompt), output_ids, lengths, target_ids)
        for prompt, (output_ids, lengths), target_ids in zip(prompts, decoded, own.outputs, strict=True)
    ]
    return Evaluation(results, drafter.config.block_size, sampling, seconds, own.seconds)


def _in_batches(
    what: str,
    decode: Callable[[Prompts, int, Report], list[Decoded]],
    prompts: Prompts,
    max_new_tokens: int,
    batch_size: int,
) -> list[Decoded]:
    """Decode `batch_size` prompts after the other, and show how far it is."""
    decoded: list[Decoded] = []
    done = 0
    with Progress(what, len(prompts)) as progress:

        def report(tokens: int, items: int = 0) -> None:
            nonlocal done
            done += tokens
            progress.add(items, tokens, share=done / (len(prompts) * max_new_tokens))

        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            decoded += decode(batch, first, report)
            report(0, len(batch))
    return decoded
