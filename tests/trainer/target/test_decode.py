"""Batches of sequences, plain and hybrid: what was taken back leaves no trace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from remote.protocol.errors import DflashError, ExitCode
from trainer.choice import Greedy
from trainer.speculate import alone
from trainer.target.batch import PlainBatch
from trainer.target.decode import load_decoder
from trainer.target.recurrent import RecurrentBatch

TOKENS = st.lists(st.integers(3, 47), min_size=1, max_size=4)
PLAIN = ["LlamaForCausalLM", "Qwen3ForCausalLM"]
HYBRID = ["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"]
# transformers computes a recurrence in float32 whatever the model's dtype, in chunks or token by token; states are up to 27, and
# 5e-4 was seen. A token too many in the state makes 0.1 and more.
TOLERANCE = {**dict.fromkeys(PLAIN, 1e-10), **dict.fromkeys(HYBRID, 2e-3)}


@pytest.fixture(scope="module")
def decoder_of(make_target):
    """Return a function from an architecture to its decoder in float64."""
    made = {}

    def make(architecture):
        if architecture not in made:
            path = make_target(architecture)
            made[architecture] = load_decoder(path, dtype=torch.float64, device="cpu", target_layer_ids=(1, 3))
        return made[architecture]

    return make


@torch.inference_mode()
def recomputed(decoder, tokens):
    """Return final and captured states of a whole sequence, by one forward without any cache."""
    with decoder.target.capturing() as captured:
        output = decoder.target.stack(input_ids=torch.tensor([tokens]), use_cache=False)
    return output.last_hidden_state[0], torch.cat(captured, dim=-1)[0]


HISTORIES = {
    "prompts": st.lists(TOKENS, min_size=2, max_size=3),
    "rounds": st.lists(
        st.tuples(st.lists(TOKENS, min_size=3, max_size=3), st.lists(st.integers(0, 4), min_size=3)), max_size=3
    ),
    "last": st.lists(TOKENS, min_size=3, max_size=3),
}


@pytest.mark.parametrize("architecture", PLAIN + HYBRID)
# Not shrunk: a failure took minutes, at some twenty forwards a try, and the examples are small as they are.
@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(**HISTORIES)
def test_any_history_of_rollbacks_equals_recomputing_everything(decoder_of, architecture, prompts, rounds, last):
    decoder, tolerance = decoder_of(architecture), TOLERANCE[architecture]
    kept = [list(prompt) for prompt in prompts]
    with torch.inference_mode():
        batch = decoder.batch(len(prompts))
        batch.append(prompts)
        for tried, counts in rounds:
            tokens = tried[: len(kept)]
            batch.append(tokens)
            batch.keep(counts[: len(kept)])
            for own, new, count in zip(kept, tokens, counts, strict=False):
                own += new[:count]
        final = last[: len(kept)]
        hidden, states = batch.append(final)
    for i, (own, new) in enumerate(zip(kept, final, strict=True)):
        wanted_hidden, wanted_states = recomputed(decoder, own + new)
        torch.testing.assert_close(hidden[i, : len(new)], wanted_hidden[-len(new) :], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(states[i, : len(new)], wanted_states[-len(new) :], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("architecture", PLAIN + HYBRID)
def test_selected_sequences_go_on_alone(decoder_of, architecture):
    decoder = decoder_of(architecture)
    with torch.inference_mode():
        batch = decoder.batch(3)
        batch.append([[3, 4, 5], [6], [7, 8]])
        batch.select([2, 0])
        _, states = batch.append([[9], [10]])
        batch.append([[11, 12], [13, 14]])
        # In this order too: what is taken back is that of the sequences that are left.
        batch.select([1])
        batch.keep([1])
        _, later = batch.append([[15]])
    for i, tokens in enumerate([[7, 8, 9], [3, 4, 5, 10]]):
        torch.testing.assert_close(states[i, 0], recomputed(decoder, tokens)[1][-1], rtol=2e-4, atol=2e-4)
    wanted = recomputed(decoder, [3, 4, 5, 10, 13, 15])[1][-1]
    torch.testing.assert_close(later[0, 0], wanted, rtol=2e-4, atol=2e-4)


def test_taking_back_from_an_attention_cache_alone_is_caught_on_a_hybrid(decoder_of):
    """The plain batch masks rejected tokens, which a recurrence has seen all the same."""
    decoder = decoder_of("Qwen3_5ForCausalLM")
    wanted = recomputed(decoder, [3, 4, 5, 9])[1][-1]
    masked = PlainBatch(decoder.target)
    # By itself it has no room for recurrent layers and fails loudly.
    masked._cache = DynamicCache(config=decoder.target.stack.config)
    for batch, right in ((RecurrentBatch(decoder.target, 1), True), (masked, False)):
        with torch.inference_mode():
            batch.append([[3, 4, 5]])
            batch.append([[20, 30, 40]])
            batch.keep([0])
            got = batch.append([[9]]).states[0, 0]
        assert torch.allclose(got, wanted, atol=2e-4) is right


def test_a_block_that_is_committed_whole_costs_no_second_forward(decoder_of):
    decoder = decoder_of("Qwen3_5ForCausalLM")
    runs = []
    hook = decoder.target.stack.register_forward_hook(lambda *_: runs.append(1))
    with torch.inference_mode():
        batch = decoder.batch(3)
        batch.append([[3, 4], [5, 6], [7, 8]])
        assert len(runs) == 1
        batch.append([[9, 10, 11]] * 3)
        batch.keep([3, 3, 3])
        assert len(runs) == 2
        batch.append([[9, 10, 11]] * 3)
        # Two lose the same number of tokens and share a forward, one loses everything and needs none.
        batch.keep([1, 0, 1])
        assert len(runs) == 4
    hook.remove()


@pytest.mark.parametrize("architecture", PLAIN + HYBRID)
def test_greedy_feeds_each_choice_back(decoder_of, architecture):
    decoder = decoder_of(architecture)
    prompts = [[3, 4, 5], [6]]
    for prompt, reply in zip(prompts, alone(decoder, prompts, 6, Greedy()), strict=True):
        successors = decoder.logits(recomputed(decoder, [*prompt, *reply])[0]).argmax(dim=-1)
        assert reply == successors[len(prompt) - 1 : -1].tolist()
        assert len(reply) == 6


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3_5ForCausalLM"])
@pytest.mark.parametrize("call", ["keep", "select"])
def test_an_empty_batch_has_nothing_to_take_back(decoder_of, architecture, call):
    with pytest.raises(RuntimeError, match="nothing was appended"):
        getattr(decoder_of(architecture).batch(1), call)([0])


def test_layers_whose_state_is_unknown_here_are_refused(make_target):
    path = make_target("Qwen3ForCausalLM", layer_types=["full_attention", "sliding_attention"] * 3, sliding_window=8,
                       use_sliding_window=True)  # fmt: skip
    with pytest.raises(DflashError, match="cannot be evaluated") as caught:
        load_decoder(path, dtype=torch.float32, device="cpu", target_layer_ids=(1,))
    assert caught.value.code is ExitCode.PREFLIGHT
    assert "sliding_attention" in caught.value.cause
