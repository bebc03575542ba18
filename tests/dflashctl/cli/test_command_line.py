"""The command line itself: help pages, what is refused, what is imported, what a bug looks like."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dflashctl import cli as command_line
from dflashctl.cli.help import VERBS
from remote.protocol.errors import ExitCode
from trainer.config import config_flags

HEAVY = {
    "rich",
    "fabric",
    "paramiko",
    "torch",
    "transformers",
    "numpy",
    "asyncio",
    "pydantic",
    "invoke",
    "platformdirs",
}


@pytest.mark.parametrize("verb", ["", *[verb.name for verb in VERBS]])
def test_help_imports_nothing_heavy(cli, verb):
    program = (
        "import resource, sys; from dflashctl.cli import run; code = run([*sys.argv[1:], '--help']);"
        "print(sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *verb.split()],
        cwd=cli.directory, env=cli.environment(), capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    modules, seconds = done.stderr.splitlines()
    assert set(json.loads(modules.replace("'", '"'))) & HEAVY == set()
    print(f"CPU of `dflashctl {verb} --help`: {float(seconds):.2f} s")
    assert "Usage:" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


def test_a_project_with_a_trainer_of_its_own_is_no_trap_for_python_m(cli):
    (cli.directory / "trainer").mkdir()
    (cli.directory / "trainer" / "__init__.py").write_text("raise SystemExit('the wrong trainer')\n")
    done = cli.process("config", "show")
    assert done.returncode == 0, done.stderr
    assert "target_model" in done.stdout


def test_the_main_page_names_every_verb_and_the_four_commands(capsys):
    assert command_line.run(["--help"]) == 0
    page = capsys.readouterr().out
    assert [verb.name for verb in VERBS if f"  {verb.name} " not in page] == []
    assert "dflashctl deploy --host 10.1.2.6 --ct 200" in page
    assert command_line.run([]) == ExitCode.USAGE
    assert command_line.run(["--version"]) == 0


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_the_first_word_of_config_show_has_its_page(capsys, word):
    assert command_line.run(["config", word]) == 0
    assert "Usage: dflashctl config show" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["start", "config show"])
def test_every_training_key_is_a_flag(capsys, verb):
    assert command_line.run([*verb.split(), "--help"]) == 0
    page = capsys.readouterr().out
    missing = [flag.name for flag in config_flags() if f"{flag.name} " not in page]
    # A run to go on from is a matter of `start` alone.
    assert missing == ([] if verb == "start" else ["--resume"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stattus"], ["no such verb: stattus", "dflashctl status"]),
        (["stat"], ["no such verb: stat", "did you mean `dflashctl status`?"]),
        (["strat"], ["did you mean `dflashctl start`?"]),
        (["conf", "--help"], ["did you mean `dflashctl config show`?"]),
        (["config"], ["dflashctl config show"]),
        (["--jsn"], ["no such option: --jsn"]),
        (["status", "--jsn"], ["no such option: --jsn", "did you mean --json?"]),
        (["start", "--profile-intervall", "3"], ["did you mean --profile-interval?"]),
        (["logs", "--tail", "many"], ["--tail", "dflashctl logs --help"]),
        (["logs", "--tail", "-1"], ["--tail"]),
        (["logs", "--file", "x"], ["no such log: x", "train|events|supervisor"]),
        (["status", "extra"], ["extra"]),
        (["status", "--host"], ["--host"]),
        (["status", "--host", "local", "--ct", "7"], ["ct = '7' is not possible"]),
        (["status", "--root=-x"], ["root = '-x' is not possible", "expected a directory over there"]),
        (["status", "--root", "/ö"], ["expected a directory over there"]),
        (["status", "--python", "/ö"], ["expected the path of a Python interpreter"]),
        (["stop", "--grace", "0"], ["grace = '0' is not possible", "stop --now"]),
        (["start", "--name", "a\nb"], ["--name 'a\\nb' is not possible", "control characters"]),
        (["start", "--name", "a\x1b[2Jb"], ["--name 'a\\x1b[2Jb' is not possible"]),
        (["start", "--note", "a\tb"], ["--note 'a\\tb' is not possible"]),
        (["start", "--name", "x" * 201], ["--name is too long", "201", "200"]),
        (["start", "--note", "x" * 2001], ["--note is too long", "2,001", "2,000"]),
        (["start", "--limit", "0"], ["limit = '0' is not possible"]),
        (["start", "--set", "epocs=1"], ["unknown key 'epocs'", "did you mean 'epochs'?"]),
        (["start", "--config", "/none.toml"], ["no configuration /none.toml"]),
        (["deploy", "--source", "/etc"], ["/etc is no source tree"]),
        (["restart", "--resume", "@17"], ["--resume '@17' is not possible"]),
        (["restart", "--epochs", "many"], ["whole number"]),
        (["restart", "--grace", "0"], ["grace = '0' is not possible"]),
        (["restart", "--run", ""], ["--run is empty"]),
    ],
)
def test_what_this_side_can_judge_is_exit_code_two_in_three_lines(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DFLASHCTL_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert command_line.run(arguments) == ExitCode.USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [word for word in words if word not in shown.err] == []
    lines = shown.err.splitlines()
    assert [line.split(":")[0] for line in lines[-3:]] == ["error", "  cause", "  hint"]
    assert list(tmp_path.iterdir()) == []


def test_a_bug_has_no_traceback_without_debug(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DFLASHCTL_HOME", str(tmp_path))
    monkeypatch.setattr("dflashctl.session.resolve", lambda *arguments: 1 / 0)
    assert command_line.run(["status"]) == ExitCode.FAILED
    shown = capsys.readouterr().err
    assert "this is a bug in dflashctl: ZeroDivisionError" in shown
    assert "Traceback" not in shown
    assert command_line.run(["status", "--debug"]) == ExitCode.FAILED
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_status_before_anything_needs_one_call_and_leaves_nothing(cli):
    done = cli("status", "--json", "-v", "--root", str(cli.root), "--python", sys.executable)
    assert (done.returncode, json.loads(done.stdout)["state"]) == (0, "none")
    assert done.stderr.count("> local:") == 1
    assert not cli.root.exists()
    assert not cli.home.exists()


def test_config_show_says_where_each_value_came_from(cli, make_tree):
    tree = make_tree()
    (cli.directory / "dflashctl.toml").write_text(f'source = "{tree}"\ngrace = 33\n')
    done = cli("config", "show", "--origin", "--set", "lr=0.5", DFLASHCTL_LIMIT="77")
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert (rows["limit"].split()[1:], rows["lr"].split()[1:]) == (["77", "DFLASHCTL_LIMIT"], ["0.5", "--set", "lr"])
    assert rows["grace"].endswith("dflashctl.toml")
    assert rows["device"].endswith("demo.toml")
    assert rows["epochs"].endswith("default")
    as_json = json.loads(cli("config", "show", "--json").stdout)
    assert as_json["training"]["max_steps"]["value"] == 5
    assert as_json["settings"]["host"] == {"value": "local", "origin": "default"}
    assert "max_steps=5*" in cli("config", "show").stdout


def test_a_python_that_is_none_is_exit_code_eight(cli):
    done = cli("status", "--json", "--python", "/nonexistent/python3")
    assert done.returncode == ExitCode.NO_ANSWER
    assert json.loads(done.stdout)["code"] == 8
    broken = cli("status", "--python", "/bin/false")
    assert (broken.returncode, "no answer from local" in broken.stderr) == (ExitCode.NO_ANSWER, True)


def test_a_bare_resume_means_the_last_run(cli, make_tree):
    done = cli("start", "--source", "x", "--resume")
    assert "no such option: --source" in done.stderr
    (cli.directory / "dflashctl.toml").write_text(f'source = "{make_tree()}"\nroot = "{cli.root}"\n')
    for arguments in (["--resume", "--name", "n"], ["--name", "n", "--resume"]):
        done = cli("start", *arguments)
        assert done.returncode == ExitCode.NO_RUN
        assert f"no run in {cli.root}/runs has a checkpoint" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["start", "--resume", ""],
        ["start", "--resume="],
        ["start", "--config", ""],
        ["start", "--root", ""],
        ["status", "--host", ""],
        ["status", "--host", "h", "--ct", ""],
        ["stop", "--run", ""],
        ["stop", "--grace", ""],
        ["rollback", "--to="],
        ["deploy", "--source", ""],
        ["start", "--resume", "@17"],
        ["start", "--resume", "last@x"],
    ],
)
def test_a_value_that_an_unset_variable_left_empty_is_a_usage_error(cli, make_tree, arguments):
    (cli.directory / "dflashctl.toml").write_text(f'source = "{make_tree()}"\n')
    done = cli(*arguments)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert next(word for word in arguments if word in done.stderr or word.rstrip("=") in done.stderr)
    assert not cli.home.exists()


def test_a_key_of_the_training_configuration_may_be_emptied(cli, make_tree):
    (cli.directory / "dflashctl.toml").write_text(f'source = "{make_tree()}"\n')
    done = cli("config", "show", "--json", "--data-dir", "")
    assert json.loads(done.stdout)["training"]["data_dir"] == {"value": "", "origin": "--data-dir"}
