"""The dialects of raw chat data, read into one form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.data.jsonl import row_error

# role/content is OpenAI's form, from/value ShareGPT's with its own names of roles.
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and whether the last reply ended by itself or was cut ("length") by its generator."""

    messages: tuple[Message, ...]
    finish: Literal["stop", "length"] = "stop"


def conversation_of(row: dict[str, Any], path: Path, number: int) -> Conversation:
    """Return the conversation of a raw row.

    Known: `messages` or `conversations` of role/content or from/value; `prompt` with `completion` or `response`;
    `prompt` alone; beside any of them `finish` or `finish_reason`.

    Raises:
        DflashError: the row is in none of the dialects; file, row and columns are named.
    """
    turns = row.get("messages", row.get("conversations"))
    if turns is None and "prompt" in row:
        turns = [{"role": "user", "content": row["prompt"]}]
        turns += [{"role": "assistant", "content": row[name]} for name in ("completion", "response") if name in row]
    if not isinstance(turns, list) or not turns:
        columns = ", ".join(sorted(row)) or "none"
        raise row_error(path, number, f"no messages, conversations or prompt in it; columns seen: {columns}")
    messages = tuple(_message(turn, path, number) for turn in turns)
    cut = row.get("finish", row.get("finish_reason")) == "length"
    return Conversation(messages, "length" if cut else "stop")


def _message(turn: Any, path: Path, number: int) -> Message:
    if isinstance(turn, dict):
        role, content = turn.get("role", turn.get("from")), _text(turn.get("content", turn.get("value")))
        if isinstance(role, str) and content is not None:
            return Message(_ROLES.get(role, role), content)
    raise row_error(path, number, "a message needs role and content (or from and value), both strings")


def _text(content: Any) -> str | None:
    """Return a content string; OpenAI's list of text parts is joined, anything else is None."""
    if isinstance(content, str):
        return content
    if isinstance(content, Iterable) and not isinstance(content, dict):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        return "".join(part for part in parts if part is not None) if parts and None not in parts else None
    return None
