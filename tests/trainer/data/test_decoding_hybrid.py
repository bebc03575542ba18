"""Batched decoding of hybrid targets: left padding under its mask leaves no trace in a recurrent state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from trainer.data.decoding import DecodeSettings, Reply, _Batch, decode_batch
from trainer.data.generator_model import load_generator

TEXT, WRAPPER = "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"
# Shorter than the convolution (4), and longer than a chunk of the recurrence (64).
LENGTHS = (3, 9, 1, 70, 5, 2, 33, 17)
PROMPTS = [np.random.default_rng(i).integers(3, 48, n).tolist() for i, n in enumerate(LENGTHS)]
KEYS = [str(i) for i in range(len(PROMPTS))]
NEW = 10

Load = Callable[[str], Any]


@pytest.fixture(scope="module")
def load(make_target: Callable[..., Path]) -> Load:
    made: dict[str, Any] = {}

    def of(architecture: str) -> Any:
        if architecture not in made:
            made[architecture] = load_generator(make_target(architecture), "float64", "cpu", 1)
        return made[architecture]

    return of


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes recurrence, norms and angles in float32 whatever the dtype: 3e-4 on logits of 5 here."""

    class Doubled:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(modeling_qwen3_5, "torch", Doubled())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@torch.inference_mode()
def last_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """The definition: one sequence, no cache, no padding, no mask."""
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(int(last_logits(model, ids).argmax()))
    return ids[len(prompt) :]


def settings(stops: tuple[int, ...] = (), temperature: float = 0.0) -> DecodeSettings:
    return DecodeSettings(NEW, temperature, 1, stops)


def test_the_wrapper_gives_its_text_class_with_its_own_weights(load: Load, make_target: Callable[..., Path]) -> None:
    from transformers import AutoModelForImageTextToText

    whole: Any = AutoModelForImageTextToText.from_pretrained(make_target(WRAPPER), dtype=torch.float64).eval()
    assert (type(load(WRAPPER)).__name__, type(whole).__name__) == (TEXT, WRAPPER)
    assert torch.equal(last_logits(load(WRAPPER), PROMPTS[1]), last_logits(whole, PROMPTS[1]))


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("architecture", [TEXT, WRAPPER])
def test_every_step_of_a_batch_has_the_logits_of_each_prompt_alone(load: Load, architecture: str) -> None:
    """Rows are dropped twice on the way; the rest goes on with its own convolution and recurrence."""
    model, sequences = load(architecture), [list(prompt) for prompt in PROMPTS]
    with torch.inference_mode():
        batch = _Batch(model, PROMPTS)
        for step in range(6):
            got = batch.logits()
            wanted = torch.stack([last_logits(model, sequences[row]) for row in batch.rows.tolist()])
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)
            chosen = wanted.argmax(-1)
            for row, token in zip(batch.rows.tolist(), chosen.tolist(), strict=True):
                sequences[row].append(token)
            batch.append(chosen)
            if step in (1, 3):
                batch.keep(torch.arange(len(chosen))[1::2] if step == 1 else torch.arange(1, len(chosen)))
    assert batch.rows.tolist() == [3, 5, 7]


@pytest.mark.usefixtures("in_double")
def test_replies_are_those_of_each_prompt_alone_with_stops_on_the_way(load: Load) -> None:
    model = load(TEXT)
    free = [greedy(model, prompt) for prompt in PROMPTS]
    assert decode_batch(model, PROMPTS, KEYS, settings()) == [Reply(reply, "length") for reply in free]
    stops = (free[0][2], free[3][5])
    ends = [next((i for i, token in enumerate(reply) if token in stops), None) for reply in free]
    expected = [
        Reply(reply, "length") if end is None else Reply(reply[: end + 1], "stop")
        for reply, end in zip(free, ends, strict=True)
    ]
    assert len({len(reply.token_ids) for reply in expected}) >= 3
    assert decode_batch(model, PROMPTS, KEYS, settings(stops)) == expected


def test_sampling_hangs_on_the_key_not_on_the_batch(load: Load) -> None:
    together = decode_batch(load(TEXT), PROMPTS, KEYS, settings(temperature=1.0))
    assert decode_batch(load(TEXT), PROMPTS[::-1], KEYS[::-1], settings(temperature=1.0))[::-1] == together
    assert together != decode_batch(load(TEXT), PROMPTS, KEYS, settings())


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize(("wrong", "far"), [("none", False), ("no mask", True), ("padding on the right", True)])
def test_padding_without_its_mask_or_behind_the_prompt_would_be_caught(load: Load, wrong: str, far: bool) -> None:
    """What a decode step sees behind a prefill with 6 columns of padding, done rightly and in the two wrong ways."""
    model, batch = load(TEXT), _Batch(load(TEXT), [PROMPTS[1], [9] * 15])
    if wrong == "no mask":
        batch._mask = torch.ones_like(batch._mask)
    if wrong == "padding on the right":
        batch._tokens, batch._mask = batch._tokens.roll(-6, 1), batch._mask.roll(-6, 1)
        batch._positions = batch._positions.roll(-6, 1)
    with torch.inference_mode():
        batch.logits()
        batch.append(torch.tensor([7, 7]))
        # The position that is right in all three cases, so that only state and mask tell.
        batch._positions[0] = LENGTHS[1]
        error = (batch.logits()[0] - last_logits(model, [*PROMPTS[1], 7])).abs().max()
    assert error > 1e-2 if far else error < 1e-9


def test_the_mask_reaches_the_recurrent_layers_in_the_prefill_alone(load: Load) -> None:
    model, seen = load(TEXT), []

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs["attention_mask"]
        seen.append(None if mask is None else mask.tolist())

    layers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    decode_batch(model, [[5, 6, 7], [8]], ["a", "b"], DecodeSettings(2, 0.0, 1, ()))
    for hook in hooks:
        hook.remove()
    assert len(layers) == 4
    assert seen == [[[1, 1, 1], [0, 0, 1]]] * 4 + [None] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batch_on_a_gpu_has_the_logits_of_each_prompt_alone(make_target: Callable[..., Path], dtype: str) -> None:
    """With fla's kernels, whose head sizes start at 16. Logits reach 5.4; on a CPU bfloat16 moves them by 0.12."""
    path = make_target(TEXT, linear_key_head_dim=64, linear_value_head_dim=64)
    model = load_generator(path, dtype, "cuda", None)
    with torch.inference_mode():
        wanted = torch.cat([_Batch(model, [prompt]).logits() for prompt in PROMPTS])
        unmasked = _Batch(model, PROMPTS)
        unmasked._mask = torch.ones_like(unmasked._mask)
        right, wrong = _Batch(model, PROMPTS).logits() - wanted, unmasked.logits() - wanted
    assert right.abs().max() < 0.3
    assert wrong.abs().max() > 1
