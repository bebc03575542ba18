"""The dialects of raw chat data, read into one form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.data.jsonl import row_error

# role/content is OpenAI's form, from/value ShareGPT's with its own names of roles. Others, in whatever case, are none: a
# template renders any, and the assistant's turns would be without labels, without a word.
_ROLES = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool", "function", "ipython")},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}

# Servers name a reply's thoughts in two ways; templates know the first.
_THOUGHTS = ("reasoning_content", "reasoning")


@dataclass(frozen=True)
class Message:
    """One turn: role, content, and in `extras` the other fields that templates read.

    These are reasoning_content, tool_calls, tool_call_id and name; only those that the turn has.
    """

    role: str
    content: str
    extras: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the message as templates and OpenAI-compatible servers take it."""
        return {"role": self.role, "content": self.content, **self.extras}


@dataclass(frozen=True)
class Conversation:
    """Messages in order, the tools they may call, and whether the last reply was cut ("length") by its generator."""

    messages: tuple[Message, ...]
    finish: Literal["stop", "length"] = "stop"
    tools: tuple[dict[str, Any], ...] = ()


def conversation_of(row: dict[str, Any], path: Path, number: int) -> Conversation:
    """Return the conversation of a raw row.

    Known: `messages` or `conversations` of role/content or from/value; `prompt` with `completion` or `response`;
    `prompt` alone; beside any of them `tools`, and `finish` or `finish_reason`. A turn may have `reasoning_content` (or
    `reasoning`) and `tool_calls`, and with these no content.

    Raises:
        DflashError: the row is in none of the dialects; file, row and columns are named.
    """
    turns = row.get("messages", row.get("conversations"))
    if turns is None and "prompt" in row:
        replies = [{"role": "assistant", "content": row[name]} for name in ("completion", "response") if name in row]
        if len(replies) > 1:
            raise row_error(path, number, "it has both completion and response")
        turns = [{"role": "user", "content": row["prompt"]}, *replies]
    if not isinstance(turns, list) or not turns:
        columns = ", ".join(sorted(row)) or "none"
        raise row_error(path, number, f"no messages, conversations or prompt in it; columns seen: {columns}")
    messages = tuple(_message(turn, path, number) for turn in turns)
    cut = row.get("finish", row.get("finish_reason")) == "length"
    return Conversation(messages, "length" if cut else "stop", _tools(row.get("tools"), path, number))


def conversation_key(messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
    """Return the identity of messages: 16 hex digits of sha256 over roles, contents, extras and tools."""
    parts: list[Any] = [[m.role, m.content, m.extras] if m.extras else [m.role, m.content] for m in messages]
    if tools:
        parts.append({"tools": list(tools)})
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _message(turn: Any, path: Path, number: int) -> Message:
    if isinstance(turn, dict):
        role, content = turn.get("role", turn.get("from")), _text(turn.get("content", turn.get("value")))
        extras = _extras(turn, path, number)
        if content is None and extras.get("tool_calls") and turn.get("content", turn.get("value")) is None:
            content = ""
        if isinstance(role, str) and content is not None:
            if role.lower() not in _ROLES:
                raise row_error(path, number, f"no known role: {role!r}", f"name it one of {', '.join(_ROLES)}")
            return Message(_ROLES[role.lower()], content, extras)
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


def _extras(turn: dict[str, Any], path: Path, number: int) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    thoughts = next((turn[name] for name in _THOUGHTS if turn.get(name)), None)
    if thoughts is not None:
        extras["reasoning_content"] = thoughts
    for name in ("tool_call_id", "name"):
        if turn.get(name) is not None:
            extras[name] = turn[name]
    wrong = [name for name, value in extras.items() if not isinstance(value, str)]
    if wrong:
        raise row_error(path, number, f"{wrong[0]} of a message is a {type(extras[wrong[0]]).__name__}, not a string")
    if calls := turn.get("tool_calls"):
        extras["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else [None]
        if None in extras["tool_calls"]:
            raise row_error(path, number, "tool_calls need to be a list of calls with a function's name and arguments")
    return extras


def _call(call: Any) -> dict[str, Any] | None:
    """Return a tool call in the form templates read, arguments as an object; None if it is no call.

    OpenAI's arguments are JSON in a string; templates that list them one by one (Qwen3.5) fail on that.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    identity = {"id": call["id"]} if call is not function and isinstance(call.get("id"), str) else {}
    return {"type": "function", **identity, "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any, path: Path, number: int) -> tuple[dict[str, Any], ...]:
    """Return the tools of a row: a list of objects, or that list as JSON in a string (parquet exports have it so)."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except ValueError:
            tools = [None]
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise row_error(path, number, "tools need to be a list of objects")
    return tuple(tools)
