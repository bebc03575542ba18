"""Speculative decoding: draft a block, verify it in one forward of the target, commit what is accepted.

The loop and its bounds are those of PyPI dflash 0.1.0 (`spec_generate`), whose `acceptance_lengths` ours equal; here all
prompts advance together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from trainer.choice import Choice, Verdict
from trainer.drafter.inference import DraftBatch
from trainer.drafter.model import Drafter
from trainer.target.decode import Decoder

Report = Callable[[int], None]
"""Told how many tokens were committed, now and then."""


@dataclass
class _Sequence:
    """Prompt and committed tokens; the last of them is the anchor, on which the target has not run yet."""

    place: int
    tokens: list[int]
    limit: int
    acceptance_lengths: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.limit

    def block_size(self, most: int) -> int:
        """Rows of the next block: anchor and guesses, no more than there is room for."""
        return min(most, self.limit - len(self.tokens) + 1)

    def commit(self, guesses: Sequence[int], verdict: Verdict) -> int:
        """Commit the accepted guesses and the token behind them; return how many."""
        # The bonus token of a wholly accepted last block would lie beyond the limit.
        committed = min(verdict.accepted + 1, self.limit - len(self.tokens))
        self.tokens += [*guesses[: verdict.accepted], verdict.token][:committed]
        self.acceptance_lengths.append(committed)
        return committed


@torch.inference_mode()
def alone(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    choice: Choice,
    *,
    first_place: int = 0,
    report: Report = lambda tokens: None,
) -> list[list[int]]:
    """Return the target's own continuation of each prompt, one token a forward, stop tokens ignored.

    `choice` knows the prompts by their places, of which the first one's is `first_place`.
    """
    batch = decoder.batch(len(prompts))
    places = range(first_place, first_place + len(prompts))
    hidden = _last(batch.append(prompts).hidden, [len(prompt) for prompt in prompts])
    chosen = [[token] for token in choice.next_tokens(places, decoder.logits(hidden))]
    report(len(prompts))
    while len(chosen[0]) < max_new_tokens:
        hidden = batch.append([tokens[-1:] for tokens in chosen]).hidden[:, 0]
        for tokens, token in zip(chosen, choice.next_tokens(places, decoder.logits(hidden)), strict=True):
            tokens.append(token)
        report(len(prompts))
    return chosen


@torch.inference_mode()
def speculate(
    decoder: Decoder,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    choice: Choice,
    *,
    first_place: int = 0,
    report: Report = lambda tokens: None,
) -> list[tuple[list[int], list[int]]]:
    """Return for each prompt (its `max_new_tokens` new tokens, the tokens committed by each verification).

    The first new token comes from the prefill and is in no verification. See `alone` for the last two.
    """
    sequences = [
        _Sequence(place, list(prompt), len(prompt) + max_new_tokens)
        for place, prompt in enumerate(prompts, first_place)
    ]
    verified, drafted = decoder.batch(len(prompts)), DraftBatch(drafter, len(prompts))
    counts = [len(prompt) for prompt in prompts]
    hidden, states = verified.append(prompts)
    first = choice.next_tokens([each.place for each in sequences], decoder.logits(_last(hidden, counts)))
    for sequence, token in zip(sequences, first, strict=True):
        sequence.tokens.append(token)
    report(len(prompts))
    active = sequences
    while True:
        # States of committed tokens only: those of rejected guesses were computed behind wrong tokens.
        drafted.extend(states, counts)
        # Sequences that are done leave the batch: the last one must not pay for the fifteen others.
        going = [i for i, sequence in enumerate(active) if not sequence.finished]
        if not going:
            break
        if len(going) < len(active):
            active = [active[i] for i in going]
            verified.select(going)
            drafted.select(going)
        guesses = _draft(decoder, drafted, active, drafter.config.block_size, choice)
        hidden, states = verified.append(
            [[sequence.tokens[-1], *guess] for sequence, guess in zip(active, guesses, strict=True)]
        )
        verdicts = choice.judge([sequence.place for sequence in active], guesses, decoder.logits(hidden))
        rows = zip(active, guesses, verdicts, strict=True)
        counts = [sequence.commit(guess, verdict) for sequence, guess, verdict in rows]
        verified.keep(counts)
        report(sum(counts))
    return [
        (sequence.tokens[len(prompt) :], sequence.acceptance_lengths)
        for sequence, prompt in zip(sequences, prompts, strict=True)
    ]


def _last(hidden: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return f[k, H]: each sequence's last own row of f[k, m, H]. The head is not asked for the rest of a prompt."""
    return hidden[torch.arange(len(counts)), torch.tensor(counts) - 1]


def _draft(
    decoder: Decoder, drafted: DraftBatch, active: Sequence[_Sequence], most: int, choice: Choice
) -> list[list[int]]:
    """Draft for every sequence. Blocks near the limit are shorter, and a block's rows see one another: go by size."""
    sizes = [sequence.block_size(most) for sequence in active]
    guesses: list[list[int]] = [[] for _ in active]
    # A block of one row has nothing to guess.
    for size in sorted({size for size in sizes if size > 1}):
        members = [i for i, own in enumerate(sizes) if own == size]
        anchors = [active[i].tokens[-1] for i in members]
        hidden = drafted.draft(members, anchors, size, decoder.embed_weight)
        chosen = choice.guesses([active[i].place for i in members], decoder.logits(hidden))
        for i, own in zip(members, chosen, strict=True):
            guesses[i] = own
    return guesses
