"""The real SmolLM2 template and tokenizer; other templates put into the same tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote.protocol.errors import DflashError, ExitCode
from trainer.data.chat import ChatTokenizer, Encoded, load_tokenizer, parse_template_kwargs
from trainer.data.dialects import Conversation, Message

END = "<|im_end|>"
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30)


def talk(*turns: str, finish: str = "stop") -> Conversation:
    roles = ("user", "assistant")
    return Conversation(tuple(Message(roles[i % 2], turn) for i, turn in enumerate(turns)), finish)  # type: ignore[arg-type]


def supervised(chat: ChatTokenizer, encoded: Encoded) -> list[str]:
    """The text of each supervised run, special tokens included."""
    runs: list[list[int]] = []
    before = 0
    for token, on in zip(encoded.input_ids.tolist(), encoded.loss_mask.tolist(), strict=True):
        if on and not before:
            runs.append([])
        if on:
            runs[-1].append(token)
        before = on
    return [chat._tokenizer.decode(run) for run in runs]


def with_template(chat: ChatTokenizer, template: str) -> ChatTokenizer:
    tokenizer = copy.deepcopy(chat._tokenizer)
    tokenizer.chat_template = template
    return ChatTokenizer(tokenizer)


def test_the_reply_and_its_end_are_supervised_and_nothing_else(chat: ChatTokenizer) -> None:
    (encoded,) = chat.encode([talk("hi", "Hello there.")])
    assert supervised(chat, encoded) == ["Hello there." + END]
    assert encoded.turns_left_out == 0


def test_every_turn_of_the_assistant_is_supervised(chat: ChatTokenizer) -> None:
    (encoded,) = chat.encode([talk("hi", "Hello.", "bye", "Farewell!", "again", "No.")])
    assert supervised(chat, encoded) == ["Hello." + END, "Farewell!" + END, "No." + END]


def test_the_document_begins_with_what_the_target_is_given_and_ends_with_a_label(chat: ChatTokenizer) -> None:
    (encoded,) = chat.encode([talk("hi", "Hello there.")])
    prompt = chat.prompt_ids([Message("user", "hi")])
    assert encoded.input_ids.tolist()[: len(prompt)] == prompt
    assert encoded.loss_mask.tolist() == [0] * len(prompt) + [1] * (len(encoded.input_ids) - len(prompt))


def test_a_cut_reply_has_no_end_of_turn(chat: ChatTokenizer) -> None:
    (encoded,) = chat.encode([talk("hi", "Hello the", finish="length")])
    assert supervised(chat, encoded) == ["Hello the"]


def test_only_the_last_reply_was_cut(chat: ChatTokenizer) -> None:
    (encoded,) = chat.encode([talk("hi", "One.", "go on", "Two", finish="length")])
    assert supervised(chat, encoded) == ["One." + END, "Two"]


def test_a_conversation_without_a_reply_has_nothing_supervised(chat: ChatTokenizer) -> None:
    (encoded,) = chat.encode([talk("hi")])
    assert len(encoded.input_ids) == len(encoded.loss_mask) == 0


def test_a_reply_without_a_question_is_left_out(chat: ChatTokenizer) -> None:
    (encoded,) = chat.encode([Conversation((Message("assistant", "Hello."),))])
    assert encoded.turns_left_out == 1
    assert not encoded.loss_mask.any()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_any_text_is_supervised_as_it_stands(chat: ChatTokenizer, turns: list[tuple[str, str]]) -> None:
    turns = [(user.replace("<|", "< |"), reply.replace("<|", "< |")) for user, reply in turns]
    (encoded,) = chat.encode([talk(*(text for turn in turns for text in turn))])
    # SmolLM2's vocabulary lacks some bytes, so the text is compared as the tokenizer alone gives it back. Spaces at the
    # front may share a token with the newline before them, and such a token is none that the target writes.
    tokenizer = chat._tokenizer
    expected = [tokenizer.decode(tokenizer(reply + END)["input_ids"]) for _, reply in turns]
    found = supervised(chat, encoded)
    assert [text.lstrip() for text in found] == [text.lstrip() for text in expected]
    assert all(a == b for a, b in zip(found, expected, strict=True) if not b[0].isspace())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(TEXT, TEXT)
def test_a_batch_is_what_its_members_are_alone(chat: ChatTokenizer, user: str, reply: str) -> None:
    conversations = [talk(user, reply), talk("hi", "Hello.")]
    together = chat.encode(conversations)
    for conversation, encoded in zip(conversations, together, strict=True):
        (alone,) = chat.encode([conversation])
        assert alone.input_ids.tolist() == encoded.input_ids.tolist()
        assert alone.loss_mask.tolist() == encoded.loss_mask.tolist()


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_rewrites_history_keeps_the_last_turn_and_counts_the_others(chat: ChatTokenizer) -> None:
    """Reasoning templates drop the thoughts of earlier turns, so the target never wrote those turns as they stand."""
    (encoded,) = with_template(chat, THINKING).encode([talk("hi", "Hello.", "bye", "Farewell!")])
    assert supervised(chat, encoded) == ["<think></think>Farewell!" + END]
    assert encoded.turns_left_out == 1


def test_a_template_whose_prompt_is_no_prefix_gives_no_labels(chat: ChatTokenizer) -> None:
    template = THINKING.replace("<|im_start|>assistant\n{% endif", "<|im_start|>model\n{% endif")
    (encoded,) = with_template(chat, template).encode([talk("hi", "Hello.")])
    assert not encoded.loss_mask.any()
    assert encoded.turns_left_out == 1


def test_a_template_that_strips_is_followed_for_cut_replies(chat: ChatTokenizer) -> None:
    template = THINKING.replace("{{ m.content }}", "{{ m.content | trim }}")
    (encoded,) = with_template(chat, template).encode([talk("hi", " Hello the ", finish="length")])
    assert supervised(chat, encoded) == ["<think></think>Hello the"]


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="no tokenizer in"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_cannot_be_read_is_refused(chat: ChatTokenizer, tmp_path: Path) -> None:
    chat._tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(DflashError, match="no usable tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer.json" in caught.value.hint


def test_a_tokenizer_without_a_template_is_refused(chat: ChatTokenizer, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(chat._tokenizer)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DflashError, match="no chat template"):
        load_tokenizer(tmp_path)


def named_templates(chat: ChatTokenizer, path: Path, **templates: str) -> Path:
    """A tokenizer as Hermes 3 and Command R have it: its templates by name."""
    tokenizer = copy.deepcopy(chat._tokenizer)
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(path)
    return path


def test_of_named_templates_default_is_taken_and_tool_use_for_rows_with_tools(
    chat: ChatTokenizer, tmp_path: Path
) -> None:
    path = named_templates(chat, tmp_path / "both", default=chat._tokenizer.chat_template, tool_use=QWEN)
    found = load_tokenizer(path)
    plain, with_tools = talk("hi", "Hello."), Conversation(talk("hi", "Hello.").messages, "stop", TOOLS)
    assert found.render(plain) == chat.render(plain)
    assert found.render(with_tools) == with_template(chat, QWEN).render(with_tools)
    assert found.template(plain.messages[:1]) != found.template(plain.messages[:1], TOOLS)
    alone = load_tokenizer(named_templates(chat, tmp_path / "one", default=chat._tokenizer.chat_template))
    assert alone.render(with_tools) == chat.render(with_tools)
    # A recipe that was made with other templates is another one.
    assert found.template_sha256 != chat.template_sha256 == alone.template_sha256


def test_named_templates_without_a_default_are_refused(chat: ChatTokenizer, tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="no chat template named default") as caught:
        load_tokenizer(named_templates(chat, tmp_path / "odd", rag=QWEN, tool_use=QWEN), instead="do without")
    assert caught.value.cause == "its templates: rag, tool_use"
    assert caught.value.hint.endswith("or do without")


QWEN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '\\n' }}</think>\n\n{% endif %}{% endif %}"
)
TOOLS = ({"name": "look"},)


def qwen(chat: ChatTokenizer, reply: Message, finish: str = "stop", **kwargs: object) -> str:
    """What is supervised of one reply under a template with thoughts and tools."""
    tokenizer = with_template(chat, QWEN)._tokenizer
    conversation = Conversation((Message("user", "hi"), reply), finish, TOOLS)  # type: ignore[arg-type]
    (encoded,) = ChatTokenizer(tokenizer, kwargs).encode([conversation])
    text = chat._tokenizer.decode(encoded.input_ids.tolist())
    assert '"name": "look"' in text
    (run,) = supervised(chat, encoded) or [""]
    return run


def test_thoughts_and_calls_are_the_targets_own_words(chat: ChatTokenizer) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "moon"}}}
    reply = Message("assistant", "Wait.", {"reasoning_content": "Hm.", "tool_calls": [call]})
    assert qwen(chat, reply) == "Hm.\n</think>\n\nWait.<tool_call>look at=moon</tool_call>" + END


def test_a_template_keyword_decides_where_the_reply_begins(chat: ChatTokenizer) -> None:
    assert qwen(chat, Message("assistant", "Hello."), enable_thinking=False) == "Hello." + END
    assert qwen(chat, Message("assistant", "Hello.")) == "\n</think>\n\nHello." + END


def test_a_reply_cut_in_its_thoughts_ends_there(chat: ChatTokenizer) -> None:
    assert qwen(chat, Message("assistant", "", {"reasoning_content": "Let me see"}), "length") == "Let me see"
    assert qwen(chat, Message("assistant", "Hel", {"reasoning_content": "Hm."}), "length") == "Hm.\n</think>\n\nHel"


def test_the_prompt_holds_the_tools(chat: ChatTokenizer) -> None:
    tokenizer = with_template(chat, QWEN)
    prompt = tokenizer.prompt_ids([Message("user", "hi")], TOOLS)
    assert '"name": "look"' in chat._tokenizer.decode(prompt)


@pytest.mark.parametrize("name", ["tokenize", "tools", "add_generation_prompt", "chat_template"])
def test_what_is_no_keyword_of_a_template_is_refused(name: str) -> None:
    with pytest.raises(DflashError, match=f"cannot set {name}") as caught:
        parse_template_kwargs(f'{{"{name}": true}}')
    assert caught.value.code == ExitCode.USAGE


@pytest.mark.parametrize("text", ["enable_thinking", "[1]", "3"])
def test_template_keywords_are_an_object(text: str) -> None:
    with pytest.raises(DflashError, match="no JSON object"):
        parse_template_kwargs(text)
    assert parse_template_kwargs('{"enable_thinking": false}') == {"enable_thinking": False}


def test_a_tokenizer_that_says_to_cut_or_to_pad_is_not_obeyed(chat: ChatTokenizer) -> None:
    """tokenizer.json files in the wild carry the truncation of whoever saved them."""
    tokenizer = copy.deepcopy(chat._tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(max_length=8)
    tokenizer.backend_tokenizer.enable_padding(length=99)
    conversations = [talk("hi", "Hello there, this is a longer reply."), talk("hi", "Hello.")]
    for one, other in zip(ChatTokenizer(tokenizer).encode(conversations), chat.encode(conversations), strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.loss_mask.tolist() == other.loss_mask.tolist()


def test_ids_are_those_that_transformers_gives(chat: ChatTokenizer) -> None:
    conversation = talk("What is 2 + 2?\n\n  Think!", "  4. <|im_end|> is a special token, été and 你好 are none.")
    text = chat.render(conversation).text
    (encoded,) = chat.encode([conversation])
    wanted = chat._tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encoded.input_ids.tolist() == wanted[: len(encoded.input_ids)]
    assert len(wanted) - len(encoded.input_ids) == 1  # the newline behind the end of the turn


def test_nothing_is_nothing(chat: ChatTokenizer) -> None:
    assert chat.encode([]) == []
