"""`python -m trainer evaluate`: the prompts, the pairs of target and drafter, the report. What is measured: measure.py."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from remote.protocol.errors import preflight_error, usage_error
from trainer.choice import Sampling
from trainer.data.chat import parse_template_kwargs
from trainer.data.documents import Dataset, open_dataset
from trainer.devices import device_named
from trainer.drafter.config import DrafterConfig
from trainer.exported import load_exported
from trainer.measure import BATCH_SIZE, Evaluation, TargetAlone, decode_alone, evaluate
from trainer.on_policy import on_policy_rate
from trainer.prompt_sets import prompts_of
from trainer.target.decode import Decoder, load_decoder
from trainer.target.facts import TargetFacts, target_facts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `python -m trainer evaluate`."""
    parser.add_argument("--target-model", type=Path, required=True, help="directory of the target")
    drafter_help = (
        "exported drafter; repeat to compare several; none with --on-policy-data alone: nothing is decoded then"
    )
    parser.add_argument("--drafter", type=Path, action="append", default=[], help=drafter_help)
    prompts_help = "humaneval (default: 16 of its tasks), JSONL as `generate` takes it, or JSON with lists of token ids"
    parser.add_argument("--prompts", default="humaneval", help=prompts_help)
    parser.add_argument(
        "--chat-template-kwargs",
        default="{}",
        metavar="JSON",
        help="""keywords of the template, e.g. '{"enable_thinking": false}'; what `generate` and `prepare` got""",
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, help="new tokens for each prompt (default 64)")
    parser.add_argument(
        "--batch-size", type=int, default=BATCH_SIZE, help=f"prompts decoded together (default {BATCH_SIZE})"
    )
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
    device = device_named(arguments.device)
    sampling = Sampling(arguments.temperature, arguments.top_p, arguments.seed)
    dtype, facts = DTYPES[arguments.dtype], target_facts(arguments.target_model)
    # All files before the target, which takes longer: a wrong path fails at once.
    drafters = [load_exported(path, dtype, facts.num_layers).to(device) for path in arguments.drafter]
    for path, drafter in zip(arguments.drafter, drafters, strict=True):
        _check_pair(path, drafter.config, facts)
    dataset = _open(arguments.on_policy_data, facts) if arguments.on_policy_data else None
    prompts = _prompts(arguments, facts) if drafters else []
    settings = {"max_new_tokens": arguments.max_new_tokens, "dtype": arguments.dtype, "sampling": vars(sampling)}
    document: dict[str, Any] = {"schema": 1, "target_model": str(facts.path.resolve())} | settings

    def load(ids: Sequence[int]) -> Decoder:
        return load_decoder(arguments.target_model, dtype=dtype, device=device, target_layer_ids=ids)

    # Without a drafter nobody asks for what is captured.
    decoder = load(drafters[0].config.target_layer_ids if drafters else (0,))
    if dataset is not None:
        document |= _measure_on_policy(arguments, decoder, dataset)
    report: list[dict[str, Any]] = []
    own: TargetAlone | None = None
    for path, drafter in zip(arguments.drafter, drafters, strict=True):
        ids = drafter.config.target_layer_ids
        # Another drafter may read other layers; loaded again only then.
        if decoder.target.target_layer_ids != ids:
            del decoder  # Let go first: two 27B targets do not fit.
            decoder = load(ids)
        # Once for all drafters: it is the slowest part, one token a forward.
        own = own or _decode_alone(arguments, decoder, prompts, sampling)
        _say(f"{path}: drafting ...")
        evaluation = evaluate(
            decoder, drafter, prompts, arguments.max_new_tokens,
            sampling=sampling, own=own, batch_size=arguments.batch_size,
        )  # fmt: skip
        _print(path, evaluation, hybrid=facts.hybrid)
        report.append({"drafter": str(path.resolve())} | evaluation.to_json())
    if arguments.json:
        arguments.json.write_text(json.dumps(document | {"drafters": report}) + "\n", encoding="utf-8")
    return 0


def _check_arguments(arguments: argparse.Namespace) -> None:
    for flag, value in (
        ("--max-new-tokens", arguments.max_new_tokens),
        ("--batch-size", arguments.batch_size),
        ("--on-policy-documents", arguments.on_policy_documents),
    ):
        if value < 1:
            raise usage_error(f"{flag} is {value}", hint="give at least 1")
    if not arguments.drafter and not arguments.on_policy_data:
        raise usage_error("there is nothing to evaluate", hint="give --drafter DIR, or --on-policy-data, or both")
    if arguments.json and not arguments.json.parent.is_dir():
        raise usage_error(f"there is no directory for --json {arguments.json}")
    if arguments.json and arguments.json.is_dir():
        raise usage_error(f"--json {arguments.json} is a directory", hint="name a file")


def _open(path: Path, facts: TargetFacts) -> Dataset:
    longest = int(facts.text_config.get("max_position_embeddings") or 4096)
    return open_dataset(path, max_length=longest, vocab_size=facts.vocab_size)


def _prompts(arguments: argparse.Namespace, facts: TargetFacts) -> list[list[int]]:
    kwargs = parse_template_kwargs(arguments.chat_template_kwargs)
    return prompts_of(arguments.prompts, arguments.target_model, facts.vocab_size, kwargs)


def _decode_alone(
    arguments: argparse.Namespace, decoder: Decoder, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> TargetAlone:
    _say(f"{len(prompts)} prompts, {arguments.max_new_tokens} new tokens each: the target alone ...")
    return decode_alone(decoder, prompts, arguments.max_new_tokens, sampling, batch_size=arguments.batch_size)


def _print(path: Path, evaluation: Evaluation, *, hybrid: bool) -> None:
    print(f"{path}: acceptance {evaluation.acceptance:.3f} ({_summary(evaluation, hybrid=hybrid)})")
    positions = ", ".join(f"{share:.2f}" for share in evaluation.acceptance_by_position())
    print(f"  accepted up to guess 1, 2, ...: {positions}")


def _measure_on_policy(arguments: argparse.Namespace, decoder: Decoder, dataset: Dataset) -> dict[str, Any]:
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


def _summary(evaluation: Evaluation, *, hybrid: bool) -> str:
    equal = f"{evaluation.identical_count} of {len(evaluation.results)} outputs equal the target's, "
    # What was committed is run again here for a hybrid's state; an engine keeps the states, so ours says nothing of it.
    faster = "" if hybrid else f", {evaluation.speedup:.2f} times as fast as the target alone here"
    return (
        f"{evaluation.committed_tokens} tokens in {evaluation.verifications} verifications, "
        f"{'' if evaluation.sampling.temperature else equal}{evaluation.seconds:.1f} s{faster}"
    )
