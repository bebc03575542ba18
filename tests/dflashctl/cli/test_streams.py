"""Standard streams that are closed, full, or gone: no traceback, and the exit code is still the verb's own."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

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


@pytest.mark.parametrize("verb", ["--version", "--help", "start --help", "status", "status --json", "config show"])
def test_a_full_disk_under_stdout_is_an_error_and_no_bug(cli, make_tree, verb):
    (cli.directory / "dflashctl.toml").write_text(f'source = "{make_tree()}"\nroot = "{cli.root}"\n')
    done = shell(cli, f"{verb} >/dev/full")
    lines = done.stderr.splitlines()[-3:]
    assert (done.returncode, [line.split(":")[0] for line in lines]) == (1, ["error", "  cause", "  hint"])
    assert "No space left" in done.stderr
    assert "bug" not in done.stderr


def test_a_full_disk_under_stderr_ends_no_work(cli):
    done = shell(cli, f"status -v --json --root {cli.root} 2>/dev/full")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (0, "none")
    assert shell(cli, "stattus 2>/dev/full").returncode == ExitCode.USAGE


def test_a_home_that_cannot_be_written_loses_no_deploy(cli, make_tree):
    # A link to nowhere: unlike the mode of a directory it stops root as well.
    cli.home.symlink_to("/nonexistent/home")
    arguments = ("--root", str(cli.root), "--python", sys.executable, "--source", str(make_tree()), "--no-selfcheck")
    done = cli("deploy", "--json", *arguments)
    assert (done.returncode, json.loads(done.stdout)["root"]) == (0, str(cli.root))
    assert "warning: this destination is not remembered" in done.stderr
    assert "bug" not in done.stderr
    assert (cli.root / "current").exists()
