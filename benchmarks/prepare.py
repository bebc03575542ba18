"""`python -m benchmarks.prepare --target-model DIR`: the speed of `prepare`, the share of the tokenizer in it, its memory.

Three measurements over chats made of random words: the CPU seconds of each stage in one thread; the tokens a second of the
whole verb on one core and on all of them, without its start; and its peak memory over N and over 10 N rows, which should not
differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer.data.chat import load_tokenizer
from trainer.data.dialects import conversation_of
from trainer.data.jsonl import parse_row
from trainer.data.tokenised_files import Documents, document_writer

Result = TypeVar("Result")

# Words of source code and of prose, so that a token is about as long as in real chats (3.5 to 4.5 characters).
_TEXT = (
    "the of a list returns value for each string number which sorted is def return in range(len(values)): "
    "if else not print(result) count += 1 first, last index None True: self.items import numpy as np\n"
)


@dataclass(frozen=True)
class Stages:
    """CPU seconds of each stage over the same rows, and the tokens they made."""

    seconds: dict[str, float]
    tokens: int

    @property
    def tokenizer_share(self) -> float:
        """The tokenizer's share of all CPU time, 0..1."""
        return self.seconds["tokenizer"] / sum(self.seconds.values())


def make_chats(path: Path, rows: int, words: int = 150, seed: int = 0) -> None:
    """Write `rows` conversations of one turn each, of about `words` words together."""
    draw, known = random.Random(seed), _TEXT.split(" ")
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            parts = [" ".join(draw.choices(known, k=count)) for count in (words // 3, words - words // 3)]
            file.write(json.dumps({"prompt": parts[0], "completion": parts[1]}) + "\n")


def stages(target_model: Path, chats: Path) -> Stages:
    """Measure each stage alone, in one thread; the tokenizer's is what its Rust code takes for the same texts."""
    chat = load_tokenizer(target_model)
    lines = chats.read_bytes().splitlines()
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Result]) -> Result:
        before = time.process_time()
        result = work()
        seconds[name] = time.process_time() - before
        return result

    talks = timed("parse", lambda: [conversation_of(parse_row(line, chats, 1), chats, 1) for line in lines])
    rendered = timed("template", lambda: [chat.render(talk) for talk in talks])
    backend: Any = chat._tokenizer.backend_tokenizer
    timed("tokenizer", lambda: backend.encode_batch([one.text for one in rendered], add_special_tokens=False))
    encoded = timed("with loss mask", lambda: chat.tokenise(rendered))
    seconds["loss mask"] = max(seconds.pop("with loss mask") - seconds["tokenizer"], 0.0)
    documents = timed("join", lambda: Documents.of(encoded))

    def write() -> None:
        with tempfile.TemporaryDirectory() as directory, document_writer(Path(directory)) as writer:
            writer.write(documents)

    timed("write", write)
    return Stages(seconds, len(documents.input_ids))


def whole(target_model: Path, chats: Path, processes: int) -> dict[str, float]:
    """Run the verb in a process of its own; returns wall and CPU seconds, peak MiB of its largest process, and tokens."""
    with tempfile.TemporaryDirectory() as directory:
        argv = ["prepare", "--target-model", target_model, "--input", chats, "--output", Path(directory) / "set"]
        program = (
            "import json, resource, sys, time; from trainer.__main__ import main; began = time.monotonic(); "
            "code = main(sys.argv[1:]); own = resource.getrusage(resource.RUSAGE_SELF); "
            "workers = resource.getrusage(resource.RUSAGE_CHILDREN); print(json.dumps({'wall': time.monotonic() - began, "
            "'cpu': own.ru_utime + own.ru_stime + workers.ru_utime + workers.ru_stime, "
            "'mib': max(own.ru_maxrss, workers.ru_maxrss) / 1024})); sys.exit(code)"
        )
        command = [sys.executable, "-c", program, *map(str, argv), "--processes", str(processes)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    counts, figures = map(json.loads, done.stdout.splitlines()[-2:])
    return figures | {"tokens": counts["tokens"]}


def counts_up_to(cores: int) -> list[int]:
    """Return 1, 2, 4, ... and last all cores."""
    return [*(1 << i for i in range(cores.bit_length()) if 1 << i < cores), cores]


def rate(small: dict[str, float], large: dict[str, float]) -> float:
    """Return tokens a second of what the larger run has more than the smaller one: both start alike."""
    return (large["tokens"] - small["tokens"]) / max(large["wall"] - small["wall"], 1e-9)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prepare", description=__doc__)
    parser.add_argument("--target-model", type=Path, required=True, metavar="DIR", help="whose tokenizer and template")
    parser.add_argument("--rows", type=int, default=2000, help="N (default 2000)")
    parser.add_argument("--processes", type=int, nargs="*", default=None, help="default: 1, 2, 4, ... and all cores")
    arguments = parser.parse_args(argv)
    counts = arguments.processes or counts_up_to(len(os.sched_getaffinity(0)))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as directory:
        few, many = Path(directory) / "few.jsonl", Path(directory) / "many.jsonl"
        make_chats(few, arguments.rows)
        make_chats(many, 10 * arguments.rows)
        found = stages(arguments.target_model, few)
        each = ", ".join(f"{name} {value:.3f} s" for name, value in found.seconds.items())
        core = found.tokens / sum(found.seconds.values())
        print(f"{found.tokens:,} tokens, one thread: {each}")
        print(f"the tokenizer takes {found.tokenizer_share:.0%} of the CPU time; {core:,.0f} tok/s a core")
        for processes in counts:
            small, large = (whole(arguments.target_model, chats, processes) for chats in (few, many))
            print(
                f"{processes} processes: {rate(small, large):,.0f} tok/s, {rate(small, large) / core:.2f} times a core's; "
                f"{large['tokens']:,.0f} tokens in {large['wall']:.1f} s with the start, {large['cpu']:.1f} s of CPU; "
                f"peak {large['mib']:.0f} MiB a process, {small['mib']:.0f} over a tenth of the rows"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
