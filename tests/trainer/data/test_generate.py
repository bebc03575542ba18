from __future__ import annotations

import argparse
import copy
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.protocol.errors import DflashError, ExitCode
from remote.protocol.locks import LockKind, acquire
from trainer.data import generate
from trainer.data.chat import ChatTokenizer
from trainer.data.dialects import Message
from trainer.data.documents import open_dataset
from trainer.data.prompts import Prompt

PROMPTS = [{"prompt": f"Count to {i}."} for i in range(7)]


def arguments(target_dir: Path, prompts: Path, output: Path, *more: object) -> list[str]:
    argv = [
        "--target-model",
        target_dir,
        "--prompts",
        prompts,
        "--output",
        output,
        "--max-new-tokens",
        6,
        "--batch-size",
        2,
    ]
    return [str(a) for a in (*argv, "--dtype", "float32", "--threads", 1, *more)]


def run(*args: Any) -> int:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    return generate.run(parser.parse_args(arguments(*args)))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path: Path, write_jsonl) -> Path:
    return write_jsonl(tmp_path / "prompts.jsonl", PROMPTS)


@pytest.fixture(scope="session")
def hybrid_dir(target_dir: Path, make_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny hybrid target with SmolLM2's tokenizer."""
    made = make_target("Qwen3_5ForCausalLM", vocab_size=49152, num_hidden_layers=3)
    path = shutil.copytree(made, tmp_path_factory.mktemp("hybrid") / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(target_dir / name, path)
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out" / "replies.jsonl"


def test_every_prompt_gets_the_targets_reply(
    target_dir: Path, prompts: Path, output: Path, chat: ChatTokenizer
) -> None:
    assert run(target_dir, prompts, output, "--token-ids") == 0
    made = rows(output)
    assert sorted(row["messages"][0]["content"] for row in made) == [row["prompt"] for row in PROMPTS]
    for row in made:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        head = chat.prompt_ids([Message("user", row["messages"][0]["content"])])
        assert row["input_ids"][: row["prompt_len"]] == head
        reply = row["input_ids"][row["prompt_len"] :]
        assert 1 <= len(reply) <= 6
        assert row["messages"][1]["content"] == chat.decode(reply)
        assert row["finish"] == ("stop" if reply[-1] == 2 else "length")


@pytest.mark.parametrize(("named", "wanted"), [(None, [2]), (1, [1, 2]), ([2, 0], [0, 2])])
def test_the_end_of_the_turn_always_stops(
    target_dir: Path, tmp_path: Path, chat: ChatTokenizer, named: object, wanted: list[int]
) -> None:
    """A conversion that named <|im_start|> (1) alone made replies that ran on behind <|im_end|> (2)."""
    if named is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert generate.stop_ids(tmp_path, chat) == wanted


def test_the_output_is_a_data_set(target_dir: Path, prompts: Path, output: Path) -> None:
    run(target_dir, prompts, output, "--token-ids")
    dataset = open_dataset(output, max_length=99, vocab_size=49152)
    assert int(dataset.supervised.sum()) == sum(len(row["input_ids"]) - row["prompt_len"] for row in rows(output))


def test_conversations_are_prompts_too(target_dir: Path, tmp_path: Path, output: Path, write_jsonl) -> None:
    talk = [
        {"role": r, "content": c}
        for r, c in (("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c"))
    ]
    run(target_dir, write_jsonl(tmp_path / "p.jsonl", [{"messages": talk}]), output)
    assert rows(output)[0]["messages"][:-1] == talk


def test_a_second_run_has_nothing_to_do(
    target_dir: Path, prompts: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(target_dir, prompts, output)
    before = output.read_bytes()
    assert run(target_dir, prompts, output) == 0
    assert output.read_bytes() == before
    assert "0 prompts to do, 7 done before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kept", "which"),
    [(0, "target_dir"), (1, "target_dir"), (300, "target_dir"), (-1, "target_dir"), (-30, "target_dir")]
    + [(700, "hybrid_dir"), (-30, "hybrid_dir")],
)
def test_an_output_cut_anywhere_is_completed_to_the_same_rows(
    request: pytest.FixtureRequest, prompts: Path, output: Path, kept: int, which: str
) -> None:
    """What is left meets other batches than before, with other padding."""
    target = request.getfixturevalue(which)
    run(target, prompts, output, "--token-ids")
    whole = rows(output)
    output.write_bytes(output.read_bytes()[:kept])
    run(target, prompts, output, "--token-ids")
    by_prompt = {row["messages"][0]["content"]: row for row in rows(output)}
    assert len(rows(output)) == len(by_prompt) == 7
    assert all(by_prompt[row["messages"][0]["content"]] == row for row in whole)


def test_killed_and_started_again_it_loses_and_doubles_nothing(
    target_dir: Path, tmp_path: Path, output: Path, write_jsonl
) -> None:
    prompts = write_jsonl(tmp_path / "many.jsonl", [{"prompt": f"Say {i}."} for i in range(60)])
    program = (
        "import argparse; from trainer.data import generate; p = argparse.ArgumentParser(); generate.add_arguments(p);"
        "generate.run(p.parse_args())"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, *arguments(target_dir, prompts, output)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (output.exists() and output.stat().st_size) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=10)
    assert run(target_dir, prompts, output) == 0
    assert sorted(row["messages"][0]["content"] for row in rows(output)) == sorted(f"Say {i}." for i in range(60))


def test_a_prompt_that_stands_twice_is_answered_once(
    target_dir: Path, tmp_path: Path, output: Path, write_jsonl
) -> None:
    run(target_dir, write_jsonl(tmp_path / "p.jsonl", [PROMPTS[0], PROMPTS[0]]), output)
    assert len(rows(output)) == 1


def test_long_prompts_are_skipped_and_counted(
    target_dir: Path, tmp_path: Path, output: Path, write_jsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        target_dir, write_jsonl(tmp_path / "p.jsonl", [*PROMPTS, {"prompt": "word " * 200}]), output, "--max-length", 60
    )
    assert "1 skipped as too long" in capsys.readouterr().out
    assert len(rows(output)) == 7


@pytest.mark.parametrize(
    "changed", [["--temperature", 1], ["--seed", 7], ["--token-ids"], ["--max-new-tokens", 7], ["--top-k", 3]]
)
def test_an_output_of_other_settings_is_not_mixed(
    target_dir: Path, prompts: Path, output: Path, changed: list[Any]
) -> None:
    run(target_dir, prompts, output)
    before = output.read_bytes()
    with pytest.raises(DflashError, match="other settings") as caught:
        run(target_dir, prompts, output, *changed)
    name = str(changed[0]).removeprefix("--").replace("-", "_")
    assert f"{name} was" in caught.value.cause
    assert caught.value.code == ExitCode.PREFLIGHT
    assert output.read_bytes() == before


def test_a_file_of_someone_else_is_not_touched(target_dir: Path, prompts: Path, output: Path) -> None:
    output.parent.mkdir()
    output.write_text("notes without a line end")
    with pytest.raises(DflashError, match="generate did not write") as caught:
        run(target_dir, prompts, output)
    assert caught.value.hint == "use another --output"
    assert output.read_text() == "notes without a line end"


@pytest.mark.parametrize("row", [{"text": "x"}, {"prompt": "a", "completion": "b"}])
def test_a_row_that_is_no_prompt_is_named(
    target_dir: Path, tmp_path: Path, output: Path, write_jsonl, row: dict[str, str]
) -> None:
    with pytest.raises(DflashError, match="row 2"):
        run(target_dir, write_jsonl(tmp_path / "p.jsonl", [PROMPTS[0], row]), output)


@pytest.mark.parametrize(
    "flag",
    [["--batch-size", 0], ["--max-new-tokens", 0], ["--temperature", -1], ["--top-p", 0], ["--top-k", 0]]
    + [["--temperature", "nan"], ["--temperature", "inf"], ["--threads", -1], ["--threads", 0]],
)
def test_flags_out_of_range_are_usage_errors(target_dir: Path, prompts: Path, output: Path, flag: list[Any]) -> None:
    with pytest.raises(DflashError) as caught:
        run(target_dir, prompts, output, *flag)
    assert caught.value.code == ExitCode.USAGE
    assert not output.parent.exists()


@given(st.lists(st.integers(1, 200), max_size=80), st.integers(1, 9))
def test_batches_hold_every_prompt_once_sorted_inside_a_window(lengths: list[int], batch_size: int) -> None:
    prompts = [Prompt(str(i), (), (), [0] * length) for i, length in enumerate(lengths)]
    batches = list(generate._batches(prompts, batch_size))
    keys = [prompt.key for batch in batches for prompt in batch]
    assert sorted(keys, key=int) == [str(i) for i in range(len(lengths))]
    window = batch_size * generate._WINDOW_BATCHES
    for start in range(0, len(keys), window):
        part = keys[start : start + window]
        assert {int(key) for key in part} == set(range(start, start + len(part)))
        sizes = [lengths[int(key)] for key in part]
        assert sizes == sorted(sizes)


def test_a_target_without_a_stop_token_is_refused(tmp_path: Path, chat: ChatTokenizer) -> None:
    endless = copy.copy(chat)
    endless.eos_token_id = None
    with pytest.raises(DflashError, match="no stop token"):
        generate.stop_ids(tmp_path, endless)


def test_a_second_generate_into_the_same_file_is_refused(target_dir: Path, prompts: Path, output: Path) -> None:
    run(target_dir, prompts, output)
    before = output.read_bytes()
    lock = acquire(output, LockKind.EXCLUSIVE)
    try:
        with pytest.raises(DflashError, match="another generate writes to") as caught:
            run(target_dir, prompts, output)
    finally:
        os.close(lock)
    assert caught.value.code == ExitCode.PREFLIGHT
    assert output.read_bytes() == before
    assert run(target_dir, prompts, output) == 0


def test_a_full_disk_is_told_and_the_rest_is_made_later(
    target_dir: Path, prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(file: Any, data: bytes) -> None:
        file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(generate, "_write_all", half)
        with pytest.raises(DflashError, match="cannot write") as caught:
            run(target_dir, prompts, output)
    assert "No space left" in caught.value.cause
    run(target_dir, prompts, output)
    assert sorted(row["messages"][0]["content"] for row in rows(output)) == [row["prompt"] for row in PROMPTS]


def test_what_a_disk_takes_in_parts_is_written_whole() -> None:
    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(data[:3])

    file = Slow()
    generate._write_all(file, b"0123456789")  # type: ignore[arg-type]
    assert file.getvalue() == b"0123456789"


@pytest.mark.parametrize("where", ["file/out.jsonl", "directory"])
def test_a_place_that_cannot_be_written_is_named(target_dir: Path, prompts: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    with pytest.raises(DflashError, match="cannot write") as caught:
        run(target_dir, prompts, tmp_path / where)
    assert caught.value.code == ExitCode.PREFLIGHT


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_recipe_is_named(target_dir: Path, prompts: Path, output: Path, content: str) -> None:
    run(target_dir, prompts, output)
    output.with_name(output.name + ".recipe.json").write_text(content)
    with pytest.raises(DflashError, match=r"recipe\.json"):
        run(target_dir, prompts, output)


def test_a_damaged_generation_configuration_and_missing_files_are_named(
    target_dir: Path, prompts: Path, output: Path, tmp_path: Path, chat: ChatTokenizer
) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(DflashError, match=r"generation_config\.json is no JSON"):
        generate.stop_ids(tmp_path, chat)
    with pytest.raises(DflashError, match="no usable model directory"):
        run(tmp_path, prompts, output)
    with pytest.raises(DflashError, match="cannot read"):
        run(target_dir, prompts, output, "--server", "http://127.0.0.1:9/v1", "--api-key-file", tmp_path / "absent")


@pytest.mark.parametrize("device", ["cuda:77", "npu", "meta"])
def test_a_device_that_is_not_there_is_named(target_dir: Path, prompts: Path, output: Path, device: str) -> None:
    with pytest.raises(DflashError, match=device):
        run(target_dir, prompts, output, "--device", device)
