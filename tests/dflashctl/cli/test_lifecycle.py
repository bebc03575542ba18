"""The verbs as a user types them, against the real agent and the stand-in trainer on this machine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from remote.protocol.errors import ExitCode
from remote.protocol.identity import read_pidfile


def deploy(cli, tree, *extra):
    done = cli(
        "deploy", "--host", "local", "--root", str(cli.root), "--source", str(tree), "--python", sys.executable, *extra
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_four_commands_as_they_stand_in_the_readme(cli, standin_tree):
    deploy(cli, standin_tree())
    started = cli.process("start", "--profile-interval", "60", "--split-fc", "off")
    assert started.returncode == 0, started.stderr
    assert started.stdout.startswith("step 1, loss 10, 1 target / 1 drafter")
    assert "profile_interval=60" in started.stderr
    assert "fresh" in started.stderr
    following = subprocess.Popen(
        cli.command("logs", "--follow"), cwd=cli.directory, env=cli.environment(), stdout=subprocess.PIPE, text=True
    )
    assert "run_started" in following.stdout.readline()
    stopped = cli.process("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert re.fullmatch(r"run \S+ stopped at step \d+, checkpoint /\S+", stopped.stdout.splitlines()[-1])
    assert "checkpoint of step" in stopped.stderr
    rest, _ = following.communicate(timeout=20)
    assert following.returncode == ExitCode.OK
    assert rest.splitlines()[-1].startswith("run ")
    assert " stopped at step" in rest.splitlines()[-1]
    assert cli.process("stop").returncode == 0


def test_status_json_has_the_fields_that_scripts_rely_on(cli, standin_tree):
    before = cli("status", "--json", "--root", str(cli.root))
    assert before.returncode == 0
    assert json.loads(before.stdout)["state"] == "none"
    deploy(cli, standin_tree())
    run = json.loads(cli("start", "--json", "--name", "näme $(x)").stdout)
    status = json.loads(cli("status", "--json").stdout)
    assert {key: status[key] for key in ("schema", "run_id", "state", "host", "ct", "name")} == {
        "schema": 1,
        "run_id": run["run_id"],
        "state": "running",
        "host": "local",
        "ct": "",
        "name": "näme $(x)",
    }
    assert status["step"] >= 1
    assert status["loss"] > 0
    assert status["tokens_per_second"] == 1000.0
    assert run["run_id"] in cli("status").stdout
    listed = json.loads(cli("runs", "--json").stdout)["runs"]
    assert [entry["run_id"] for entry in listed] == [run["run_id"]]
    assert run["run_id"] in cli("runs").stdout


def test_an_unchanged_tree_sends_nothing_and_an_older_release_comes_back(cli, standin_tree):
    tree = standin_tree()
    first = json.loads(deploy(cli, tree, "--json").stdout)
    assert (first["changed"], first["sent"]) == (True, True)
    again = json.loads(deploy(cli, tree, "--json").stdout)
    assert (again["changed"], again["sent"], again["release"]) == (False, False, first["release"])
    assert "nothing sent" in deploy(cli, tree).stdout
    second = json.loads(deploy(cli, standin_tree("--load", "0", name="other"), "--json").stdout)
    assert second["previous"] == first["release"]
    assert cli("releases").stdout.count("\n") == 3
    back = cli("rollback")
    assert (back.returncode, first["release"] in back.stdout) == (0, True), back.stderr
    assert json.loads(cli("releases", "--json").stdout)["current"] == first["release"]
    assert (cli.root / "current").readlink().name == first["release"]
    # Somebody copied ROOT and followed its link.
    (cli.root / "current").unlink()
    (cli.root / "current").mkdir()
    refused = cli("rollback", "--to", second["release"])
    assert (refused.returncode, "is a directory" in refused.stderr) == (ExitCode.PREFLIGHT, True)
    assert not list(cli.root.glob(".current-*"))
    (cli.root / "current").rmdir()
    assert cli("rollback", "--to", second["release"]).stdout == f"release {second['release']} is current on local\n"


def test_a_second_start_is_refused_and_names_the_first(cli, standin_tree):
    deploy(cli, standin_tree())
    first = json.loads(cli("start", "--json").stdout)
    second = cli("start", "--json")
    assert second.returncode == ExitCode.ALREADY_RUNNING
    assert first["run_id"] in json.loads(second.stdout)["cause"]
    assert second.stderr.count("error: ") == 1
    # The plan may be shown, but a run that never was has no id.
    assert "configuration: " in second.stderr
    assert " on local, fresh" not in second.stderr
    assert len(list((cli.root / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    ("switches", "code", "words"),
    [
        (("--crash",), ExitCode.CRASHED_AT_START, ("model.safetensors is torn", "Traceback", "mend the model")),
        (("--fail-leader",), ExitCode.CRASHED_AT_START, ("bucket_ids",)),
        (("--silent",), ExitCode.NOT_READY, ("no sign of progress", "the run goes on")),
    ],
)
def test_start_ends_with_the_traceback_or_with_silence(cli, standin_tree, switches, code, words):
    deploy(cli, standin_tree(*switches))
    done = cli("start", "--limit", "1.5")
    assert done.returncode == code, done.stderr
    assert [word for word in words if word not in done.stderr] == []
    assert "dflashctl/" not in done.stderr.replace(str(cli.directory), "")


def test_a_run_that_ends_before_its_first_step_is_its_result(cli, standin_tree):
    deploy(cli, standin_tree("--finish-early"))
    done = cli("start")
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout


def test_a_failed_selfcheck_leaves_current_alone(cli, standin_tree):
    good = json.loads(deploy(cli, standin_tree(), "--json").stdout)["release"]
    bad = standin_tree(name="bad", selfcheck='{"error": "undefined name", "cause": "bucket_ids in train.py"}')
    arguments = ("deploy", "--source", str(bad))
    failed = cli(*arguments)
    assert failed.returncode == ExitCode.PREFLIGHT
    assert "bucket_ids" in failed.stderr
    assert (cli.root / "current").readlink().name == good
    assert cli(*arguments, "--no-selfcheck").returncode == 0
    assert (cli.root / "current").readlink().name != good


def test_a_failed_preflight_is_told_in_three_lines_and_leaves_no_run(cli, standin_tree):
    said = json.dumps({"error": "no model at /m", "cause": "no such directory", "hint": "run `make demo`", "code": 7})
    deploy(cli, standin_tree(preflight=said))
    done = cli("start")
    assert done.returncode == ExitCode.PREFLIGHT
    lines = done.stderr.splitlines()[-3:]
    assert lines == ["error: no model at /m", "  cause: no such directory", "  hint: run `make demo`"]
    assert list((cli.root / "runs").iterdir()) == []


def test_an_alarm_in_a_followed_log_is_exit_code_ten(cli, standin_tree):
    deploy(cli, standin_tree("--alarm", "--steps", "4"))
    assert cli("start").returncode == 0
    done = cli("logs", "--follow")
    assert done.returncode == ExitCode.ALARM
    assert "loss_not_positive" in done.stdout
    assert "loss_not_positive" in cli("status").stdout.splitlines()[0]


def test_logs_in_their_forms(cli, standin_tree):
    deploy(cli, standin_tree("--steps", "20", "--pause", "0.001"))
    assert cli("start").returncode == 0
    assert cli("logs", "-f", "--tail", "0").returncode == 0
    whole = cli("logs").stdout
    assert cli("logs", "--raw").stdout == whole
    assert cli("logs", "--tail", "3").stdout.splitlines() == whole.splitlines()[-3:]
    objects = [json.loads(line) for line in cli("logs", "--json").stdout.splitlines()]
    assert [entry["step"] for entry in objects if entry["kind"] == "step"] == list(range(1, 21))
    events = [json.loads(line) for line in cli("logs", "--file", "events", "--json").stdout.splitlines()]
    assert [entry["kind"] for entry in events] == [entry["kind"] for entry in objects]
    assert "leader" in cli("logs", "--file", "supervisor").stdout
    assert cli("logs", "--run", "20200101-000000-000000").returncode == ExitCode.NO_RUN


def test_a_reader_who_leaves_early_is_no_error(cli, standin_tree):
    deploy(cli, standin_tree("--steps", "5000", "--pause", "0"))
    cli("start")
    cli("logs", "-f", "--tail", "0")
    line = " ".join(cli.command("logs")) + " | head -1; echo ${PIPESTATUS[0]}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=cli.directory,
        env=cli.environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout.splitlines()[1:] == ["0"]
    assert done.stderr == ""


@pytest.mark.parametrize("verb", ["start", "logs"])
def test_ctrl_c_detaches_and_the_run_goes_on(cli, standin_tree, verb):
    deploy(cli, standin_tree("--load", "0" if verb == "logs" else "3"))
    arguments = ["start"] if verb == "start" else ["logs", "--follow"]
    if verb == "logs":
        cli("start")
    process = subprocess.Popen(
        cli.command(*arguments),
        cwd=cli.directory,
        env=cli.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    stream = process.stderr if verb == "start" else process.stdout
    while b"run_started" not in (line := stream.readline()) and b"drafter: loading" not in line:
        assert line, process.communicate()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == ExitCode.INTERRUPTED
    assert b"detached" in errors
    assert b"Traceback" not in errors
    assert json.loads(cli("status", "--json").stdout)["state"] in ("starting", "running")


def test_the_configuration_of_the_last_start_is_used_again(cli, standin_tree):
    deploy(cli, standin_tree("--finish-early"))
    (cli.directory / "mine.toml").write_text('device = "cpu"\nlr = 0.125\n')
    assert cli("start", "--config", "mine.toml").returncode == 0
    time.sleep(0.3)
    again = cli("start")
    assert "mine.toml (the last `start --config`" in again.stderr
    spec = json.loads(cli.run_layout().spec.read_text())
    assert spec["config"]["lr"] == 0.125
    assert spec["source"]["directory"]
    assert spec["by"]
    assert spec["devices"] == ["cpu"]


def test_a_lost_release_is_asked_through_the_travelling_agent(cli, standin_tree):
    deploy(cli, standin_tree())
    (cli.root / "releases").rename(cli.root / "gone")
    assert cli("status").returncode == 0
    started = cli("start")
    assert (started.returncode, "dflashctl deploy" in started.stderr) == (ExitCode.PREFLIGHT, True)


def test_names_are_only_text_whatever_they_hold(cli, standin_tree):
    deploy(cli, standin_tree("--finish-early"))
    name, note = "-x '\"`touch pwned`$(touch pwned)\\;&|é", "\N{SNOWMAN}\N{PILE OF POO} --json"
    done = cli("start", f"--name={name}", f"--note={note}")
    assert done.returncode == 0, done.stderr
    spec = json.loads(cli.run_layout().spec.read_text())
    assert (spec["name"], spec["note"]) == (name, note)
    assert list(cli.directory.iterdir()) == []
    assert cli("status").returncode == 0
    assert cli.process("runs", PYTHONIOENCODING="ascii").returncode == 0


def test_of_four_starts_at_once_one_runs(cli, standin_tree):
    deploy(cli, standin_tree())
    starts = [
        subprocess.Popen(
            cli.command("start"),
            cwd=cli.directory,
            env=cli.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(4)
    ]
    assert sorted(start.wait(60) for start in starts) == [0, 4, 4, 4]
    assert len(json.loads(cli("runs", "--json").stdout)["runs"]) == 1


def test_with_the_supervisor_killed_the_run_is_orphaned_and_stop_still_works(cli, standin_tree):
    deploy(cli, standin_tree())
    assert cli("start").returncode == 0
    supervisor = read_pidfile(cli.run_layout().supervisor_pid)
    assert supervisor.send(signal.SIGKILL)
    while supervisor.is_alive():
        time.sleep(0.02)
    assert json.loads(cli("status", "--json").stdout)["state"] == "orphaned"
    stopped = cli("stop")
    assert (stopped.returncode, "stopped" in stopped.stdout) == (0, True), stopped.stderr


def test_stop_now_writes_no_checkpoint(cli, standin_tree):
    deploy(cli, standin_tree("--ignore-stop"))
    cli("start")
    stopped = json.loads(cli("stop", "--now", "--json").stdout)
    assert stopped["status"]["state"] == "stopped"
    assert stopped["status"]["last_checkpoint"] == ""
    assert re.fullmatch(r"run \S+ stopped at step \d+, no checkpoint", stopped["message"])


def test_stop_where_nothing_ever_ran(cli, standin_tree):
    deploy(cli, standin_tree())
    assert cli("stop").returncode == ExitCode.NO_RUN


def test_rollback_with_one_release_and_with_none(cli, standin_tree):
    none = cli("rollback", "--root", str(cli.root))
    assert (none.returncode, "error: nothing is deployed there" in none.stderr) == (ExitCode.PREFLIGHT, True)
    release = json.loads(deploy(cli, standin_tree(), "--json").stdout)["release"]
    one = cli("rollback")
    assert one.returncode == ExitCode.PREFLIGHT
    assert f"release {release} is the only one that was deployed there" in one.stderr


def test_ctrl_c_in_preflight_says_that_nothing_was_launched(cli, standin_tree):
    tree = standin_tree()
    main = tree / "trainer" / "__main__.py"
    begun = cli.directory / "begun"
    slow = f'if sys.argv[1] == "preflight":\n    import time\n\n    open("{begun}", "w").close()\n    time.sleep(8)\n'
    main.write_text(main.read_text().replace("verb = sys.argv[1]\n", f"{slow}verb = sys.argv[1]\n"))
    deploy(cli, tree)
    process = subprocess.Popen(
        cli.command("start"), cwd=cli.directory, env=cli.environment(), stderr=subprocess.PIPE, text=True
    )
    while not begun.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, "nothing was launched" in errors) == (ExitCode.INTERRUPTED, True)
    assert json.loads(cli("status", "--json").stdout)["state"] == "none"
