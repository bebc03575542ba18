"""Greedy speculative decoding: draft a block, verify it in one forward of the target, commit what agrees.

The loop and its bounds are those of PyPI dflash 0.1.0 (`spec_generate`), whose `acceptance_lengths` ours equal; here all
prompts advance together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trainer.drafter.inference import DraftBatch
from trainer.drafter.model import Drafter
from trainer.target.decode import Decoder, TargetBatch


@dataclass
class _Sequence:
    """Prompt and committed tokens; the last of them is the anchor, on which the target has not run yet."""

    tokens: list[int]
    limit: int
    acceptance_lengths: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.limit

    def block_size(self, most: int) -> int:
        """Rows of the next block: anchor and guesses, no more than there is room for."""
        return min(most, self.limit - len(self.tokens) + 1)

    def commit(self, guesses: Sequence[int], successors: Sequence[int]) -> int:
        """Commit the leading guesses that equal the target's choice and the target's next one; return how many.

        `successors[k]` follows block row k, whose row 0 is the anchor: guess k+1 is judged by row k.
        """
        agreed = 0
        while agreed < len(guesses) and guesses[agreed] == successors[agreed]:
            agreed += 1
        # The bonus token of a wholly accepted last block would lie beyond the limit.
        committed = min(agreed + 1, self.limit - len(self.tokens))
        self.tokens += [*guesses[:agreed], successors[agreed]][:committed]
        self.acceptance_lengths.append(committed)
        return committed


@torch.inference_mode()
def speculate(
    decoder: Decoder, drafter: Drafter, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """Return for each prompt (its `max_new_tokens` new tokens, the tokens committed by each verification).

    The first new token comes from the prefill and is in no verification.
    """
    sequences = [_Sequence(list(prompt), len(prompt) + max_new_tokens) for prompt in prompts]
    verified, drafted = TargetBatch(decoder), DraftBatch(drafter, len(prompts))
    counts = [len(prompt) for prompt in prompts]
    successors, states = verified.forward(prompts)
    for sequence, row in zip(sequences, successors.tolist(), strict=True):
        sequence.tokens.append(row[len(sequence.tokens) - 1])
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
        guesses = _draft(decoder, drafted, active, drafter.config.block_size)
        successors, states = verified.forward(
            [[sequence.tokens[-1], *guess] for sequence, guess in zip(active, guesses, strict=True)]
        )
        rows = zip(active, guesses, successors.tolist(), strict=True)
        counts = [sequence.commit(guess, row) for sequence, guess, row in rows]
        verified.keep(counts)
    return [
        (sequence.tokens[len(prompt) :], sequence.acceptance_lengths)
        for sequence, prompt in zip(sequences, prompts, strict=True)
    ]


def _draft(decoder: Decoder, drafted: DraftBatch, active: Sequence[_Sequence], most: int) -> list[list[int]]:
    """Draft for every sequence. Blocks near the limit are shorter, and a block's rows see one another: go by size."""
    sizes = [sequence.block_size(most) for sequence in active]
    guesses: list[list[int]] = [[] for _ in active]
    for size in sorted(set(sizes)):
        members = [i for i, own in enumerate(sizes) if own == size]
        anchors = [active[i].tokens[-1] for i in members]
        drafts = drafted.draft(members, anchors, size, decoder.embed_weight, decoder.head_weight)
        for i, draft in zip(members, drafts, strict=True):
            guesses[i] = draft
    return guesses
