"""Speculative decoding: the output is the target's own, and the acceptance lengths are those of PyPI dflash 0.1.0."""

from __future__ import annotations

import argparse
import json

import dflash.model
import numpy as np
import pytest
import torch
import transformers
from dflash.model import DFlashDraftModel, dflash_generate

from remote.protocol.errors import DflashError, ExitCode
from trainer import evaluate
from trainer.choice import Greedy, Sampling
from trainer.drafter.blocks import build_blocks
from trainer.drafter.config import derive
from trainer.drafter.model import Drafter
from trainer.drafter.start import start_from_target
from trainer.drafter.step import drafter_forward
from trainer.export import export_drafter
from trainer.measure import Evaluation, PromptResult, decode_alone
from trainer.measure import evaluate as measure
from trainer.speculate import alone
from trainer.target.decode import load_decoder
from trainer.target.facts import target_facts
from trainer.target.weights import last_layers

MASK = 5
PROMPTS = [[7, 9, 11, 30, 12], [20, 8], [41], [13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [3, 4, 6, 3, 4]]
LAYERS = {
    "full": {"layer_types": "full"},
    "sliding": {"layer_types": "sliding", "sliding_window": 6},
    "mixed": {"layer_types": "mixed", "sliding_window": 6},
    "listed": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6},
}
GREEDY = Greedy()
HYBRID = "Qwen3_5ForCausalLM"
WRAPPER = "Qwen3_5ForConditionalGeneration"


def decoder_of(path, ids):
    return load_decoder(path, dtype=torch.float32, device="cpu", target_layer_ids=ids)


def trained(path, layers, steps=40, learning_rate=5e-3):
    """Train a tiny drafter on the target's own greedy continuations of PROMPTS, by the code of a training step."""
    facts = target_facts(path)
    count = 3 if layers == "listed" else 2
    config = derive(
        facts.text_config, num_layers=count, block_size=4, mask_token_id=MASK, num_target_layer_ids=2, **LAYERS[layers]
    )
    torch.manual_seed(0)
    drafter = Drafter(config)
    if not facts.hybrid:
        start_from_target(drafter, *last_layers(facts, count))
    decoder = decoder_of(path, config.target_layer_ids)
    texts = [[*prompt, *reply] for prompt, reply in zip(PROMPTS, alone(decoder, PROMPTS, 24, GREEDY), strict=True)]
    states = [torch.cat(decoder.target.capture(torch.tensor([text])), dim=-1)[0] for text in texts]
    lengths = [len(text) for text in texts]
    optimizer = torch.optim.Adam(drafter.parameters(), lr=learning_rate)
    for epoch in range(steps):
        blocks = build_blocks(
            np.concatenate(texts).astype(np.int32),
            np.ones(sum(lengths), dtype=np.uint8),
            np.repeat(np.arange(len(texts)), lengths),
            np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
            seed=0,
            epoch=epoch,
            num_anchors=8,
            row_budget=160,
            block_size=4,
            mask_token_id=MASK,
            gamma=4.0,
        )
        sums = drafter_forward(
            drafter,
            decoder.embed_weight,
            decoder.head_weight,
            torch.cat(states),
            blocks,
            num_target_layer_ids=2,
            chunk_rows=256,
        )
        optimizer.zero_grad()
        (sums.loss_sum / sums.weight_sum).backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def exported(make_target, tmp_path_factory):
    """Return a function from a kind of layers and an architecture to (target directory, drafter, exported directory)."""
    made = {}

    def export(layers, architecture="LlamaForCausalLM"):
        if (layers, architecture) not in made:
            path = make_target(architecture)
            drafter = trained(path, layers)
            out = tmp_path_factory.mktemp("drafter") / layers
            export_drafter(drafter.state_dict(), drafter.config, out, "float32")
            made[layers, architecture] = (path, drafter, out)
        return made[layers, architecture]

    return export


def generate(path, prompt, new_tokens):
    """The target's own greedy output by transformers, nothing cached, stop tokens ignored."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("layers", "architecture"), [*((name, "LlamaForCausalLM") for name in LAYERS), ("mixed", "Qwen3ForCausalLM")]
)
def test_acceptance_lengths_equal_those_of_pypi_dflash(exported, monkeypatch, layers, architecture):
    path, drafter, out = exported(layers, architecture)
    monkeypatch.setattr(dflash.model, "_cuda_time", lambda: 0.0)
    reference = DFlashDraftModel.from_pretrained(out, dtype=torch.float32).eval()
    target = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    evaluation = measure(decoder_of(path, drafter.config.target_layer_ids), drafter, PROMPTS, 22)
    for prompt, result in zip(PROMPTS, evaluation.results, strict=True):
        theirs = dflash_generate(reference, target, torch.tensor([prompt]), 22, None, return_stats=True)
        assert result.acceptance_lengths == theirs.acceptance_lengths
        assert [*prompt, *result.output_ids] == theirs.output_ids[0].tolist()
    # Otherwise the lists would be all ones whatever the drafter's context is.
    assert evaluation.acceptance > 1.5


@torch.inference_mode()
def recompute_everything(reference, target, prompt, new_tokens):
    """Greedy speculation with PyPI dflash's drafter and transformers' target, no cache anywhere: (output, lengths)."""
    tokens, limit, lengths = list(prompt), len(prompt) + new_tokens, []
    output = target(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    tokens.append(int(output.logits[0, -1].argmax()))
    while len(tokens) < limit:
        start, size = len(tokens) - 1, min(reference.block_size, limit - len(tokens) + 1)
        block = torch.tensor([[tokens[-1], *[reference.mask_token_id] * (size - 1)]])
        # hidden_states[i + 1] is the output of layer i.
        states = torch.cat([output.hidden_states[i + 1][:, :start] for i in reference.target_layer_ids], dim=-1)
        embeds = target.get_input_embeddings()(block)
        hidden = reference(torch.arange(start + size)[None], noise_embedding=embeds, target_hidden=states)
        guesses = target.lm_head(hidden[0, 1:]).argmax(dim=-1).tolist()
        output = target(torch.tensor([[*tokens, *guesses]]), output_hidden_states=True, use_cache=False)
        own = output.logits[0, start:].argmax(dim=-1).tolist()
        agreed = next((k for k, guess in enumerate(guesses) if guess != own[k]), len(guesses))
        committed = [*guesses[:agreed], own[agreed]][: limit - len(tokens)]
        tokens += committed
        lengths.append(len(committed))
    return tokens[len(prompt) :], lengths


@pytest.mark.parametrize("architecture", [HYBRID, WRAPPER])
def test_a_hybrid_target_is_evaluated_as_if_everything_was_recomputed(exported, architecture):
    path, drafter, out = exported("mixed", architecture)
    reference = DFlashDraftModel.from_pretrained(out, dtype=torch.float32).eval()
    # Of the wrapper this is the text class alone.
    target = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    evaluation = measure(decoder_of(path, drafter.config.target_layer_ids), drafter, PROMPTS, 22)
    for prompt, result in zip(PROMPTS, evaluation.results, strict=True):
        assert (result.output_ids, result.acceptance_lengths) == recompute_everything(reference, target, prompt, 22)
    assert evaluation.identical_count == len(PROMPTS)
    # Some guesses are accepted and some are not: the state was taken back, and in the middle of blocks.
    assert {1, 2, 3, 4} <= {length for result in evaluation.results for length in result.acceptance_lengths}


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 9])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", HYBRID])
def test_the_output_is_the_targets_own_for_any_drafter(exported, new_tokens, architecture):
    path, drafter, _ = exported("full" if architecture != HYBRID else "mixed", architecture)
    torch.manual_seed(9)
    for each in (drafter, Drafter(drafter.config).eval()):
        evaluation = measure(decoder_of(path, drafter.config.target_layer_ids), each, PROMPTS, new_tokens)
        assert evaluation.identical_count == len(PROMPTS)
        for prompt, result in zip(PROMPTS, evaluation.results, strict=True):
            assert result.output_ids == generate(path, prompt, new_tokens)
            assert sum(result.acceptance_lengths) == new_tokens - 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5, top_p=0.9, seed=3)])
def test_prompts_decoded_together_equal_prompts_decoded_alone(exported, sampling):
    path, drafter, _ = exported("mixed")
    decoder = decoder_of(path, drafter.config.target_layer_ids)
    together = measure(decoder, drafter, PROMPTS, 15, sampling=sampling)
    for i, result in enumerate(together.results):
        # The place in the list decides what is drawn: the others are there, but another way.
        others = [PROMPTS[i] if place == i else [40 - place] for place in range(i + 1)]
        assert measure(decoder, drafter, others, 15, sampling=sampling).results[i] == result


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5, top_p=0.9, seed=3)])
def test_the_size_of_a_batch_changes_no_token(exported, capsys, sampling):
    path, drafter, _ = exported("mixed")
    decoder = decoder_of(path, drafter.config.target_layer_ids)
    together = measure(decoder, drafter, PROMPTS, 15, sampling=sampling)
    assert measure(decoder, drafter, PROMPTS, 15, sampling=sampling, batch_size=2).results == together.results
    said = capsys.readouterr().err
    assert "the target alone: 5/5 rows, 75 tokens" in said
    assert "with the drafter: 5/5 rows, 75 tokens" in said


def test_no_more_prompts_than_a_batch_are_decoded_together(exported, monkeypatch):
    path, drafter, _ = exported("full")
    decoder = decoder_of(path, drafter.config.target_layer_ids)
    counts, batch = [], type(decoder).batch
    monkeypatch.setattr(type(decoder), "batch", lambda self, count: counts.append(count) or batch(self, count))
    measure(decoder, drafter, PROMPTS, 2, batch_size=2)
    assert counts == [2, 2, 1] * 2


def test_training_raises_acceptance(exported):
    path, drafter, _ = exported("full")
    torch.manual_seed(1)
    decoder = decoder_of(path, drafter.config.target_layer_ids)
    own = decode_alone(decoder, PROMPTS, 22)
    before = measure(decoder, Drafter(drafter.config).eval(), PROMPTS, 22, own=own)
    after = measure(decoder, drafter, PROMPTS, 22, own=own)
    assert after.acceptance > before.acceptance + 0.5
    assert after.verifications < before.verifications


def test_an_overfitted_drafter_is_accepted_whole(make_target):
    path = make_target()
    drafter = trained(path, "mixed", steps=200)
    size = drafter.config.block_size
    # The prefill's token and whole blocks, so that the limit cuts none.
    evaluation = measure(decoder_of(path, drafter.config.target_layer_ids), drafter, PROMPTS, 1 + 5 * size)
    assert evaluation.acceptance == size
    assert evaluation.acceptance_by_position() == [1.0] * (size - 1)
    assert evaluation.identical_count == len(PROMPTS)


def test_the_head_sees_the_last_token_of_a_prompt_alone(exported):
    """The logits of 16 prompts of 262 tokens were 824 MB at a vocabulary of 49,152."""
    path, drafter, _ = exported("full")
    decoder = decoder_of(path, drafter.config.target_layer_ids)
    asked = []
    logits = type(decoder).logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(decoder), "logits", lambda self, hidden: asked.append(hidden.shape) or logits(self, hidden))
        measure(decoder, drafter, PROMPTS, 1)
    assert asked == [(5, 32), (5, 32)]


def test_figures_are_pooled_and_tell_where_a_block_ends():
    results = [PromptResult(3, [0] * 9, [4, 4], [0] * 9), PromptResult(3, [0] * 9, [1, 2, 1, 1, 1, 2], [2] * 9)]
    evaluation = Evaluation(results, 4, Sampling(), 2.0, 5.0)
    assert evaluation.acceptance == 2.0
    assert evaluation.speedup == 2.5
    assert evaluation.identical_count == 1
    assert not evaluation.to_json()["identical"]
    # Guess 1 was accepted in 4 of 8; near the limit there was no room to see guess 3 twice and guess 2 once.
    assert evaluation.acceptance_by_position() == [4 / 8, 2 / 7, 2 / 6]


def run(*words):
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    return evaluate.run(parser.parse_args([str(word) for word in words]))


def test_the_command_writes_every_figure(exported, tmp_path, capsys):
    path, drafter, out = exported("full")
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    words = ["--target-model", path, "--prompts", tmp_path / "prompts.json", "--max-new-tokens", 12]
    assert run(*words, "--drafter", out, "--drafter", out, "--json", tmp_path / "out.json") == 0
    document = json.loads((tmp_path / "out.json").read_text())
    first, second = document["drafters"]
    timed = {"seconds": 0, "speedup": 0}
    assert first | timed == second | timed
    assert first["prompts"] == 5
    assert first["identical"]
    assert first["committed_tokens"] == 5 * 11
    assert first["acceptance"] == first["committed_tokens"] / first["verifications"]
    assert first["results"][0]["target_ids"] == first["results"][0]["output_ids"]
    assert first["speedup"] == first["target_seconds"] / first["seconds"]
    assert len(first["acceptance_by_position"]) == drafter.config.block_size - 1
    printed = capsys.readouterr().out
    assert printed.count("acceptance") == 2
    assert printed.count("outputs equal the target's") == 2
    assert printed.count("times as fast as the target alone here") == 2


def test_how_much_faster_a_hybrid_is_here_is_not_said(exported, tmp_path, capsys):
    """Committed tokens are run again for its state: 0.24 times as fast, which no serving engine would be."""
    path, _, out = exported("mixed", HYBRID)
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS[:1]))
    words = ["--target-model", path, "--drafter", out, "--prompts", tmp_path / "prompts.json", "--max-new-tokens", 4]
    assert run(*words) == 0
    printed = capsys.readouterr().out
    assert "acceptance" in printed
    assert "times as fast" not in printed


def test_the_command_samples(exported, tmp_path, capsys):
    path, _, out = exported("full")
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    words = ["--target-model", path, "--prompts", tmp_path / "prompts.json", "--max-new-tokens", 12, "--drafter", out]
    drawn = ["--temperature", 1.3, "--top-p", 0.95, "--json", tmp_path / "out.json"]
    outputs = []
    for seed in (1, 1, 2):
        assert run(*words, *drawn, "--seed", seed) == 0
        document = json.loads((tmp_path / "out.json").read_text())
        outputs.append([result["output_ids"] for result in document["drafters"][0]["results"]])
    assert document["sampling"] == {"temperature": 1.3, "top_p": 0.95, "seed": 2}
    assert document["drafters"][0]["identical"] is None
    assert outputs[0] == outputs[1] != outputs[2]
    assert "outputs equal" not in capsys.readouterr().out


def test_the_command_says_how_much_of_the_data_is_the_targets_own(exported, tmp_path, capsys):
    path, drafter, out = exported("full")
    decoder = decoder_of(path, drafter.config.target_layer_ids)
    replies = alone(decoder, PROMPTS, 10, GREEDY)
    rows = [
        {"input_ids": [*prompt, *reply], "loss_mask": [0] * len(prompt) + [1] * len(reply)}
        for prompt, reply in zip(PROMPTS, replies, strict=True)
    ]
    # One document of five is not the target's: its one label, for nothing predicts a first token, is the last choice.
    with torch.inference_mode():
        worst = int(decoder.logits(decoder.batch(1).append([[3]]).hidden)[0, 0].argmin())
    rows[0] = {"input_ids": [3, worst], "loss_mask": [1, 1]}
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "prompts.json").write_text("[[3, 4]]")
    words = ["--target-model", path, "--prompts", tmp_path / "prompts.json", "--drafter", out, "--max-new-tokens", 2]
    assert run(*words, "--on-policy-data", tmp_path / "data.jsonl", "--json", tmp_path / "out.json") == 0
    found = json.loads((tmp_path / "out.json").read_text())["on_policy"]
    assert (found["documents"], found["labels"], found["agreeing"]) == (5, 41, 40)
    assert "on-policy rate 0.976 (40 of 41 labels" in capsys.readouterr().out
    # Before training there is no drafter: then nothing is decoded, and no prompts are asked for.
    report = ["--on-policy-data", tmp_path / "data.jsonl", "--json", tmp_path / "alone.json"]
    assert run("--target-model", path, *report) == 0
    alone_found = json.loads((tmp_path / "alone.json").read_text())
    assert (alone_found["on_policy"], alone_found["drafters"]) == (found, [])
    assert "acceptance" not in capsys.readouterr().out


def test_nothing_to_evaluate_is_a_usage_error(make_target):
    with pytest.raises(DflashError, match="nothing to evaluate") as caught:
        run("--target-model", make_target())
    assert caught.value.code is ExitCode.USAGE


def test_data_that_cannot_be_read_are_said_before_the_target_is_loaded(make_target, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "load_decoder", None)
    with pytest.raises(DflashError, match="no data at"):
        run("--target-model", make_target(), "--on-policy-data", tmp_path / "absent")


def test_a_drafter_for_another_target_is_refused(exported, make_target):
    _, _, out = exported("full")
    with pytest.raises(DflashError, match="another target") as caught:
        run("--target-model", make_target(num_hidden_layers=7), "--drafter", out)
    assert "num_target_layers" in caught.value.cause


@pytest.mark.parametrize(
    "words",
    [
        ["--max-new-tokens", 0],
        ["--on-policy-documents", 0],
        ["--batch-size", 0],
        ["--chat-template-kwargs", "[]"],
        ["--temperature", -1],
        ["--temperature", "nan"],
        ["--top-p", 0],
        ["--top-p", 1.1],
    ],
)
def test_a_senseless_number_is_a_usage_error(exported, words):
    path, _, out = exported("full")
    with pytest.raises(DflashError) as caught:
        run("--target-model", path, "--drafter", out, *words)
    assert caught.value.code is ExitCode.USAGE


def test_a_missing_place_for_the_figures_is_said_before_the_work(exported, tmp_path):
    path, _, out = exported("full")
    with pytest.raises(DflashError, match="no directory"):
        run("--target-model", path, "--drafter", out, "--json", tmp_path / "absent" / "out.json")


def test_a_place_for_the_figures_that_is_a_directory_and_an_unknown_device_are_said_first(exported, tmp_path):
    path, _, out = exported("full")
    with pytest.raises(DflashError, match="is a directory"):
        run("--target-model", path, "--drafter", out, "--json", tmp_path)
    with pytest.raises(DflashError, match="cuda:77"):
        run("--target-model", path, "--drafter", out, "--device", "cuda:77")
