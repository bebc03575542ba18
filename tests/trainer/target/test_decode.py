"""A batch of sequences in one cache: what was taken back leaves no trace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.target.decode import TargetBatch, load_decoder

TOKENS = st.lists(st.integers(3, 47), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def decoder(make_target):
    return load_decoder(make_target(), dtype=torch.float64, device="cpu", target_layer_ids=(1, 3))


@torch.inference_mode()
def alone(decoder, tokens):
    """Return successors and states of a whole sequence in one forward."""
    successors, states = TargetBatch(decoder).forward([tokens])
    return successors[0], states[0]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(TOKENS, min_size=2, max_size=3),
    rounds=st.lists(
        st.tuples(st.lists(TOKENS, min_size=3, max_size=3), st.lists(st.integers(0, 4), min_size=3)), max_size=3
    ),
    last=st.lists(TOKENS, min_size=3, max_size=3),
)
def test_any_history_of_rollbacks_equals_the_kept_tokens_alone(decoder, prompts, rounds, last):
    kept = [list(prompt) for prompt in prompts]
    with torch.inference_mode():
        batch = TargetBatch(decoder)
        batch.forward(prompts)
        for tried, counts in rounds:
            tokens = tried[: len(kept)]
            batch.forward(tokens)
            batch.keep(counts[: len(kept)])
            for own, new, count in zip(kept, tokens, counts, strict=False):
                own += new[:count]
        final = last[: len(kept)]
        successors, states = batch.forward(final)
    for i, (own, new) in enumerate(zip(kept, final, strict=True)):
        wanted_successors, wanted_states = alone(decoder, own + new)
        assert successors[i, : len(new)].tolist() == wanted_successors[-len(new) :].tolist()
        torch.testing.assert_close(states[i, : len(new)], wanted_states[-len(new) :], rtol=1e-10, atol=1e-10)


def test_selected_sequences_go_on_alone(decoder):
    with torch.inference_mode():
        batch = TargetBatch(decoder)
        batch.forward([[3, 4, 5], [6], [7, 8]])
        batch.select([2, 0])
        _, states = batch.forward([[9], [10]])
    for i, tokens in enumerate([[7, 8, 9], [3, 4, 5, 10]]):
        torch.testing.assert_close(states[i, 0], alone(decoder, tokens)[1][-1], rtol=1e-10, atol=1e-10)


def test_greedy_feeds_each_choice_back(decoder):
    prompts = [[3, 4, 5], [6]]
    for prompt, reply in zip(prompts, decoder.greedy(prompts, 6), strict=True):
        successors, _ = alone(decoder, [*prompt, *reply])
        assert reply == successors[len(prompt) - 1 : -1].tolist()
        assert len(reply) == 6


@pytest.mark.parametrize("call", ["keep", "select"])
def test_an_empty_batch_has_nothing_to_take_back(decoder, call):
    with pytest.raises(RuntimeError, match="nothing was appended"):
        getattr(TargetBatch(decoder), call)([0])
