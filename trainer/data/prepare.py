"""`python -m trainer prepare`: chat JSONL through the target's template to tokenised documents with a loss mask."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from remote.protocol.errors import preflight_error, usage_error
from trainer.data.chat import ChatTokenizer, load_tokenizer, parse_template_kwargs
from trainer.data.progress import Progress
from trainer.data.sources import Source, line_batches, mixed, parse_source
from trainer.data.statistics import Counts, table, total
from trainer.data.tokenised_files import DocumentWriter, document_writer
from trainer.data.tokenising import Task, tokenise_all
from trainer.target.new_directory import new_directory, told_if_unwritable

_SCHEMA = 2

HELD_OUT = "held-out"
"""The directory inside the output that holds what is not trained on."""

# A process takes 3 s of CPU to start, in which a running one does 3 MB.
_BYTES_PER_PROCESS = 8 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `prepare`."""
    parser.add_argument("--target-model", type=Path, required=True, metavar="DIR", help="whose tokenizer and template")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument(
        "--input", type=Path, nargs="+", metavar="FILE", help="chat data, .jsonl or .jsonl.gz, taken whole"
    )
    data.add_argument(
        "--source",
        nargs="+",
        metavar="FILE=WEIGHT",
        help="the same, mixed so that conversations of each file stand in proportion to its weight",
    )
    parser.add_argument(
        "--mixing",
        choices=["shrink", "repeat"],
        default="shrink",
        help="reach the proportions by leaving out from plentiful sources, or by repeating scarce ones (default shrink)",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new directory")
    parser.add_argument("--max-length", type=int, default=4096, help="tokens; longer documents are cut (default 4096)")
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.0,
        metavar="SHARE",
        help=f"put this share of the prompts, chosen by their hash, into OUTPUT/{HELD_OUT} (default 0)",
    )
    parser.add_argument(
        "--chat-template-kwargs",
        type=str,
        default="{}",
        metavar="JSON",
        help="""keywords of the template, e.g. '{"enable_thinking": false}'; give `generate` the same""",
    )
    parser.add_argument("--processes", type=int, help="default: one a core, fewer for small inputs")
    parser.add_argument(
        "--skip-bad-rows", type=int, default=0, metavar="N", help="go on after up to N rows that cannot be read"
    )


def run(args: argparse.Namespace) -> int:
    """Tokenise all inputs into a new directory; return the exit code.

    Raises:
        DflashError: an input that cannot be read, a row in no known dialect, no supervised token in any document,
            an output that exists.
    """
    _check_flags(args)
    kwargs = parse_template_kwargs(args.chat_template_kwargs)
    chat = load_tokenizer(args.target_model, kwargs)
    sources = _sources(args)
    task = Task(args.target_model, kwargs, sources, args.max_length, args.held_out)
    with told_if_unwritable(args.output), new_directory(args.output) as directory:
        counts = _write(chat, task, directory, args.processes or _processes(sources), args.skip_bad_rows)
        whole = total(counts)
        facts = {
            "schema": _SCHEMA,
            "counts": whole.to_dict(),
            "sources": [
                {"name": s.path.name, "weight": s.weight, "times": s.times, "sha256": _sha256(s.path)} | c.to_dict()
                for s, c in zip(sources, counts, strict=True)
            ],
            "recipe": _recipe(args, chat),
        }
        (directory / "dataset.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(table({str(s.path): c for s, c in zip(sources, counts, strict=True)}), file=sys.stderr)
    print(json.dumps(whole.to_dict()), flush=True)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    if args.max_length < 2:
        raise usage_error(f"--max-length {args.max_length} leaves no room for a token and its label")
    if not 0 <= args.held_out < 1:
        raise usage_error(f"--held-out {args.held_out} is no share", hint="it is at least 0 and less than 1, e.g. 0.02")
    if args.processes is not None and args.processes < 1:
        raise usage_error(f"--processes {args.processes} is not possible", hint="it starts at 1")
    if args.skip_bad_rows < 0:
        raise usage_error(f"--skip-bad-rows {args.skip_bad_rows} is not possible", hint="it starts at 0")


def _sources(args: argparse.Namespace) -> list[Source]:
    sources = [parse_source(text) for text in args.source] if args.source else [Source(path) for path in args.input]
    places = [source.path.resolve() for source in sources]
    twice = [source.path for i, source in enumerate(sources) if places[i] in places[:i]]
    if twice:
        raise usage_error(f"{twice[0]} is named twice", hint="a --source may have a larger weight")
    # Read more than once: for its rows, its size and its checksum. A pipe, as of <(zcat ...), is empty the second time.
    odd = [source.path for source in sources if source.path.exists() and not source.path.is_file()]
    if odd:
        raise preflight_error(f"{odd[0]} is no regular file", hint="give a .jsonl or .jsonl.gz file")
    return mixed(sources, args.mixing) if args.source else sources


def _processes(sources: Sequence[Source]) -> int:
    size = sum(source.path.stat().st_size for source in sources if source.path.exists())
    return min(len(os.sched_getaffinity(0)), 1 + size // _BYTES_PER_PROCESS)


def _write(chat: ChatTokenizer, task: Task, directory: Path, processes: int, most_bad: int) -> list[Counts]:
    """Write both parts; return the counts of each source."""
    counts = [Counts() for _ in task.sources]
    sizes = [source.path.stat().st_size if source.path.exists() else 0 for source in task.sources]
    bad = 0
    with ExitStack() as stack:
        train = stack.enter_context(document_writer(directory))
        aside: DocumentWriter | None = None
        if task.held_out:
            (directory / HELD_OUT).mkdir()
            aside = stack.enter_context(document_writer(directory / HELD_OUT))
        progress = stack.enter_context(Progress("prepare"))
        for part in tokenise_all(chat, task, line_batches(task.sources), processes):
            for error in part.bad:
                bad += 1
                if bad > most_bad:
                    raise error
                print(f"skipped: {error}: {error.cause}", file=sys.stderr)
            train.write(part.train)
            if aside is not None:
                aside.write(part.held_out)
            counts[part.source].add(part.counts)
            done = (sum(sizes[: part.source]) + part.position) / max(sum(sizes), 1)
            progress.add(len(part.train) + len(part.held_out), part.counts.all_tokens, share=done)
    _check(total(counts), task.held_out)
    return counts


def _check(counts: Counts, held_out: float) -> None:
    if counts.held_out and not counts.written:
        raise preflight_error(
            f"every conversation fell into the held-out share of {held_out:g}",
            cause=f"{counts.held_out} were set aside, and none is left to train on",
            hint="lower --held-out, or give more conversations: those with the same first prompt stay together",
        )
    if not counts.supervised_tokens:
        raise preflight_error(
            "no supervised token in any document: there is nothing to train on",
            cause=str(counts),
            hint=_way_out(counts),
        )
    if held_out and not counts.held_out:
        raise preflight_error(
            f"no conversation fell into the held-out share of {held_out:g}",
            cause=f"there are {counts.written} documents",
            hint="raise --held-out, or leave it away",
        )


def _way_out(counts: Counts) -> str:
    """Return what may be wrong where nothing is left to train on."""
    if not counts.read:
        return "the input holds no conversation: give files with rows"
    if counts.truncated:
        return "the documents were cut before their first label: raise --max-length"
    return "the data need assistant turns that the chat template renders as it does in a prompt"


def _recipe(args: argparse.Namespace, chat: ChatTokenizer) -> dict[str, Any]:
    return {
        "max_length": args.max_length,
        "held_out": args.held_out,
        "mixing": args.mixing if args.source else None,
        "chat_template_kwargs": chat.template_kwargs,
        "tokenizer_sha256": chat.tokenizer_sha256,
        "chat_template_sha256": chat.template_sha256,
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
