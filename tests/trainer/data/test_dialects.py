from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.protocol.errors import DflashError
from trainer.data.dialects import Conversation, Message, conversation_key, conversation_of

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
        {"messages": [{"role": "User", "content": "hi"}, {"role": "ASSISTANT", "content": "hello"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "chatgpt", "value": "hello"}]},
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
        ({"messages": [{"role": "teacher", "content": "hi"}]}, "no known role: 'teacher'"),
        ({"prompt": "hi", "completion": "x", "response": "y"}, "both completion and response"),
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


def turn(**fields: Any) -> Message:
    return read({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", **fields}]}).messages[-1]


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "the moon"}}}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_have_one_name(name: str) -> None:
    message = turn(content="hello", **{name: "A greeting."})
    assert message == Message("assistant", "hello", {"reasoning_content": "A greeting."})
    assert message.to_dict() == {"role": "assistant", "content": "hello", "reasoning_content": "A greeting."}


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"type": "function", "function": {"name": "look", "arguments": '{"at": "the moon"}'}},
        {"name": "look", "arguments": {"at": "the moon"}},
    ],
)
def test_tool_calls_have_one_form_and_need_no_content(call: dict[str, Any]) -> None:
    for content in ({}, {"content": None}, {"content": ""}):
        assert turn(tool_calls=[call], **content) == Message("assistant", "", {"tool_calls": [CALL]})


def test_the_answer_of_a_tool_keeps_what_it_answers() -> None:
    message = read(
        {"messages": [{"role": "tool", "content": "bright", "tool_call_id": "c1", "name": "look"}]}
    ).messages[0]
    assert message == Message("tool", "bright", {"tool_call_id": "c1", "name": "look"})
    assert read({"conversations": [{"from": "observation", "value": "bright"}]}).messages[0] == Message(
        "tool", "bright"
    )


@pytest.mark.parametrize("tools", [[{"name": "look"}], '[{"name": "look"}]'])
def test_tools_stand_beside_the_messages(tools: Any) -> None:
    assert read({"prompt": "hi", "tools": tools}).tools == ({"name": "look"},)


@pytest.mark.parametrize("none", [None, [], "", "[]"])
def test_no_tools_are_none(none: Any) -> None:
    assert read({"prompt": "hi", "tools": none}).tools == ()


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"prompt": "hi", "tools": "look"}, "tools need"),
        ({"prompt": "hi", "tools": ["look"]}, "tools need"),
        ({"messages": [{"role": "user", "content": "hi", "name": 3}]}, "name of a message is a int"),
        ({"messages": [{"role": "user", "content": "hi", "reasoning": ["a"]}]}, "reasoning_content of a message"),
        ({"messages": [{"role": "assistant", "tool_calls": "look"}]}, "tool_calls need"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "tool_calls need"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "tool_calls need"),
        ({"messages": [{"role": "assistant", "content": 3, "tool_calls": [CALL]}]}, "needs role and content"),
    ],
)
def test_wrong_tools_and_thoughts_are_named(row: dict[str, Any], cause: str) -> None:
    with pytest.raises(DflashError) as caught:
        read(row)
    assert "row 7" in caught.value.error
    assert cause in caught.value.cause


def test_the_key_of_a_prompt_is_pinned() -> None:
    """An output that is resumed by a later version has to be recognised."""
    assert conversation_key([Message("user", "Count to 3.")]) == "c6318caad8681765"


def test_everything_the_target_sees_is_in_the_key() -> None:
    keys = {
        conversation_key([Message("user", "Count to 3.")]),
        conversation_key([Message("system", "Count to 3.")]),
        conversation_key([Message("user", "Count to 3.", {"name": "Ada"})]),
        conversation_key([Message("user", "Count to 3.")], [{"name": "look"}]),
    }
    assert len(keys) == 4
