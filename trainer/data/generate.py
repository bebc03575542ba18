"""`python -m trainer generate`: the target's own replies to prompts, the text that a drafter has to learn.

Acceptance collapses where the training text is not the target's own output, so replies are made again for every
target. The built-in generator suits small models; a large one is faster behind an OpenAI-compatible server.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from remote.protocol.errors import preflight_error, usage_error
from trainer.data.chat import ChatTokenizer, load_tokenizer
from trainer.data.dialects import Message, conversation_key, conversation_of
from trainer.data.jsonl import parse_row, read_rows, row_error
from trainer.data.progress import Progress

if TYPE_CHECKING:
    from trainer.data.decoding import Reply

# Prompts are sorted by length inside a window of this many batches: little padding, and still every part of the
# output is a fair sample of the prompts, so that an interrupted run leaves a usable set.
_WINDOW_BATCHES = 8


@dataclass(frozen=True)
class Prompt:
    """Messages that the assistant replies to, the tools it may call, their identity, and the ids the target continues."""

    key: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    input_ids: list[int]


@dataclass(frozen=True)
class Recipe:
    """What the replies depend on; stored beside them, and a run that resumes has to have the same."""

    target_config_sha256: str
    chat_template_sha256: str
    stop_ids: list[int]
    dtype: str
    max_new_tokens: int
    temperature: float
    seed: int
    token_ids: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `generate`."""
    parser.add_argument("--target-model", type=Path, required=True, metavar="DIR", help="a transformers directory")
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help='JSONL of {"prompt": str} or {"messages": [...]}'
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSONL; an existing one is resumed")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="tokens a reply (default 512)")
    parser.add_argument("--max-length", type=int, help="skip prompts that leave less than --max-new-tokens up to it")
    parser.add_argument("--batch-size", type=int, default=64, help="prompts decoded together (default 64)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=42, help="of sampling; greedy replies do not hang on it")
    parser.add_argument("--token-ids", action="store_true", help="store input_ids and prompt_len, which `train` reads")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")


def run(args: argparse.Namespace) -> int:
    """Generate what is missing in the output; return the exit code.

    Raises:
        DflashError: a flag out of range, a bad prompt row, an output made with other settings, a hybrid target.
    """
    if min(args.max_new_tokens, args.batch_size) < 1 or args.temperature < 0:
        raise usage_error("--max-new-tokens and --batch-size start at 1, --temperature at 0")
    chat = load_tokenizer(args.target_model)
    recipe = _recipe(args, chat)
    done = _resume(args.output, recipe)
    prompts, skipped = _read_prompts(args, chat, done)
    print(f"{len(prompts)} prompts to do, {len(done)} done before, {skipped} skipped as too long", flush=True)
    if prompts:
        with args.output.open("ab") as output:
            _generate(args, chat, recipe, prompts, output)
    return 0


def stop_ids(target_model: Path, chat: ChatTokenizer) -> list[int]:
    """Return the sorted ids that end a reply: those of the generation configuration and the tokenizer's own.

    Both, since a converted model may name only the end of a text there and run on behind the end of its turn.

    Raises:
        DflashError: there is none.
    """
    named: list[int] = [] if chat.eos_token_id is None else [chat.eos_token_id]
    path = target_model / "generation_config.json"
    if path.is_file():
        ids = json.loads(path.read_text()).get("eos_token_id") or []
        named += ids if isinstance(ids, list) else [ids]
    if not named:
        raise preflight_error(
            f"{target_model} names no stop token",
            cause="no eos_token_id in generation_config.json, no eos_token in the tokenizer",
            hint="set eos_token_id in generation_config.json",
        )
    return sorted(set(named))


def _generate(
    args: argparse.Namespace, chat: ChatTokenizer, recipe: Recipe, prompts: list[Prompt], output: BinaryIO
) -> None:
    # Only now, since torch takes seconds to import and everything before can already refuse the call.
    from trainer.data.decoding import DecodeSettings, decode_batch
    from trainer.data.generator_model import load_generator

    model = load_generator(args.target_model, args.dtype, args.device, args.threads)
    settings = DecodeSettings(args.max_new_tokens, args.temperature, args.seed, tuple(recipe.stop_ids))
    with Progress("generate", len(prompts)) as progress:
        for batch in _batches(prompts, args.batch_size):
            replies = decode_batch(model, [p.input_ids for p in batch], [p.key for p in batch], settings)
            for prompt, reply in zip(batch, replies, strict=True):
                row = _row(prompt, reply, chat, args.token_ids)
                output.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
            output.flush()
            os.fsync(output.fileno())
            progress.add(len(batch), sum(len(reply.token_ids) for reply in replies))


def _row(prompt: Prompt, reply: Reply, chat: ChatTokenizer, with_ids: bool) -> dict[str, Any]:
    messages = (*prompt.messages, Message("assistant", chat.decode(reply.token_ids)))
    row: dict[str, Any] = {"messages": [message.to_dict() for message in messages], "finish": reply.finish}
    if with_ids:
        row |= {"input_ids": prompt.input_ids + reply.token_ids, "prompt_len": len(prompt.input_ids)}
    return row


def _recipe(args: argparse.Namespace, chat: ChatTokenizer) -> Recipe:
    config = (args.target_model / "config.json").read_bytes()
    return Recipe(
        target_config_sha256=hashlib.sha256(config).hexdigest(),
        chat_template_sha256=chat.template_sha256,
        stop_ids=stop_ids(args.target_model, chat),
        dtype=args.dtype,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        token_ids=args.token_ids,
    )


def _resume(output: Path, recipe: Recipe) -> set[str]:
    """Compare the recipe with the stored one, cut a torn last line, and return the keys that are done."""
    beside = output.with_name(output.name + ".recipe.json")
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(asdict(recipe), indent=1) + "\n")
        return set()
    stored = json.loads(beside.read_text()) if beside.exists() else {}
    changed = [f"{k} was {stored.get(k)!r}, is {v!r}" for k, v in asdict(recipe).items() if stored.get(k) != v]
    if changed:
        raise preflight_error(
            f"{output} was made with other settings",
            cause="; ".join(changed),
            hint=f"use the settings of {beside.name}, or another --output",
        )
    return set(_done_keys(output))


def _done_keys(output: Path) -> Iterator[str]:
    with output.open("rb+") as lines:
        whole = 0
        for number, line in enumerate(iter(lines.readline, b""), start=1):
            if not line.endswith(b"\n"):
                lines.truncate(whole)  # the writer was killed in mid-line
                return
            whole += len(line)
            yield _key_of_row(parse_row(line, output, number), output, number)


def _key_of_row(row: dict[str, Any], output: Path, number: int) -> str:
    conversation = conversation_of(row, output, number)
    return conversation_key(conversation.messages[:-1], conversation.tools)


def _read_prompts(args: argparse.Namespace, chat: ChatTokenizer, done: set[str]) -> tuple[list[Prompt], int]:
    """Return (prompts that are not done, each once, count of prompts that are too long)."""
    seen = set(done)
    prompts: list[Prompt] = []
    skipped = 0
    for number, row in read_rows(args.prompts):
        conversation = conversation_of(row, args.prompts, number)
        messages, tools = conversation.messages, conversation.tools
        if messages[-1].role == "assistant":
            raise row_error(args.prompts, number, "the last message is the assistant's: there is nothing to reply to")
        key = conversation_key(messages, tools)
        if key in seen:
            continue
        seen.add(key)
        input_ids = chat.prompt_ids(messages, tools)
        if args.max_length and len(input_ids) + args.max_new_tokens > args.max_length:
            skipped += 1
        else:
            prompts.append(Prompt(key, messages, tools, input_ids))
    return prompts, skipped


def _batches(prompts: list[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    window = batch_size * _WINDOW_BATCHES
    for start in range(0, len(prompts), window):
        ordered = sorted(prompts[start : start + window], key=lambda prompt: len(prompt.input_ids))
        for first in range(0, len(ordered), batch_size):
            yield ordered[first : first + batch_size]
