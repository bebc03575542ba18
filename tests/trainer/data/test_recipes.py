"""What docs/recipes.md says to type is accepted by the verbs that it names."""

from __future__ import annotations

import argparse
import importlib
import shlex
from pathlib import Path

import pytest

from trainer.__main__ import VERBS

RECIPES = Path(__file__).parents[3] / "docs" / "recipes.md"
TEXT = RECIPES.read_text(encoding="utf-8").replace("\\\n", " ")
COMMANDS = [line.strip() for line in TEXT.splitlines() if line.startswith("    ") and "python -m trainer " in line]


def test_there_is_a_command_for_every_step() -> None:
    assert {command.split()[3] for command in COMMANDS} == {"generate", "prepare", "evaluate", "export"}


@pytest.mark.parametrize("command", COMMANDS)
def test_its_flags_exist(command: str) -> None:
    _, _, _, verb, *argv = shlex.split(command)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module(VERBS[verb][0]).add_arguments(parser)
    _, unknown = parser.parse_known_args(argv)
    assert unknown == []


def test_its_files_exist() -> None:
    links = [part.split(")")[0] for part in TEXT.split("](")[1:]]
    assert links
    assert all((RECIPES.parent / link).is_file() for link in links)
