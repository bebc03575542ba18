from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from remote.protocol.errors import DflashError, ExitCode
from trainer.data import prepare, sources, tokenised_files
from trainer.data.documents import open_dataset

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"question {i}"},
            {"role": "assistant", "content": f"Answer {i}. " * (i + 1)},
        ]
    }
    for i in range(5)
]


def run(
    target_dir: Path, inputs: list[Path], output: Path, *more: object, max_length: int = 200, kind: str = "--input"
) -> int:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    argv = ["--target-model", target_dir, kind, *inputs, "--output", output, "--max-length", max_length, *more]
    return prepare.run(parser.parse_args([str(a) for a in argv]))


def facts(output: Path) -> dict[str, Any]:
    return json.loads((output / "dataset.json").read_text())


def contents(path: Path) -> list[list[int]]:
    dataset = open_dataset(path, max_length=200)
    return [dataset.document(i).input_ids.tolist() for i in range(len(dataset))]


def counts(output: Path) -> dict[str, Any]:
    return facts(output)["counts"]


def test_chats_become_documents_that_open(
    tmp_path: Path, target_dir: Path, write_jsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "set"
    inputs = [write_jsonl(tmp_path / "a.jsonl", CHATS[:3]), write_jsonl(tmp_path / "b.jsonl.gz", CHATS[3:])]
    assert run(target_dir, inputs, output) == 0
    dataset = open_dataset(output, max_length=200, vocab_size=49152)
    assert len(dataset) == counts(output)["written"] == 5
    assert int(dataset.supervised.sum()) == counts(output)["supervised_tokens"]
    assert int(dataset.lengths.sum()) == counts(output)["tokens"]
    said = capsys.readouterr()
    assert json.loads(said.out)["written"] == 5
    assert "prepare: 5 rows" in said.err


def test_both_forms_hold_the_same_documents(
    tmp_path: Path, target_dir: Path, write_jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = [write_jsonl(tmp_path / "a.jsonl", CHATS)]
    run(target_dir, chats, tmp_path / "arrow")
    monkeypatch.setattr(tokenised_files.importlib.util, "find_spec", lambda name: None)
    run(target_dir, chats, tmp_path / "jsonl")
    assert (tmp_path / "arrow" / "documents.arrow").is_file()
    assert (tmp_path / "jsonl" / "documents.jsonl").is_file()
    prints = {open_dataset(tmp_path / name, max_length=200).fingerprint for name in ("arrow", "jsonl")}
    assert len(prints) == 1


def test_the_recipe_names_what_the_set_hangs_on(tmp_path: Path, target_dir: Path, write_jsonl) -> None:
    run(target_dir, [write_jsonl(tmp_path / "a.jsonl", CHATS)], tmp_path / "set")
    found = facts(tmp_path / "set")
    recipe = found["recipe"]
    assert found["sources"][0]["name"] == "a.jsonl"
    assert len(found["sources"][0]["sha256"]) == 64
    assert all(len(recipe[name]) == 64 for name in ("tokenizer_sha256", "chat_template_sha256"))


def test_long_documents_are_cut_and_those_left_without_a_label_dropped(
    tmp_path: Path, target_dir: Path, write_jsonl
) -> None:
    long_question = {"prompt": "word " * 100, "completion": "Yes."}
    run(target_dir, [write_jsonl(tmp_path / "a.jsonl", [*CHATS, long_question])], tmp_path / "set", max_length=40)
    found = counts(tmp_path / "set")
    assert (found["read"], found["written"], found["without_supervised_tokens"]) == (6, 5, 1)
    assert found["truncated"] > 1
    assert open_dataset(tmp_path / "set", max_length=99).lengths.max() == 40


@pytest.mark.parametrize("rows", [[{"prompt": "hi"}], []])
def test_no_supervised_token_is_an_error_with_counts_and_leaves_nothing(
    tmp_path: Path, target_dir: Path, write_jsonl, rows: list[Any]
) -> None:
    with pytest.raises(DflashError, match="no supervised token") as caught:
        run(target_dir, [write_jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "set")
    assert f"read={len(rows)}" in caught.value.cause
    assert caught.value.code == ExitCode.PREFLIGHT
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_bad_row_leaves_nothing(tmp_path: Path, target_dir: Path, write_jsonl) -> None:
    with pytest.raises(DflashError, match=r"a\.jsonl, row 6"):
        run(target_dir, [write_jsonl(tmp_path / "a.jsonl", [*CHATS, {"text": "x"}])], tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, target_dir: Path, write_jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenised_files.ArrowWriter, "write", full)
    with pytest.raises(DflashError, match="cannot write") as caught:
        run(target_dir, [write_jsonl(tmp_path / "a.jsonl", CHATS)], tmp_path / "set")
    assert "No space left" in caught.value.cause
    assert caught.value.code == ExitCode.PREFLIGHT
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_an_existing_output_is_never_overwritten(tmp_path: Path, target_dir: Path, write_jsonl) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "precious").touch()
    with pytest.raises(DflashError, match="exists"):
        run(target_dir, [write_jsonl(tmp_path / "a.jsonl", CHATS)], tmp_path / "set")
    assert (tmp_path / "set" / "precious").exists()


def test_a_length_without_room_for_a_label_is_a_usage_error(tmp_path: Path, target_dir: Path) -> None:
    with pytest.raises(DflashError) as caught:
        run(target_dir, [tmp_path / "a.jsonl"], tmp_path / "set", max_length=1)
    assert caught.value.code == ExitCode.USAGE


def numbered(first: int, last: int, word: str = "Number") -> list[dict[str, str]]:
    return [{"prompt": f"{word} {i}?", "completion": f"{word} {i}. " * (i % 3 + 1)} for i in range(first, last)]


def test_several_processes_write_the_same_bytes_as_one(
    tmp_path: Path, target_dir: Path, write_jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_BATCH_ROWS", 7)
    inputs = [write_jsonl(tmp_path / "a.jsonl", numbered(0, 60)), write_jsonl(tmp_path / "b.jsonl.gz", CHATS)]
    for processes in (1, 2):
        more = ("--processes", processes, "--held-out", 0.2)
        run(target_dir, inputs, tmp_path / f"of-{processes}", *more)
    for name in ("documents.arrow", "held-out/documents.arrow", "dataset.json"):
        assert (tmp_path / "of-1" / name).read_bytes() == (tmp_path / "of-2" / name).read_bytes()


def test_small_inputs_take_one_process(tmp_path: Path, write_jsonl) -> None:
    small = sources.Source(write_jsonl(tmp_path / "a.jsonl", CHATS))
    assert prepare._processes([small]) == 1
    large = sources.Source(tmp_path / "large")
    with large.path.open("wb") as file:
        file.truncate(1 << 40)
    assert prepare._processes([large]) == len(os.sched_getaffinity(0))


def test_held_out_prompts_stay_so_with_other_replies_and_in_other_company(
    tmp_path: Path, target_dir: Path, write_jsonl
) -> None:
    inputs = [write_jsonl(tmp_path / "a.jsonl", numbered(0, 80))]
    run(target_dir, inputs, tmp_path / "first", "--held-out", 0.25)
    found = counts(tmp_path / "first")
    aside = contents(tmp_path / "first" / "held-out")
    assert found["written"] + found["held_out"] == 80
    assert 5 < found["held_out"] == len(aside) < 40
    assert found["held_out_tokens"] == sum(map(len, aside))
    assert not {tuple(ids) for ids in aside} & {tuple(ids) for ids in contents(tmp_path / "first")}
    others = [{**row, "completion": "Another reply."} for row in reversed(numbered(20, 120))]
    run(target_dir, [write_jsonl(tmp_path / "b.jsonl", others)], tmp_path / "second", "--held-out", 0.25)
    # 13 tokens are the same whatever the reply: the template's head and the prompt.
    opening = {tuple(ids[:35]) for ids in contents(tmp_path / "first")}
    assert not opening & {tuple(ids[:35]) for ids in contents(tmp_path / "second" / "held-out")}


def test_an_empty_held_out_part_is_an_error(tmp_path: Path, target_dir: Path, write_jsonl) -> None:
    with pytest.raises(DflashError, match="no conversation fell into the held-out share"):
        run(target_dir, [write_jsonl(tmp_path / "a.jsonl", CHATS[:1])], tmp_path / "set", "--held-out", 1e-9)
    assert not (tmp_path / "set").exists()


def test_a_held_out_part_that_takes_everything_is_an_error(tmp_path: Path, target_dir: Path, write_jsonl) -> None:
    with pytest.raises(DflashError, match="every conversation fell into the held-out share") as caught:
        run(target_dir, [write_jsonl(tmp_path / "a.jsonl", CHATS[:1])], tmp_path / "set", "--held-out", 1 - 1e-9)
    assert "lower --held-out" in caught.value.hint
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(("mixing", "large", "small"), [("shrink", 10, 30), ("repeat", 200, 600)])
def test_sources_stand_in_proportion_to_their_weights(
    tmp_path: Path, target_dir: Path, write_jsonl, mixing: str, large: int, small: int
) -> None:
    a, b = write_jsonl(tmp_path / "a.jsonl", numbered(0, 200)), write_jsonl(tmp_path / "b.jsonl", numbered(0, 30, "B"))
    run(target_dir, [f"{a}=1", f"{b}=3"], tmp_path / "set", "--mixing", mixing, kind="--source")  # type: ignore[list-item]
    found = facts(tmp_path / "set")["sources"]
    assert [source["weight"] for source in found] == [1, 3]
    # The scarce side is exact; the other one is drawn by hash, 200 rows at one in twenty.
    assert abs(found[0]["written"] - large) <= 8
    assert found[1]["written"] == small
    assert found[0]["not_taken"] == 200 - min(found[0]["written"], 200)


def test_bad_rows_are_skipped_up_to_a_number(
    tmp_path: Path, target_dir: Path, write_jsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    lopsided = {"messages": [{"role": "user", "content": "a", "name": 3}]}
    path = write_jsonl(tmp_path / "a.jsonl", [CHATS[0], "{", *CHATS[1:], lopsided])
    run(target_dir, [path], tmp_path / "set", "--skip-bad-rows", 2)
    assert (counts(tmp_path / "set")["written"], counts(tmp_path / "set")["bad_rows"]) == (5, 2)
    said = capsys.readouterr().err
    assert "a.jsonl, row 2: the line is not valid JSON" in said
    assert "a.jsonl, row 7: name of a message" in said
    with pytest.raises(DflashError, match="row 7"):
        run(target_dir, [path], tmp_path / "other", "--skip-bad-rows", 1)


def test_template_keywords_are_part_of_the_recipe(tmp_path: Path, target_dir: Path, write_jsonl) -> None:
    run(
        target_dir, [write_jsonl(tmp_path / "a.jsonl", CHATS)], tmp_path / "set", "--chat-template-kwargs",
        '{"enable_thinking": false}',
    )  # fmt: skip
    assert facts(tmp_path / "set")["recipe"]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    "more",
    [
        ["--held-out", 1],
        ["--held-out", -0.1],
        ["--processes", 0],
        ["--skip-bad-rows", -1],
        ["--chat-template-kwargs", "[]"],
    ],
)
def test_flags_out_of_range_are_usage_errors(tmp_path: Path, target_dir: Path, more: list[Any]) -> None:
    with pytest.raises(DflashError) as caught:
        run(target_dir, [tmp_path / "a.jsonl"], tmp_path / "set", *more)
    assert caught.value.code == ExitCode.USAGE


def test_a_file_named_twice_is_a_usage_error(tmp_path: Path, target_dir: Path) -> None:
    (tmp_path / "in").mkdir()
    for other in (tmp_path / "a.jsonl", tmp_path / "in" / ".." / "a.jsonl"):
        with pytest.raises(DflashError, match="named twice"):
            run(target_dir, [tmp_path / "a.jsonl", other], tmp_path / "set")


def test_a_pipe_is_refused(tmp_path: Path, target_dir: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DflashError, match="no regular file"):
        run(target_dir, [tmp_path / "pipe.jsonl"], tmp_path / "set")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "holds no conversation"),
        ([{"prompt": "word " * 300, "completion": "Yes."}], "raise --max-length"),
        ([{"prompt": "hi"}], "assistant turns"),
    ],
)
def test_the_hint_says_why_nothing_is_left(
    tmp_path: Path, target_dir: Path, write_jsonl, rows: list[Any], said: str
) -> None:
    with pytest.raises(DflashError, match="no supervised token") as caught:
        run(target_dir, [write_jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "set")
    assert said in caught.value.hint


def test_an_empty_directory_by_any_name_is_taken(
    tmp_path: Path, target_dir: Path, write_jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run(target_dir, [write_jsonl(tmp_path / "a.jsonl", CHATS)], Path())
    assert counts(tmp_path / "here")["written"] == 5


def test_the_table_says_what_became_of_each_source(
    tmp_path: Path, target_dir: Path, write_jsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = [
        write_jsonl(tmp_path / "a.jsonl", CHATS[:3]),
        write_jsonl(tmp_path / "b.jsonl", [*CHATS[3:], {"prompt": "x"}]),
    ]
    run(target_dir, inputs, tmp_path / "set")
    said = capsys.readouterr().err
    assert [len(line.split()) for line in said.splitlines() if line.startswith((str(tmp_path), "all"))] == [7, 7, 7]
    assert "1 without a label" in said
    found = counts(tmp_path / "set")
    assert sum(found["lengths"].values()) == found["written"] == 5
