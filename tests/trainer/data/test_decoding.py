"""Batched decoding against transformers' own generation, one prompt at a time, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remote.protocol.errors import DflashError
from trainer.data.decoding import DecodeSettings, Reply, choose, decode_batch, uniform_draws
from trainer.data.generator_model import load_generator

LENGTHS = (3, 9, 1, 17, 5, 5, 12, 2)
PROMPTS = [np.random.default_rng(i).integers(20, 40000, n).tolist() for i, n in enumerate(LENGTHS)]
KEYS = [str(i) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def model(target_dir: Path) -> Any:
    return load_generator(target_dir, "float32", "cpu", 1)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The definition: the whole sequence again for every token, no cache, no padding."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def settings(stops: tuple[int, ...] = (), temperature: float = 0.0, seed: int = 1) -> DecodeSettings:
    return DecodeSettings(12, temperature, seed, stops)


def test_a_padded_batch_gives_what_each_prompt_gives_alone(model: Any) -> None:
    replies = decode_batch(model, PROMPTS, KEYS, settings())
    assert replies == [Reply(greedy(model, prompt, 12), "length") for prompt in PROMPTS]


def test_replies_stop_at_their_stop_token_and_the_others_go_on(model: Any) -> None:
    """Rows end at different steps, so the batch is compacted several times on the way."""
    free = [greedy(model, prompt, 12) for prompt in PROMPTS]
    stops = (free[0][2], free[3][5], free[6][9])
    expected = []
    for reply in free:
        end = next((i for i, token in enumerate(reply) if token in stops), None)
        expected.append(Reply(reply, "length") if end is None else Reply(reply[: end + 1], "stop"))
    assert len({len(reply.token_ids) for reply in expected}) >= 3
    assert decode_batch(model, PROMPTS, KEYS, settings(stops)) == expected


def test_a_batch_in_which_all_stop_ends_early(model: Any) -> None:
    first = greedy(model, PROMPTS[0], 1)
    assert decode_batch(model, PROMPTS[:1], KEYS[:1], settings((first[0],))) == [Reply(first, "stop")]


def test_positions_that_count_the_padding_would_be_caught(model: Any) -> None:
    """The mutant without position_ids: RoPE is relative, but padding must still shift nothing a reply hangs on."""
    padded = torch.tensor([[0] * 5 + PROMPTS[0]])
    mask = torch.tensor([[0] * 5 + [1] * len(PROMPTS[0])])
    right = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    without_mask = model(padded).logits[0, -1]
    with_mask = model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits[0, -1]
    assert torch.allclose(with_mask, right, atol=1e-5)
    assert not torch.allclose(without_mask, right, atol=1e-3)


def test_sampling_hangs_on_seed_and_key_not_on_the_batch(model: Any) -> None:
    together = decode_batch(model, PROMPTS, KEYS, settings(temperature=1.0))
    backwards = decode_batch(model, PROMPTS[::-1], KEYS[::-1], settings(temperature=1.0))[::-1]
    assert together == backwards
    assert together != decode_batch(model, PROMPTS, KEYS, settings(temperature=1.0, seed=2))
    assert together != decode_batch(model, PROMPTS, KEYS, settings())


def test_uniforms_are_pinned_and_in_range() -> None:
    draws = uniform_draws("key", DecodeSettings(5000, 1.0, 42, ()))
    assert draws.dtype == np.float32
    assert 0 <= draws.min() <= draws.max() < 1
    assert abs(float(draws.mean()) - 0.5) < 0.02


@given(
    st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=9),
    st.floats(0, 1, exclude_max=True, width=32),
    st.floats(0.1, 3),
)
def test_the_drawn_token_is_where_the_distribution_reaches_the_draw(
    logits: list[float], draw: float, temperature: float
) -> None:
    chosen = int(choose(torch.tensor([logits]), torch.tensor([draw]), settings(temperature=temperature))[0])
    scaled = np.array(logits, dtype=np.float64) / temperature
    below = np.cumsum(np.exp(scaled - scaled.max()))
    below /= below[-1]
    assert (below[chosen - 1] if chosen else 0) <= draw + 1e-9
    assert draw <= below[chosen] + 1e-9


def test_sampling_follows_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.1, 0.6, 0.3])).expand(3000, 3)
    draws = torch.rand(3000, generator=torch.Generator().manual_seed(0))
    shares = torch.bincount(choose(logits, draws, settings(temperature=1.0)), minlength=3) / 3000
    assert torch.allclose(shares, torch.tensor([0.1, 0.6, 0.3]), atol=0.04)


@pytest.mark.parametrize(
    ("top_p", "top_k", "expected"),
    [
        (1.0, 0, [0.1, 0.6, 0.3]),
        (1.0, 2, [0.0, 2 / 3, 1 / 3]),
        (1.0, 1, [0.0, 1.0, 0.0]),
        (0.6, 0, [0.0, 1.0, 0.0]),
        (0.61, 0, [0.0, 2 / 3, 1 / 3]),
        (0.6, 2, [0.0, 1.0, 0.0]),
        (0.7, 2, [0.0, 2 / 3, 1 / 3]),
        (0.01, 9, [0.0, 1.0, 0.0]),
    ],
)
def test_unlikely_tokens_are_left_out_and_the_rest_keeps_its_proportions(
    top_p: float, top_k: int, expected: list[float]
) -> None:
    logits = torch.log(torch.tensor([0.1, 0.6, 0.3])).expand(1000, 3)
    draws = (torch.arange(1000) + 0.5) / 1000
    how = DecodeSettings(1, 1.0, 1, (), top_p, top_k)
    shares = torch.bincount(choose(logits, draws, how), minlength=3) / 1000
    assert torch.allclose(shares, torch.tensor(expected), atol=0.002)


def test_recurrent_layers_of_an_unknown_class_are_refused(tmp_path: Path) -> None:
    """Qwen3-Next has layers of the same kind, but only the classes that were checked are let in."""
    from transformers import Qwen3NextConfig

    kinds = ["linear_attention", "full_attention"]
    Qwen3NextConfig(num_hidden_layers=2, layer_types=kinds, architectures=["Qwen3NextForCausalLM"]).save_pretrained(
        tmp_path
    )
    with pytest.raises(DflashError, match="Qwen3NextForCausalLM, whose recurrent layers are not known") as caught:
        load_generator(tmp_path, "float32", "cpu", None)
    assert "OpenAI-compatible" in caught.value.hint
