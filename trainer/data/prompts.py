"""Prompts for `generate`, and the answers to them as rows of its output."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError

from trainer.data.chat import ChatTokenizer
from trainer.data.dialects import Message, conversation_key, conversation_of
from trainer.data.jsonl import read_rows, row_error


@dataclass(frozen=True)
class Prompt:
    """Messages that the assistant replies to, the tools it may call, their identity, and the ids the target continues."""

    key: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    input_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """The assistant's turn, how it ended, and its token ids as they were written (empty where a server keeps them)."""

    message: Message
    finish: Literal["stop", "length"]
    token_ids: list[int]
    tokens: int

    def row(self, prompt: Prompt, *, with_ids: bool) -> dict[str, Any]:
        """Return the row of the output: a chat that `prepare` reads, with ids a document that `train` reads."""
        messages = [message.to_dict() for message in (*prompt.messages, self.message)]
        row: dict[str, Any] = {"messages": messages, "finish": self.finish}
        if prompt.tools:
            row["tools"] = list(prompt.tools)
        if with_ids:
            row |= {"input_ids": prompt.input_ids + self.token_ids, "prompt_len": len(prompt.input_ids)}
        return row


def key_of_row(row: dict[str, Any], path: Path, number: int) -> str:
    """Return the key of the prompt that a row of the output answers."""
    conversation = conversation_of(row, path, number)
    return conversation_key(conversation.messages[:-1], conversation.tools)


def read_prompts(path: Path, chat: ChatTokenizer, done: Collection[str], longest: int) -> tuple[list[Prompt], int]:
    """Return (prompts that are not done, each once, count of those of more than `longest` tokens).

    Raises:
        DflashError: a row that is no prompt; file and row are named.
    """
    seen = set(done)
    prompts: list[Prompt] = []
    skipped = 0
    for number, row in read_rows(path):
        conversation = conversation_of(row, path, number)
        messages, tools = conversation.messages, conversation.tools
        if messages[-1].role == "assistant":
            raise row_error(path, number, "the last message is the assistant's: there is nothing to reply to")
        key = conversation_key(messages, tools)
        if key in seen:
            continue
        seen.add(key)
        try:
            input_ids = chat.prompt_ids(messages, tools)
        except TemplateError as error:
            raise row_error(path, number, f"the chat template refuses it: {error}") from None
        if len(input_ids) > longest:
            skipped += 1
        else:
            prompts.append(Prompt(key, messages, tools, input_ids))
    return prompts, skipped
