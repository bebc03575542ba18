"""How a run that ends badly looks from here: killed ranks, killed everything; and verbs on a terminal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
from terminal import on_terminal

from remote.agent.processes import recorded
from remote.protocol.errors import ExitCode
from remote.protocol.identity import read_pidfile


@pytest.fixture
def running(cli, standin_tree):
    """Return a function that deploys the stand-in with switches and starts it."""

    def start(*switches):
        arguments = ("--host", "local", "--root", str(cli.root), "--python", sys.executable)
        deployed = cli("deploy", *arguments, "--source", str(standin_tree(*switches)))
        assert deployed.returncode == 0, deployed.stderr
        started = cli("start", "--json")
        assert started.returncode == 0, started.stderr
        return cli.run_layout()

    return start


def test_a_killed_rank_fails_the_run_and_is_named(cli, running):
    run = running()
    victim = read_pidfile(run.rank_pid(1))
    assert victim.send(signal.SIGKILL)
    followed = cli("logs", "--follow")
    assert followed.returncode == ExitCode.FAILED
    assert "rank 1" in followed.stderr
    assert followed.stdout.splitlines()[-1].startswith(f"run {run.run_id} failed at step")
    status = json.loads(cli("status", "--json").stdout)
    assert (status["state"], status["failed_rank"]) == ("failed", 1)
    assert "rank 1" in cli("status").stdout
    assert cli("start").returncode == 0


def test_with_everything_killed_the_run_is_lost_and_the_next_one_starts(cli, running):
    run = running()
    supervisor, leader = read_pidfile(run.supervisor_pid), read_pidfile(run.trainer_pid)
    for identity in (supervisor, leader, *recorded(run).values()):
        identity.send(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while json.loads(cli("status", "--json").stdout)["state"] != "lost":
        assert time.monotonic() < deadline
    followed = cli("logs", "--follow", "--json")
    assert followed.returncode == ExitCode.FAILED
    assert json.loads(followed.stdout.splitlines()[-1])["state"] == "lost"
    # What status knows of it, and the way on.
    message = json.loads(cli("status", "--json").stdout)["message"]
    told = cli("logs", "-f")
    assert message
    assert message in told.stderr
    assert "start --resume" in told.stderr
    assert cli("stop").returncode == 0
    assert cli("start").returncode == 0


def test_logs_of_a_run_that_is_gone_is_exit_code_three(cli):
    for verb in ("logs", "stop"):
        done = cli(verb, "--json", "--root", str(cli.root), "--python", sys.executable)
        assert (done.returncode, json.loads(done.stdout)["code"]) == (ExitCode.NO_RUN, 3)
    unknown = cli("status", "--run", "20200101-000000-000000", "--root", str(cli.root), "--python", sys.executable)
    assert unknown.returncode == ExitCode.NO_RUN


def test_a_deleted_log_directory_is_no_traceback(cli, running):
    run = running("--steps", "3", "--pause", "0.001")
    cli("logs", "-f", "--tail", "0")
    run.train_log.unlink()
    run.events.unlink()
    for arguments in (("logs",), ("logs", "--follow"), ("status",), ("runs",)):
        done = cli(*arguments)
        assert "Traceback" not in done.stderr
        assert "bug" not in done.stderr
        assert done.returncode == 0, done.stderr


def test_a_terminal_gets_colours_and_a_bar_and_a_dumb_one_neither(cli, running):
    running("--steps", "30", "--pause", "0.02")
    environment = cli.environment(TERM="xterm-256color")
    code, seen = on_terminal(cli.command("logs", "--follow"), environment, cli.directory)
    assert code == 0
    assert "━" in seen
    assert "30/30" in seen
    assert "finished at step 30" in seen
    code, seen = on_terminal(cli.command("status"), environment, cli.directory)
    assert (code, "\x1b[32mfinished\x1b[0m" in seen) == (0, True)
    no_colour, dumb = {"NO_COLOR": "1"}, {"TERM": "dumb", "FORCE_COLOR": "1"}
    for plain, verb in ((no_colour, "status"), (dumb, "logs --tail 3"), (no_colour, "runs"), (dumb, "start --help")):
        code, seen = on_terminal(cli.command(*verb.split()), environment | plain, cli.directory)
        assert (code, "\x1b" in seen) == (0, False), verb


def test_ctrl_c_in_mid_deploy_leaves_nothing_half_done(cli, standin_tree):
    tree = standin_tree()
    main = tree / "trainer" / "__main__.py"
    main.write_text(f"import time\nprint('checking', flush=True)\ntime.sleep(30)\n{main.read_text()}")
    arguments = ("--host", "local", "--root", str(cli.root), "--python", sys.executable, "--source", str(tree))
    process = subprocess.Popen(
        cli.command("deploy", *arguments), cwd=cli.directory, env=cli.environment(), stderr=subprocess.PIPE, text=True
    )
    while "selfcheck" not in (line := process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, "interrupted" in errors) == (ExitCode.INTERRUPTED, True)
    assert not (cli.root / "current").exists()
    assert not (cli.home / "destinations.json").exists()


def test_a_stop_in_mid_load_ends_without_a_step(cli, standin_tree):
    arguments = ("--host", "local", "--root", str(cli.root), "--python", sys.executable)
    assert cli("deploy", *arguments, "--source", str(standin_tree("--load", "1"))).returncode == 0
    waiting = cli("start", "--limit", "0.4")
    assert waiting.returncode == ExitCode.NOT_READY
    assert "loading" in waiting.stderr
    stopped = json.loads(cli("stop", "--json").stdout)
    assert stopped["status"]["state"] == "stopped"


def test_a_start_whose_run_is_stopped_while_it_loads_is_no_success(cli, standin_tree):
    arguments = ("--host", "local", "--root", str(cli.root), "--python", sys.executable)
    assert cli("deploy", *arguments, "--source", str(standin_tree("--load", "4"))).returncode == 0
    process = subprocess.Popen(
        cli.command("start"), cwd=cli.directory, env=cli.environment(), stderr=subprocess.PIPE, text=True
    )
    while "loading" not in (line := process.stderr.readline()):
        assert line
    assert cli("stop").returncode == 0
    _, errors = process.communicate(timeout=30)
    run = cli.run_layout().run_id
    assert (process.returncode, f"error: run {run} was stopped before its first step" in errors) == (1, True), errors
