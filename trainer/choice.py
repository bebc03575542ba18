"""Which token comes next: the target's most likely one, or a draw that follows the target's distribution exactly.

Rejection sampling as in Leviathan et al. (arXiv 2211.17192, Algorithm 1) and in PyPI dflash 0.1.0: a guess x drawn from
the drafter's q is accepted with probability min(1, p(x)/q(x)); behind the first refusal the token is drawn from
max(0, p - q), normalised. So the output is distributed as the target's own, whatever the drafter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from remote.protocol.errors import usage_error


class Verdict(NamedTuple):
    """What a verification says of a block: how many leading guesses are accepted, and the token behind them."""

    accepted: int
    token: int


class Choice(Protocol):
    """A way of choosing tokens for sequences that are named by their place in the list of prompts."""

    def next_tokens(self, sequences: Sequence[int], logits: torch.Tensor) -> list[int]:
        """Choose one token for each sequence by the target's logits f[k, V]."""
        ...

    def guesses(self, sequences: Sequence[int], logits: torch.Tensor) -> list[list[int]]:
        """Choose a block's guesses by the drafter's logits f[k, m, V]."""
        ...

    def judge(self, sequences: Sequence[int], guesses: Sequence[Sequence[int]], logits: torch.Tensor) -> list[Verdict]:
        """Judge each sequence's guesses by the target's logits f[k, m, V]: row j judges guess j, m > its guesses."""
        ...


class Greedy:
    """The most likely token always; the lowest id wins a tie."""

    def next_tokens(self, sequences: Sequence[int], logits: torch.Tensor) -> list[int]:
        """See `Choice`."""
        return logits.argmax(dim=-1).tolist()

    def guesses(self, sequences: Sequence[int], logits: torch.Tensor) -> list[list[int]]:
        """See `Choice`."""
        return logits.argmax(dim=-1).tolist()

    def judge(self, sequences: Sequence[int], guesses: Sequence[Sequence[int]], logits: torch.Tensor) -> list[Verdict]:
        """See `Choice`."""
        return [_agree(own, row) for own, row in zip(guesses, logits.argmax(dim=-1).tolist(), strict=True)]


def _agree(guesses: Sequence[int], successors: Sequence[int]) -> Verdict:
    """Accept the leading guesses that are the target's choice; `successors[k]` follows block row k, the anchor's is 0."""
    accepted = 0
    while accepted < len(guesses) and guesses[accepted] == successors[accepted]:
        accepted += 1
    return Verdict(accepted, successors[accepted])


@dataclass(frozen=True)
class Sampling:
    """Draw from softmax(logits / temperature), cut to the smallest set of tokens whose probability reaches `top_p`.

    Temperature 0 is greedy. Raises DflashError (usage) for a temperature below 0 or a top_p outside (0, 1].
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise usage_error(f"temperature is {self.temperature}", hint="0 for greedy, else a positive number")
        if not 0 < self.top_p <= 1:
            raise usage_error(f"top-p is {self.top_p}", hint="above 0, at most 1")

    def choice(self, count: int) -> Choice:
        """Return a fresh choice for `count` sequences."""
        return Sampled(self, count) if self.temperature else Greedy()

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the distribution f[..., V] that is drawn from, float32 at least."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        probabilities = torch.softmax(wide / self.temperature, dim=-1)
        if self.top_p == 1:
            return probabilities
        ordered, order = probabilities.sort(dim=-1, descending=True)
        # What lies before a token decides, so that the most likely one always stays.
        kept = ordered * (ordered.cumsum(dim=-1) - ordered < self.top_p)
        cut = torch.zeros_like(probabilities).scatter(-1, order, kept)
        return cut / cut.sum(dim=-1, keepdim=True)


class Sampled:
    """Draws, with a stream of random numbers for each sequence: the same in any batch, (seed, place) decide."""

    def __init__(self, sampling: Sampling, count: int) -> None:
        self._sampling = sampling
        self._streams = [_stream(sampling.seed, place) for place in range(count)]
        self._drafted: dict[int, torch.Tensor] = {}

    def next_tokens(self, sequences: Sequence[int], logits: torch.Tensor) -> list[int]:
        """See `Choice`."""
        uniforms = self._uniforms(sequences, 1, logits.device)
        return draw(self._sampling.probabilities(logits), uniforms[:, 0]).tolist()

    def guesses(self, sequences: Sequence[int], logits: torch.Tensor) -> list[list[int]]:
        """See `Choice`. The drafter's distributions are kept until the guesses are judged."""
        drafted = self._sampling.probabilities(logits)
        self._drafted |= zip(sequences, drafted, strict=True)
        return draw(drafted, self._uniforms(sequences, logits.shape[1], logits.device)).tolist()

    def judge(self, sequences: Sequence[int], guesses: Sequence[Sequence[int]], logits: torch.Tensor) -> list[Verdict]:
        """See `Choice`."""
        verdicts: dict[int, Verdict] = {}
        # Blocks near the limit are shorter.
        for size in {len(own) for own in guesses}:
            rows = [row for row, own in enumerate(guesses) if len(own) == size]
            members = [sequences[row] for row in rows]
            target = self._sampling.probabilities(logits[rows, : size + 1])
            tried = torch.tensor([guesses[row] for row in rows], dtype=torch.long, device=logits.device)
            drafted = torch.stack([self._drafted.pop(member) for member in members]) if size else target[:, :0]
            uniforms = self._uniforms(members, size + 1, logits.device)
            accepted, tokens = verify(tried, target, drafted, uniforms)
            judged = zip(rows, accepted.tolist(), tokens.tolist(), strict=True)
            verdicts |= {row: Verdict(count, token) for row, count, token in judged}
        return [verdicts[row] for row in range(len(guesses))]

    def _uniforms(self, sequences: Sequence[int], count: int, device: torch.device) -> torch.Tensor:
        drawn = np.stack([self._streams[place].random(count) for place in sequences])
        return torch.from_numpy(drawn).to(device)


def verify(
    guesses: torch.Tensor, target: torch.Tensor, drafted: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Judge k blocks of m guesses; returns (accepted i64[k], the token behind them i64[k]).

    Args:
        guesses: i64[k, m], drawn from `drafted`.
        target: f[k, m + 1, V], the target's distributions; row j judges guess j, the last one gives the bonus token.
        drafted: f[k, m, V], the drafter's distributions.
        uniforms: f64[k, m + 1] in [0, 1).
    """
    count = guesses.shape[1]
    wanted = target[:, :count].gather(-1, guesses[..., None])[..., 0]
    offered = drafted.gather(-1, guesses[..., None])[..., 0]
    # u < p/q without the division: q of a drawn token is above 0, but may be tiny.
    agreed = uniforms[:, :count] * offered < wanted
    accepted = agreed.long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(guesses), device=guesses.device)
    # Behind a block that is accepted whole nothing was drafted: q is 0 there, and the bonus token is drawn from p.
    unread = torch.cat([drafted, torch.zeros_like(target[:, :1])], dim=1)[rows, accepted]
    rest = (target[rows, accepted] - unread).clamp_min(0)
    # Where p equals q nothing is refused but by rounding.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target[rows, accepted])
    return accepted, draw(rest, uniforms[:, count])


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw i64[...] from weights f[..., V], which need not sum to 1, by uniforms f64[...] in [0, 1)."""
    # In float64: float32 sums over 248,320 entries end about 1e-5 beside 1 and swallow the rare tokens.
    cumulative = weights.double().cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, (uniforms.double() * cumulative[..., -1])[..., None], right=True)[..., 0]
    # A draw that rounds up to the sum: the last token that has weight, never one without.
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).long().argmax(dim=-1)
    return torch.minimum(drawn, last)


def _stream(seed: int, place: int) -> np.random.Generator:
    digest = hashlib.sha256(f"evaluate:{seed}:{place}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
