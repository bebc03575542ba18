"""Standard streams that are closed, full, or gone: no traceback, and the exit code is still the verb's own."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from remote.protocol.errors import ExitCode


def shell(cli, line):
    """Run `dflashctl` and what follows it in a shell, which can close streams; `line` may redirect."""
    return subprocess.run(
        ["/bin/sh", "-c", f"{shlex.join(cli.command())} {line}"],
        cwd=cli.directory, env=cli.environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "code"),
    [("status", 0), ("runs", 0), ("releases", 0), ("--version", 0), ("start --help", 0), ("stop", 3), ("stattus", 2)],
)
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_closed_stream_changes_no_exit_code(cli, verb, code, closed):
    if verb.isalpha() and code != ExitCode.USAGE:
        verb += f" --root {cli.root}"
    done = shell(cli, f"{verb} {closed}")
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
