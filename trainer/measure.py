"""What an evaluation measures: acceptance, where in the block it ends, speed-up, and whether output is the target's own.

Greedy output equals the target's for ANY drafter; equality says that the decoding is right, acceptance that the drafter is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.choice import Sampling
from trainer.drafter.model import Drafter
from trainer.speculate import alone, speculate
from trainer.target.decode import Decoder

GREEDY = Sampling()


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
    """The target's own continuation of each prompt, all in one batch, and its wall seconds."""

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
        """Seconds of the target alone for each second of speculative decoding, the same prompts in one batch both times."""
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
    decoder: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling = GREEDY
) -> TargetAlone:
    """Let the target continue every prompt without a drafter, stop tokens ignored."""
    begin = time.perf_counter()
    outputs = alone(decoder, prompts, max_new_tokens, sampling.choice(len(prompts)))
    return TargetAlone(outputs, time.perf_counter() - begin)


def evaluate(
    decoder: Decoder,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    *,
    sampling: Sampling = GREEDY,
    own: TargetAlone | None = None,
) -> Evaluation:
    """Decode every prompt with the drafter, stop tokens ignored, and compare with the target alone.

    `own` is what `decode_alone` gives for the same prompts, made here if not given.
    """
    own = own or decode_alone(decoder, prompts, max_new_tokens, sampling)
    begin = time.perf_counter()
    decoded = speculate(decoder, drafter, prompts, max_new_tokens, sampling.choice(len(prompts)))
    seconds = time.perf_counter() - begin
    results = [
        PromptResult(len(prompt), output_ids, lengths, target_ids)
        for prompt, (output_ids, lengths), target_ids in zip(prompts, decoded, own.outputs, strict=True)
    ]
    return Evaluation(results, drafter.config.block_size, sampling, seconds, own.seconds)
