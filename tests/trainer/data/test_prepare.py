from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from remote.protocol.errors import DflashError, ExitCode
from trainer.data import prepare, tokenised_files
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


def run(target_dir: Path, inputs: list[Path], output: Path, max_length: int = 200) -> int:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    argv = ["--target-model", target_dir, "--input", *inputs, "--output", output, "--max-length", max_length]
    return prepare.run(parser.parse_args([str(a) for a in argv]))


def counts(output: Path) -> dict[str, Any]:
    return json.loads((output / "dataset.json").read_text())["counts"]


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
    run(target_dir, chats, tmp_path / "parquet")
    monkeypatch.setattr(tokenised_files.importlib.util, "find_spec", lambda name: None)
    run(target_dir, chats, tmp_path / "jsonl")
    assert (tmp_path / "parquet" / "documents.parquet").is_file()
    assert (tmp_path / "jsonl" / "documents.jsonl").is_file()
    prints = {open_dataset(tmp_path / name, max_length=200).fingerprint for name in ("parquet", "jsonl")}
    assert len(prints) == 1


def test_the_recipe_names_what_the_set_hangs_on(tmp_path: Path, target_dir: Path, write_jsonl) -> None:
    run(target_dir, [write_jsonl(tmp_path / "a.jsonl", CHATS)], tmp_path / "set")
    recipe = json.loads((tmp_path / "set" / "dataset.json").read_text())["recipe"]
    assert recipe["sources"][0]["name"] == "a.jsonl"
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

    monkeypatch.setattr(tokenised_files.ParquetWriter, "write", full)
    with pytest.raises(OSError, match="No space left"):
        run(target_dir, [write_jsonl(tmp_path / "a.jsonl", CHATS)], tmp_path / "set")
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
