"""The first word to a far end: fixed, small, plain, and of use to a Python that is too old for all the rest."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from dflashctl.release import build_pyz
from remote.protocol.loader import LOADER
from tests.remote.conftest import REPOSITORY

# Each as a far end's interpreter would have it; all but the last are too old.
VERSIONS = [((2, 7, 18), False), ((3, 9, 2), False), ((3, 10, 12), False), ((3, 11, 0), True)]


def pretending(version, program, *arguments):
    """Run `program` in an interpreter that says it is another one."""
    prologue = f"import sys\nsys.version_info = {(*version, 'final', 0)!r}\n"
    command = [sys.executable, "-I", "-c", prologue + program, *arguments]
    return subprocess.run(command, input=b"", capture_output=True, check=False, timeout=30)


def test_it_is_ascii_under_4_kib_and_one_argument():
    assert LOADER.isascii()
    # A word of an argv, quoted once for the host's shell, and nothing that pct or ps would choke on.
    assert len(LOADER) < 4096
    assert "\0" not in LOADER
    assert "'" not in LOADER, "quoting would blow each up to five characters"


def test_an_old_python_can_read_it_to_the_line_that_refuses():
    # Nothing newer than the oldest grammar that ast still knows; f-strings and := came later.
    ast.parse(LOADER, feature_version=(3, 4))


@pytest.mark.parametrize(("version", "fits"), VERSIONS)
def test_a_python_that_is_too_old_says_which_it_is(version, fits):
    done = pretending(version, f"exec({LOADER!r})", "status")
    said = done.stderr.decode()
    text = ".".join(map(str, version))
    assert (f"agent: Python 3.11 or newer is needed, this is {text}" in said) == (not fits)
    assert done.returncode == 1
    if fits:
        assert said == "agent: standard input ended before the agent was complete\n"


@pytest.mark.parametrize(("version", "fits"), VERSIONS)
def test_so_does_the_agent_that_lies_there(tmp_path, version, fits):
    pyz = tmp_path / "agent.pyz"
    pyz.write_bytes(build_pyz(REPOSITORY))
    done = pretending(version, f"import runpy\nrunpy.run_path({str(pyz)!r}, run_name='__main__')", "status")
    assert (b"agent: Python 3.11 or newer is needed" in done.stderr) == (not fits)
    if fits:
        assert done.stderr == b"agent: no request on standard input\n"
