"""`python -m trainer generate`: the target's own replies to prompts, the text that a drafter has to learn.

Acceptance collapses where the training text is not the target's own output, so replies are made again for every
target. The built-in generator suits small models; a large one is faster behind an OpenAI-compatible server.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from remote.protocol.errors import preflight_error, usage_error
from remote.protocol.locks import LockBusy, LockKind, acquire
from trainer.data.chat import ChatTokenizer, load_tokenizer, parse_template_kwargs
from trainer.data.dialects import Message
from trainer.data.jsonl import parse_row
from trainer.data.openai_server import ChatServer, ServerSettings, replies
from trainer.data.progress import Progress
from trainer.data.prompts import Answer, Prompt, key_of_row, read_prompts
from trainer.target.facts import read_config
from trainer.target.new_directory import told_if_unwritable

# Prompts are sorted by length inside a window of this many batches: little padding, and still every part of the
# output is a fair sample of the prompts, so that an interrupted run leaves a usable set.
_WINDOW_BATCHES = 8


Answers = Generator[list[tuple[Prompt, Answer | None]]]


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
    top_p: float | None = None
    top_k: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    server_model: str | None = None


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
    parser.add_argument("--top-p", type=float, help="sample from the likeliest tokens that make up this share")
    parser.add_argument("--top-k", type=int, help="sample from this many of the likeliest tokens")
    parser.add_argument("--seed", type=int, default=42, help="of sampling; greedy replies do not hang on it")
    parser.add_argument("--token-ids", action="store_true", help="store input_ids and prompt_len, which `train` reads")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--chat-template-kwargs", default="{}", metavar="JSON", help="keywords of the chat template")
    server = parser.add_argument_group("replies from a server", "instead of a model loaded here; any kind of target")
    server.add_argument("--server", metavar="URL", help="OpenAI-compatible, e.g. http://127.0.0.1:8000/v1")
    server.add_argument("--server-model", metavar="NAME", help="default: the only one that the server has")
    server.add_argument("--concurrency", type=int, default=64, help="requests at once (default 64)")
    server.add_argument("--timeout", type=float, default=1800.0, help="seconds for one reply (default 1800)")
    server.add_argument("--api-key-file", type=Path, metavar="FILE", help="a file with the key and nothing else")


def run(args: argparse.Namespace) -> int:
    """Generate what is missing in the output; return the exit code.

    Raises:
        DflashError: a flag out of range, a bad prompt row, an output made with other settings or written to by somebody
            else, an unknown recurrent target.
    """
    _check_flags(args)
    read_config(args.target_model)
    chat = load_tokenizer(args.target_model, parse_template_kwargs(args.chat_template_kwargs))
    server = _server(args, chat) if args.server else None
    recipe = _recipe(args, chat, server)
    with _held(args.output):
        done = _resume(args.output, recipe)
        longest = args.max_length - args.max_new_tokens if args.max_length else sys.maxsize
        prompts, skipped = read_prompts(args.prompts, chat, done, longest)
        print(f"{len(prompts)} prompts to do, {len(done)} done before, {skipped} skipped as too long", flush=True)
        if prompts:
            answers = replies(server, prompts, args.concurrency) if server else _decoded(args, chat, recipe, prompts)
            _write(answers, len(prompts), args)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    if min(args.max_new_tokens, args.batch_size, args.concurrency, args.threads or 1) < 1 or args.threads == 0:
        raise usage_error("--max-new-tokens, --batch-size, --concurrency and --threads start at 1")
    if not 0 <= args.temperature < math.inf:
        raise usage_error(
            f"--temperature {args.temperature} is not possible", hint="0 for greedy, else a positive number"
        )
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise usage_error(f"--top-p {args.top_p} is no share", hint="it is above 0 and at most 1")
    if args.top_k is not None and args.top_k < 1:
        raise usage_error(f"--top-k {args.top_k} is not possible", hint="it starts at 1")


def _server(args: argparse.Namespace, chat: ChatTokenizer) -> ChatServer:
    sampling = {"max_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed}
    # Fields beyond OpenAI's are sent only where they say something: its own service refuses them.
    extra = {"top_p": args.top_p, "top_k": args.top_k, "chat_template_kwargs": chat.template_kwargs}
    request = sampling | {name: value for name, value in extra.items() if value}
    key = _read(args.api_key_file).strip() if args.api_key_file else ""
    server = ChatServer(
        ServerSettings(args.server, request, key, args.timeout, args.token_ids), args.server_model or ""
    )
    if not server.model:
        server.find_model()
    return server


def _write(answers: Answers, count: int, args: argparse.Namespace) -> None:
    """Append each answer as a whole line, on disk before the next ones are waited for."""
    without = 0
    # Unbuffered, so that what a full disk refuses is not tried again at the end.
    with args.output.open("ab", buffering=0) as output, closing(answers), Progress("generate", count) as progress:
        for part in answers:
            rows = [answer.row(prompt, with_ids=args.token_ids) for prompt, answer in part if answer is not None]
            without += len(part) - len(rows)
            lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n" for row in rows)
            with told_if_unwritable(args.output):
                _write_all(output, b"".join(lines))
                os.fsync(output.fileno())
            progress.add(len(part), sum(answer.tokens for _, answer in part if answer))
    if without:
        print(f"{without} prompts got no usable reply; the same command tries them again", file=sys.stderr)


def _write_all(output: FileIO, data: bytes) -> None:
    """Write all of it: a full disk takes a part first, and raises only when asked to take the rest."""
    view = memoryview(data)
    while view:
        view = view[output.write(view) :]


def stop_ids(target_model: Path, chat: ChatTokenizer) -> list[int]:
    """Return the sorted ids that end a reply: those of the generation configuration and the tokenizer's own.

    Both, since a converted model may name only the end of a text there and run on behind the end of its turn.

    Raises:
        DflashError: there is none, or the generation configuration is damaged.
    """
    named: list[int] = [] if chat.eos_token_id is None else [chat.eos_token_id]
    path = target_model / "generation_config.json"
    if path.is_file():
        ids = _object(path).get("eos_token_id") or []
        named += ids if isinstance(ids, list) else [ids]
    if not named:
        raise preflight_error(
            f"{target_model} names no stop token",
            cause="no eos_token_id in generation_config.json, no eos_token in the tokenizer",
            hint="set eos_token_id in generation_config.json",
        )
    return sorted(set(named))


def _decoded(args: argparse.Namespace, chat: ChatTokenizer, recipe: Recipe, prompts: list[Prompt]) -> Answers:
    """Yield the answers of a model loaded here, batch by batch."""
    # Only now, since torch takes seconds to import and everything before can already refuse the call.
    from trainer.data.decoding import DecodeSettings, decode_batch
    from trainer.data.generator_model import load_generator
    from trainer.devices import device_named

    model = load_generator(args.target_model, args.dtype, device_named(args.device), args.threads)
    settings = DecodeSettings(
        args.max_new_tokens, args.temperature, args.seed, tuple(recipe.stop_ids), args.top_p or 1.0, args.top_k or 0
    )
    for batch in _batches(prompts, args.batch_size):
        found = decode_batch(model, [p.input_ids for p in batch], [p.key for p in batch], settings)
        yield [
            (prompt, Answer(Message("assistant", chat.decode(r.token_ids)), r.finish, r.token_ids, len(r.token_ids)))
            for prompt, r in zip(batch, found, strict=True)
        ]


def _recipe(args: argparse.Namespace, chat: ChatTokenizer, server: ChatServer | None) -> Recipe:
    config = (args.target_model / "config.json").read_bytes()
    return Recipe(
        target_config_sha256=hashlib.sha256(config).hexdigest(),
        chat_template_sha256=chat.template_sha256,
        stop_ids=stop_ids(args.target_model, chat),
        dtype="server" if server else args.dtype,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        token_ids=args.token_ids,
        top_p=args.top_p,
        top_k=args.top_k,
        chat_template_kwargs=chat.template_kwargs or None,
        server_model=server.model if server else None,
    )


@contextmanager
def _held(output: Path) -> Iterator[None]:
    """Hold the output for this process: a second one would answer the same prompts and cut lines in the middle."""
    with told_if_unwritable(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = acquire(output, LockKind.EXCLUSIVE)
        except LockBusy:
            raise preflight_error(
                f"another generate writes to {output}", hint="wait for it, or end it and start this one again"
            ) from None
    try:
        yield
    finally:
        os.close(lock)


def _resume(output: Path, recipe: Recipe) -> set[str]:
    """Compare the recipe with the stored one, cut a torn last line, and return the keys that are done."""
    beside = output.with_name(output.name + ".recipe.json")
    if not output.stat().st_size:
        with told_if_unwritable(beside):
            beside.write_text(json.dumps(asdict(recipe), indent=1) + "\n")
        return set()
    if not beside.exists():
        raise preflight_error(
            f"{output} holds something that generate did not write",
            cause=f"there is no {beside.name} beside it",
            hint="use another --output",
        )
    stored = _object(beside)
    changed = [f"{k} was {stored.get(k)!r}, is {v!r}" for k, v in asdict(recipe).items() if stored.get(k) != v]
    if changed:
        raise preflight_error(
            f"{output} was made with other settings",
            cause="; ".join(changed),
            hint=f"use the settings of {beside.name}, or another --output",
        )
    return set(_done_keys(output))


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or raise the DflashError that names it."""
    try:
        values = json.loads(_read(path))
    except ValueError as problem:
        raise preflight_error(f"{path} is no JSON", cause=str(problem), hint="copy or make it again") from problem
    if not isinstance(values, dict):
        raise preflight_error(f"{path} holds no JSON object", hint="copy or make it again")
    return values


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as problem:
        raise preflight_error(
            f"cannot read {path}", cause=str(problem), hint="check the path and its mode"
        ) from problem


def _done_keys(output: Path) -> Iterator[str]:
    with output.open("rb+") as lines:
        whole = 0
        for number, line in enumerate(iter(lines.readline, b""), start=1):
            if not line.endswith(b"\n"):
                lines.truncate(whole)  # the writer was killed in mid-line
                return
            whole += len(line)
            yield key_of_row(parse_row(line, output, number), output, number)


def _batches(prompts: list[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    window = batch_size * _WINDOW_BATCHES
    for start in range(0, len(prompts), window):
        ordered = sorted(prompts[start : start + window], key=lambda prompt: len(prompt.input_ids))
        for first in range(0, len(ordered), batch_size):
            yield ordered[first : first + batch_size]
