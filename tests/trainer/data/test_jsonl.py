from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.protocol.errors import DflashError, ExitCode
from trainer.data.jsonl import parse_row, read_lines, read_rows


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_rows_come_with_their_line_numbers_and_blank_lines_are_skipped(tmp_path: Path, name: str, write_jsonl) -> None:
    path = write_jsonl(tmp_path / name, [{"a": 1}, "", {"a": "\u00fc\n"}])
    assert list(read_rows(path)) == [(1, {"a": 1}), (3, {"a": "\u00fc\n"})]


@pytest.mark.parametrize(
    ("line", "cause"), [("{", "not valid JSON"), ("[1]", "a list, not an object"), ("3", "a int, not an object")]
)
def test_a_bad_line_is_named(tmp_path: Path, write_jsonl, line: str, cause: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": 1}, line])
    with pytest.raises(DflashError) as caught:
        list(read_rows(path))
    assert f"{path}, row 2" in caught.value.error
    assert cause in caught.value.cause
    assert caught.value.code == ExitCode.PREFLIGHT


def test_a_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 5000)[:-20])
    with pytest.raises(DflashError, match="damaged gzip"):
        list(read_rows(path))


def test_what_is_no_gzip_file_at_all_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b'{"a": 1}\n')
    with pytest.raises(DflashError, match="damaged gzip"):
        list(read_rows(path))


def test_a_missing_file_is_an_error_for_people(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="cannot read"):
        list(read_rows(tmp_path / "none.jsonl"))


@given(st.binary(max_size=60))
def test_any_bytes_give_an_object_or_an_error_for_people(line: bytes) -> None:
    try:
        row = parse_row(line, Path("x"), 1)
    except DflashError:
        return
    assert isinstance(row, dict)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_positions_lead_from_the_start_to_the_end_of_the_file(tmp_path: Path, name: str, write_jsonl) -> None:
    path = write_jsonl(tmp_path / name, [{"a": i} for i in range(500)])
    positions = [position for _, _, position in read_lines(path)]
    assert positions == sorted(positions)
    assert positions[0] > 0
    assert positions[-1] == path.stat().st_size


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (rb'{"prompt": "bad \ud83d"}', r"half a surrogate pair, \ud83d"),
        (rb'{"prompt": "bad \uDC00 too"}', r"half a surrogate pair, \udc00"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_what_no_tokenizer_takes_is_a_bad_row(line: bytes, cause: str) -> None:
    with pytest.raises(DflashError, match="row 3") as caught:
        parse_row(line, Path("x"), 3)
    assert cause in caught.value.cause


def test_a_whole_pair_of_escapes_is_text() -> None:
    assert parse_row(rb'{"prompt": "\ud83d\ude00 \\ud83d"}', Path("x"), 1) == {"prompt": "\U0001f600 \\ud83d"}
