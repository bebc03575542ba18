from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.protocol.errors import DflashError
from trainer.data.dialects import Conversation, Message, conversation_of

WANTED = (Message("user", "hi"), Message("assistant", "hello"))
ANYTHING = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "from", "content", "value"]), inner)
    ),
    max_leaves=8,
)


def read(row: dict[str, Any]) -> Conversation:
    return conversation_of(row, Path("chat.jsonl"), 7)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
                      {"role": "assistant", "content": "hello"}]},
        {"prompt": "hi", "completion": "hello"},
        {"prompt": "hi", "response": "hello", "id": 3},
    ],
)  # fmt: skip
def test_all_dialects_say_the_same(row: dict[str, Any]) -> None:
    assert read(row) == Conversation(WANTED)


def test_a_prompt_alone_is_a_conversation_without_a_reply() -> None:
    assert read({"prompt": "hi"}) == Conversation(WANTED[:1])


@pytest.mark.parametrize("name", ["finish", "finish_reason"])
def test_a_cut_reply_is_known(name: str) -> None:
    assert read({"prompt": "hi", "completion": "hello", name: "length"}).finish == "length"
    assert read({"prompt": "hi", "completion": "hello", name: "stop"}).finish == "stop"


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"text": "x", "id": 1}, "columns seen: id, text"),
        ({"messages": []}, "columns seen: messages"),
        ({"messages": [{"role": "user"}]}, "needs role and content"),
        ({"messages": [{"role": "user", "content": None}]}, "needs role and content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "needs role and content"),
        ({"messages": ["hi"]}, "needs role and content"),
        ({"prompt": 3, "completion": "x"}, "needs role and content"),
    ],
)
def test_other_rows_are_named(row: dict[str, Any], cause: str) -> None:
    with pytest.raises(DflashError) as caught:
        read(row)
    assert caught.value.error == "bad row in chat.jsonl, row 7"
    assert cause in caught.value.cause


@given(st.dictionaries(st.sampled_from(["messages", "conversations", "prompt", "completion", "x"]), ANYTHING))
def test_any_row_is_read_or_refused_for_people(row: dict[str, Any]) -> None:
    try:
        conversation = read(row)
    except DflashError:
        return
    assert all(isinstance(message, Message) for message in conversation.messages)
