"""Prompts are read once each, and the row of an answer leads back to its prompt."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.protocol.errors import DflashError
from trainer.data.chat import ChatTokenizer
from trainer.data.dialects import Message, conversation_key
from trainer.data.prompts import Answer, Prompt, key_of_row, read_prompts

TEXT = st.text(max_size=12)
CALL = {"type": "function", "id": "c1", "function": {"name": "look", "arguments": {"at": "moon"}}}
TURNS = st.lists(
    st.builds(
        Message,
        st.sampled_from(["system", "user", "tool"]),
        TEXT,
        st.sampled_from([{}, {"name": "Ada"}, {"tool_call_id": "c1"}]),
    ),
    min_size=1,
    max_size=4,
)
REPLIES = st.builds(
    Message,
    st.just("assistant"),
    TEXT,
    st.sampled_from([{}, {"reasoning_content": "Hm."}, {"tool_calls": [CALL]}]),
)


@given(TURNS, st.sampled_from([(), ({"name": "look"},)]), REPLIES, st.sampled_from(["stop", "length"]), st.booleans())
def test_a_row_leads_back_to_its_prompt(messages, tools, reply, finish, with_ids) -> None:
    """Or a run that resumes would answer it again."""
    prompt = Prompt(conversation_key(messages, tools), tuple(messages), tools, [1, 2])
    row = Answer(reply, finish, [3, 4], 2).row(prompt, with_ids=with_ids)
    assert key_of_row(row, Path("out.jsonl"), 1) == prompt.key
    assert row["finish"] == finish
    assert (row.get("input_ids"), row.get("prompt_len")) == (([1, 2, 3, 4], 2) if with_ids else (None, None))


def test_prompts_are_read_once_each_without_those_done_or_too_long(
    chat: ChatTokenizer, tmp_path: Path, write_jsonl
) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}, {"prompt": "long " * 50}]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    done = conversation_key([Message("user", "b")])
    prompts, skipped = read_prompts(path, chat, {done}, longest=60)
    assert [prompt.messages[0].content for prompt in prompts] == ["a"]
    assert skipped == 1
    assert prompts[0].input_ids == chat.prompt_ids(prompts[0].messages)


def test_a_tools_answer_is_a_prompt_and_an_assistants_turn_is_none(
    chat: ChatTokenizer, tmp_path: Path, write_jsonl
) -> None:
    turns = [
        {"role": "user", "content": "Where is the moon?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "up"},
    ]
    path = write_jsonl(tmp_path / "p.jsonl", [{"messages": turns, "tools": [{"name": "look"}]}])
    (prompt,), _ = read_prompts(path, chat, (), longest=999)
    assert prompt.tools == ({"name": "look"},)
    with pytest.raises(DflashError, match="row 1") as caught:
        read_prompts(write_jsonl(tmp_path / "q.jsonl", [{"messages": turns[:2]}]), chat, (), longest=999)
    assert "nothing to reply to" in caught.value.cause


def test_a_row_that_the_template_refuses_is_named(chat: ChatTokenizer, tmp_path: Path, write_jsonl) -> None:
    tokenizer = copy.deepcopy(chat._tokenizer)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DflashError, match="row 1") as caught:
        read_prompts(write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}]), ChatTokenizer(tokenizer), (), longest=999)
    assert "the chat template refuses it: roles must alternate" in caught.value.cause
