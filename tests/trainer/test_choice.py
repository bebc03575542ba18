"""Draws follow the target's distribution exactly, whatever the drafter; wrong rules of acceptance are seen to be wrong."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remote.protocol.errors import DflashError, ExitCode
from trainer import choice as choice_module
from trainer.choice import Greedy, Sampling, Verdict, draw, verify
from trainer.drafter.config import derive
from trainer.drafter.model import Drafter
from trainer.speculate import _Sequence, alone, speculate
from trainer.target.decode import load_decoder
from trainer.target.facts import target_facts

# Of chi squared with as many degrees of freedom as there are outcomes but one: exceeded once in a million seeds.
LIMIT = {4: 33.4, 24: 71.5, 124: 211.0}


def chi_squared(counts, expected):
    """Pearson's statistic of counts f[n] against expected counts f[n]."""
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("guesses", "best", "verdict"),
    [
        ([4, 5, 6], [9, 5, 6, 7], (0, 9)),
        ([4, 5, 6], [4, 5, 6, 7], (3, 7)),
        ([4, 5, 6], [4, 8, 6, 7], (1, 8)),
        ([4], [4, 5, 0, 0], (1, 5)),
        ([], [3, 0, 0, 0], (0, 3)),
    ],
)
def test_greedy_accepts_what_agrees(guesses, best, verdict):
    logits = torch.nn.functional.one_hot(torch.tensor([best]), 10).float()
    assert Greedy().judge([0], [guesses], logits) == [Verdict(*verdict)]


@pytest.mark.parametrize(
    ("guesses", "verdict", "room", "tokens"),
    [
        ([4, 5, 6], (0, 9), 9, [9]),
        ([4, 5, 6], (3, 7), 9, [4, 5, 6, 7]),
        ([4, 5, 6], (1, 8), 9, [4, 8]),
        ([4, 5, 6], (3, 7), 3, [4, 5, 6]),
        ([4], (1, 5), 1, [4]),
    ],
)
def test_a_verification_commits_what_is_accepted_and_one_more(guesses, verdict, room, tokens):
    sequence = _Sequence(0, [1, 2], 2 + room)
    assert sequence.commit(guesses, Verdict(*verdict)) == len(tokens)
    assert sequence.tokens == [1, 2, *tokens]
    assert sequence.acceptance_lengths == [len(tokens)]


TARGET = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2], dtype=torch.float64)
DRAFTED = torch.tensor([0.3, 0.1, 0.4, 0.15, 0.05], dtype=torch.float64)
N = 20_000


def verified(drafted=DRAFTED, rule=verify):
    """Guess one token N times and judge it; returns (guesses i64[N], accepted i64[N], tokens behind i64[N])."""
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(N, 3, generator=generator, dtype=torch.float64)
    offered = drafted.expand(N, 1, 5)
    guesses = draw(offered, uniforms[:, :1])
    return guesses[:, 0], *rule(guesses, TARGET.expand(N, 2, 5), offered, uniforms[:, 1:])


def test_the_first_token_behind_an_anchor_is_distributed_as_the_targets():
    guesses, accepted, tokens = verified()
    first = torch.where(accepted == 1, guesses, tokens)
    assert chi_squared(torch.bincount(first, minlength=5), TARGET * N) < LIMIT[4]
    # Accepted as often as the two distributions overlap, and the bonus token follows the target too.
    share = float(torch.minimum(TARGET, DRAFTED).sum())
    assert abs(accepted.double().mean() - share) < 0.02
    bonus = torch.bincount(tokens[accepted == 1], minlength=5)
    assert chi_squared(bonus, TARGET * bonus.sum()) < LIMIT[4]


def accept_all(guesses, target, drafted, uniforms):
    return verify(guesses, target, drafted, uniforms * 0)


def rest_of_the_target(guesses, target, drafted, uniforms):
    """Behind a refusal draw from p, not from what is left of it."""
    accepted, _ = verify(guesses, target, drafted, uniforms)
    rows = torch.arange(len(guesses))
    return accepted, draw(target[rows, accepted], uniforms[:, -1])


def inverted_ratio(guesses, target, drafted, uniforms):
    """Accept with q/p for p/q."""
    _, tokens = verify(guesses, target, drafted, uniforms)
    wanted = target[:, :1].gather(-1, guesses[..., None])[:, 0, 0]
    offered = drafted.gather(-1, guesses[..., None])[:, 0, 0]
    return (uniforms[:, 0] * wanted < offered).long(), tokens


@pytest.mark.parametrize("mutant", [accept_all, rest_of_the_target, inverted_ratio])
def test_wrong_rules_of_acceptance_are_caught(mutant):
    guesses, accepted, tokens = verified(rule=mutant)
    first = torch.where(accepted == 1, guesses, tokens)
    assert chi_squared(torch.bincount(first, minlength=5), TARGET * N) > 5 * LIMIT[4]


def test_a_drafter_that_is_the_target_is_always_accepted():
    _, accepted, _ = verified(drafted=TARGET)
    assert accepted.all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.floats(0, 1, exclude_max=True))
def test_a_draw_never_takes_a_token_without_weight(weights, uniform):
    weights[0] = max(weights[0], 0.1)
    drawn = int(draw(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64))[0])
    assert weights[drawn] > 0
    before, after = sum(weights[:drawn]), sum(weights[: drawn + 1])
    assert before - 1e-6 <= uniform * sum(weights) <= after + 1e-6


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = TARGET.log()[None]
    kept = Sampling(1.0, 0.6).probabilities(logits)[0]
    torch.testing.assert_close(kept, torch.tensor([0, 0.4, 0, 0.25, 0], dtype=torch.float64) / 0.65)
    assert Sampling(1.0, 0.01).probabilities(logits)[0].tolist() == [0, 1, 0, 0, 0]
    torch.testing.assert_close(Sampling(1.0).probabilities(logits)[0], TARGET)
    sharp = Sampling(0.5).probabilities(logits)[0]
    torch.testing.assert_close(sharp, TARGET**2 / (TARGET**2).sum())


@pytest.mark.parametrize("numbers", [(-0.1, 1.0), (float("inf"), 1.0), (1.0, 0.0), (1.0, 1.5)])
def test_senseless_settings_are_refused(numbers):
    with pytest.raises(DflashError) as caught:
        Sampling(*numbers)
    assert caught.value.code is ExitCode.USAGE


@pytest.fixture(scope="module")
def five(make_target):
    """A target of five tokens and a drafter of another mind."""
    path = make_target(vocab_size=5, num_hidden_layers=4, hidden_size=16, intermediate_size=16, head_dim=4, seed=2)
    config = derive(target_facts(path).text_config, num_layers=1, block_size=3, mask_token_id=4, num_target_layer_ids=1)
    torch.manual_seed(3)
    drafter = Drafter(config).eval().requires_grad_(False)
    decoder = load_decoder(path, dtype=torch.float32, device="cpu", target_layer_ids=config.target_layer_ids)
    return decoder, drafter


SAMPLING = Sampling(temperature=1.2, top_p=0.97, seed=11)


@torch.inference_mode()
def exact(decoder, prompt, count):
    """The probability of each of the 5^count continuations by the target, from one forward over all of them."""
    texts = list(itertools.product(range(5), repeat=count))
    hidden = decoder.batch(len(texts)).append([[*prompt, *text] for text in texts]).hidden
    rows = SAMPLING.probabilities(decoder.logits(hidden[:, len(prompt) - 1 : -1]))
    return rows.gather(-1, torch.tensor(texts)[..., None])[..., 0].double().prod(dim=1)


def outcomes(outputs):
    return torch.bincount(torch.tensor(outputs) @ torch.tensor([25, 5, 1]), minlength=125)


def test_sampled_texts_are_distributed_as_the_targets_own(five):
    decoder, drafter = five
    expected = exact(decoder, [2, 0], 3) * 2500
    # Rare outcomes count as one: the statistic needs about five of each.
    rare = expected < 5
    prompts = [[2, 0]] * 2500

    def statistic(outputs):
        counts = outcomes(outputs).double()
        pooled = torch.cat([counts[~rare], counts[rare].sum()[None]])
        return chi_squared(pooled, torch.cat([expected[~rare], expected[rare].sum()[None]]))

    decoded = speculate(decoder, drafter, prompts, 3, SAMPLING.choice(2500))
    assert statistic([output for output, _ in decoded]) < LIMIT[124]
    assert statistic(alone(decoder, prompts, 3, SAMPLING.choice(2500))) < LIMIT[124]
    # Both things happened often, and the greedy text would have been far off.
    shares = torch.bincount(torch.tensor([lengths[0] for _, lengths in decoded]))
    assert shares[1] > 250
    assert shares[2] > 250
    assert statistic([output for output, _ in speculate(decoder, drafter, prompts, 3, Greedy())]) > 600


def test_a_wrong_rule_shows_in_the_texts(five, monkeypatch):
    decoder, drafter = five
    monkeypatch.setattr(choice_module, "verify", accept_all)
    expected = exact(decoder, [2, 0], 3) * 2500
    decoded = speculate(decoder, drafter, [[2, 0]] * 2500, 3, SAMPLING.choice(2500))
    likely = expected >= 5
    counts = outcomes([output for output, _ in decoded])
    assert chi_squared(counts[likely], expected[likely]) > 2 * LIMIT[124]
