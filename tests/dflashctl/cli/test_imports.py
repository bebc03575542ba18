"""What a verb leaves unimported: each of these costs more than the rest of a command line."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

HEAVY = ("pydantic", "rich", "fabric", "paramiko", "torch", "unittest.mock")
SCRIPT = """
import json, sys
from dflashctl.cli import run
code = run(sys.argv[2:])
print(json.dumps([code, [name for name in json.loads(sys.argv[1]) if name in sys.modules]]))
"""


def imported_by(cli, *arguments):
    """Run a command line in a process of its own; return its exit code and which of HEAVY it imported."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(HEAVY), *arguments],
        cwd=cli.directory,
        env=cli.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "words",
    [
        ["status", "--run", ""],
        ["status", "--json"],
        ["stop", "--grace", "5"],
        ["logs", "--follow", "--file", "events"],
        ["runs"],
        ["deploy", "--no-selfcheck"],
    ],
    ids=lambda words: words[0],
)
def test_a_verb_on_this_machine_imports_nothing_heavy(cli, words):
    _, heavy = imported_by(cli, *words, "--host", "local", "--root", str(cli.root), "--python", sys.executable)
    assert heavy == []


def test_a_number_goes_the_long_way(cli):
    """The negative of the above: what has to be converted is, and refused where it cannot be."""
    code, heavy = imported_by(cli, "logs", "--tail", "x")
    assert code == 2
    assert ("pydantic" in heavy) == bool(find_spec("typer._adapters"))
