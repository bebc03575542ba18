"""`python -m trainer prepare`: chat JSONL through the target's template to tokenised documents with a loss mask."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from remote.protocol.errors import preflight_error, usage_error
from trainer.data.chat import ChatTokenizer, Encoded, load_tokenizer
from trainer.data.dialects import Conversation, conversation_of
from trainer.data.jsonl import read_rows
from trainer.data.progress import Progress
from trainer.data.tokenised_files import document_writer
from trainer.target.new_directory import new_directory

_SCHEMA = 1
# Rows tokenised together (the tokenizer runs them in parallel) and written as one parquet row group.
_BATCH_ROWS = 1024


@dataclass
class Counts:
    """What was read, written and left out; documents, except where the name says tokens or turns."""

    read: int = 0
    written: int = 0
    truncated: int = 0
    without_supervised_tokens: int = 0
    turns_left_out: int = 0
    tokens: int = 0
    supervised_tokens: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `prepare`."""
    parser.add_argument("--target-model", type=Path, required=True, metavar="DIR", help="whose tokenizer and template")
    parser.add_argument(
        "--input", type=Path, required=True, nargs="+", metavar="FILE", help="chat data, .jsonl or .jsonl.gz"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new directory")
    parser.add_argument("--max-length", type=int, default=4096, help="tokens; longer documents are cut (default 4096)")


def run(args: argparse.Namespace) -> int:
    """Tokenise all inputs into a new directory; return the exit code.

    Raises:
        DflashError: an input that cannot be read, a row in no known dialect, no supervised token in any document,
            an output that exists.
    """
    if args.max_length < 2:
        raise usage_error(f"--max-length {args.max_length} leaves no room for a token and its label")
    chat = load_tokenizer(args.target_model)
    counts = Counts()
    progress = Progress("prepare")
    with new_directory(args.output) as directory:
        with document_writer(directory) as writer:
            for batch in _batches(args.input):
                documents = list(_documents(chat.encode(batch), args.max_length, counts))
                writer.write(documents)
                progress.add(len(batch), sum(len(document.input_ids) for document in documents))
        if not counts.supervised_tokens:
            raise preflight_error(
                "no supervised token in any document: there is nothing to train on",
                cause=str(counts),
                hint="the data need assistant turns that the chat template renders as it does in a prompt",
            )
        facts = {"schema": _SCHEMA, "counts": asdict(counts), "recipe": _recipe(args, chat)}
        (directory / "dataset.json").write_text(json.dumps(facts, indent=1) + "\n")
    progress.say()
    print(json.dumps(asdict(counts)), flush=True)
    return 0


def _batches(paths: Sequence[Path]) -> Iterator[list[Conversation]]:
    rows = (conversation_of(row, path, number) for path in paths for number, row in read_rows(path))
    while batch := list(itertools.islice(rows, _BATCH_ROWS)):
        yield batch


def _documents(encoded: Sequence[Encoded], max_length: int, counts: Counts) -> Iterator[Encoded]:
    """Cut to the maximum length, drop what has no label left, and count."""
    for document in encoded:
        counts.read += 1
        counts.turns_left_out += document.turns_left_out
        if len(document.input_ids) > max_length:
            counts.truncated += 1
            document = replace(
                document, input_ids=document.input_ids[:max_length], loss_mask=document.loss_mask[:max_length]
            )
        supervised = int(document.loss_mask.sum())
        if not supervised:
            counts.without_supervised_tokens += 1
            continue
        counts.written += 1
        counts.tokens += len(document.input_ids)
        counts.supervised_tokens += supervised
        yield document


def _recipe(args: argparse.Namespace, chat: ChatTokenizer) -> dict[str, object]:
    return {
        "max_length": args.max_length,
        "tokenizer_sha256": chat.tokenizer_sha256,
        "chat_template_sha256": chat.template_sha256,
        "sources": [{"name": path.name, "sha256": _sha256(path)} for path in args.input],
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
