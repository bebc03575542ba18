"""The real SmolLM2 tokenizer, taken out of its package once a session, and a tiny random model that fits it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from trainer.data.chat import ChatTokenizer, load_tokenizer

WriteJsonl = Callable[[Path, Iterable[Any]], Path]


@pytest.fixture
def write_jsonl() -> WriteJsonl:
    """Write rows (or raw strings) as JSON lines, gzipped where the name says so."""

    def write(path: Path, rows: Iterable[Any]) -> Path:
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path

    return write


@pytest.fixture(scope="session")
def chat(target_dir: Path) -> ChatTokenizer:
    return load_tokenizer(target_dir)
