"""From the command line to config.json over there: which file, which flag, and what is remembered."""

from __future__ import annotations

import json
import sys
import time

import pytest

from remote.protocol.errors import ExitCode


@pytest.fixture
def start(cli, standin_tree):
    """Deploy a stand-in that ends at once; return a function that starts it and returns the run's configuration."""
    tree = standin_tree("--finish-early")
    (tree / "templates" / "demo.toml").write_text('device = "cpu"\nlr = 0.5\ndata_dir = "templates/replies"\n')
    deployed = cli(
        "deploy", "--host", "local", "--root", str(cli.root), "--source", str(tree), "--python", sys.executable
    )
    assert deployed.returncode == 0, deployed.stderr

    def run(*arguments, **environment):
        seen = set((cli.root / "runs").iterdir())
        done = cli("start", *arguments, **environment)
        assert done.returncode == 0, done.stderr
        (run,) = set((cli.root / "runs").iterdir()) - seen
        deadline = time.monotonic() + 10
        while not (run / "exit.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return json.loads((run / "config.json").read_text())

    run.tree = tree
    return run


def toml(path, lr):
    path.write_text(f'device = "cpu"\nlr = {lr}\n')
    return str(path)


def test_flag_then_variable_then_project_then_the_last_one_then_the_preset(cli, start):
    assert start()["lr"] == 0.5
    assert start("--config", toml(cli.directory / "flag.toml", 0.4))["lr"] == 0.4
    assert start()["lr"] == 0.4
    toml(cli.directory / "project.toml", 0.3)
    (cli.directory / "dflashctl.toml").write_text('config = "project.toml"\n')
    assert start()["lr"] == 0.3
    variable = toml(cli.directory / "variable.toml", 0.2)
    assert start(DFLASHCTL_CONFIG=variable)["lr"] == 0.2
    assert start("--config", "flag.toml", DFLASHCTL_CONFIG=variable)["lr"] == 0.4


def test_the_usual_flags_of_the_storys_script_arrive(start):
    config = start(
        "--target-model", "/m", "--data-dir", "/d", "--output-dir", "/o", "--target-gpus", "0,1,2,3,4",
        "--drafter-gpus", "5,6,7", "--epochs", "3", "--lr", "1e-4", "--warmup-ratio", "0.1", "--weight-decay", "0.05",
        "--max-steps", "9", "--seed", "7", "--profile-interval", "60", "--split-fc", "on", "--set", "gamma=4",
    )  # fmt: skip
    expected = {
        "target_model": "/m", "data_dir": "/d", "output_dir": "/o", "target_gpus": [0, 1, 2, 3, 4],
        "drafter_gpus": [5, 6, 7], "epochs": 3, "lr": 1e-4, "warmup_ratio": 0.1, "weight_decay": 0.05, "max_steps": 9,
        "seed": 7, "profile_interval": 60.0, "split_fc": "on", "gamma": 4.0, "device": "cpu",
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected


def test_relative_paths_mean_the_template_tree_or_the_shell(cli, start):
    config = start("--target-model", "here/model")
    assert config["data_dir"] == str(start.tree / "templates" / "replies")
    assert config["target_model"] == str(cli.directory / "here" / "model")


def test_the_plan_and_the_flags_origin_are_shown_before_anything_is_launched(cli, start):
    done = cli("start", "--lr", "0.25", "--name", "x")
    lines = done.stderr.splitlines()
    plan = next(index for index, line in enumerate(lines) if line.startswith("configuration: "))
    begun = next(index for index, line in enumerate(lines) if " s  run " in line)
    assert plan < begun
    assert any("lr=0.25*" in line for line in lines[plan:begun])
    assert begun - plan < 26


@pytest.mark.parametrize(("flags", "steps"), [(("--trace",), 3), (("--trace", "--trace-steps", "5"), 5)])
def test_a_trace_is_asked_for_with_a_flag(cli, start, flags, steps):
    assert start(*flags)["trace_steps"] == steps
    assert start()["trace_steps"] == 0


def test_a_configuration_that_cannot_be_is_refused_before_a_run_exists(cli, start):
    for arguments, words in (
        (("--target-gpus", "0,1", "--drafter-gpus", "1,2"), "disjoint"),
        (("--epochs", "0"), "at least 1"),
        (("--split-fc", "maybe"), "one of off, on"),
        (("--micro-batches-per-step", "1", "--drafter-gpus", "1,2"), "2 drafters"),
    ):
        done = cli("start", "--json", *arguments)
        assert (done.returncode, json.loads(done.stdout)["code"]) == (ExitCode.USAGE, 2)
        assert words in done.stderr
    assert list((cli.root / "runs").iterdir()) == []


def test_the_remembered_configuration_that_vanished_is_said(cli, start):
    file = cli.directory / "mine.toml"
    start("--config", toml(file, 0.1))
    file.unlink()
    done = cli("start")
    assert (done.returncode, "mine.toml" in done.stderr) == (ExitCode.USAGE, True)
    assert start("--config", str(start.tree / "templates" / "demo.toml"))["lr"] == 0.5


def test_a_resumed_start_names_the_checkpoint_in_spec_and_status(cli, standin_tree):
    tree = standin_tree("--steps", "200", "--pause", "0.02")
    where = ("--host", "local", "--root", str(cli.root), "--python", sys.executable)
    assert cli("deploy", *where, "--source", str(tree)).returncode == 0
    first = json.loads(cli("start", "--json").stdout)
    assert cli("stop").returncode == 0
    checkpoint = json.loads(cli("status", "--json").stdout)["last_checkpoint"]
    assert checkpoint
    resumed = cli("start", "--resume")
    step = int(checkpoint.rpartition("-")[2])
    said = resumed.stderr.splitlines()
    assert said[0] == f"resuming run {first['run_id']} at step {step}, checkpoint {checkpoint}"
    assert said[1].startswith(f"configuration: run {first['run_id']} (")
    assert any(line.endswith(f"resumed from {first['run_id']}@{step}") for line in said)
    status = json.loads(cli("status", "--json").stdout)
    assert status["run_id"] != first["run_id"]
    assert status["resumed_from"] == checkpoint
    assert cli("stop", "--now").returncode == 0
    unknown = cli("start", "--resume", f"{first['run_id']}@9999")
    assert (unknown.returncode, "no checkpoint of step 9999" in unknown.stderr) == (ExitCode.PREFLIGHT, True)
    fresh = cli("start")
    assert ", fresh" in fresh.stderr
    assert json.loads(cli("status", "--json").stdout)["resumed_from"] == ""


def test_a_resumed_start_takes_its_runs_own_flags_and_typed_ones_on_top(cli, standin_tree):
    where = ("--host", "local", "--root", str(cli.root), "--python", sys.executable)
    assert cli("deploy", *where, "--source", str(standin_tree("--steps", "200", "--pause", "0.02"))).returncode == 0
    mine = toml(cli.directory / "mine.toml", 0.4)
    assert cli("start", "--config", mine, "--max-steps", "40", "--set", "seed=5").returncode == 0
    stopped = cli("stop").stdout.splitlines()[-1]
    assert f", checkpoint {cli.root}" in stopped

    def resumed(*arguments, **environment):
        done = cli("start", "--resume", *arguments, **environment)
        assert done.returncode == 0, done.stderr
        assert cli("stop", "--now").returncode == 0
        config = json.loads(cli.run_layout().config.read_text())
        return config["lr"], config["max_steps"], config["seed"]

    first = cli.run_layout().run_id
    # Neither the remembered file nor one that a variable names: they are not what the run was started with.
    other = toml(cli.directory / "other.toml", 0.1)
    assert resumed(DFLASHCTL_CONFIG=other) == (0.4, 40, 5)
    assert resumed(first, "--seed", "6", "--set", "max_steps=41") == (0.4, 41, 6)
    assert resumed(first, "--config", other)[:2] == (0.1, 0)
    refused = cli("start", "--resume", "--seed", "many", "-v")
    assert (refused.returncode, "> local" in refused.stderr) == (ExitCode.USAGE, False)


@pytest.mark.parametrize(
    ("switches", "preflight", "arguments", "code", "launched"),
    [
        ((), "{}", ("--epochs", "0"), ExitCode.USAGE, False),
        ((), '{"error": "no model", "code": 7}', (), ExitCode.PREFLIGHT, False),
        (("--crash",), "{}", (), ExitCode.CRASHED_AT_START, True),
        (("--silent",), "{}", ("--limit", "1"), ExitCode.NOT_READY, True),
    ],
)
def test_only_what_was_launched_is_remembered_and_named(
    cli, standin_tree, switches, preflight, arguments, code, launched
):
    where = ("--host", "local", "--root", str(cli.root), "--python", sys.executable)
    tree = standin_tree(*switches, preflight=preflight)
    assert cli("deploy", *where, "--source", str(tree)).returncode == 0
    done = cli("start", "--config", toml(cli.directory / "mine.toml", 0.4), *arguments)
    assert done.returncode == code, done.stderr
    assert (" on local, fresh" in done.stderr) is launched
    ((entry),) = json.loads((cli.home / "destinations.json").read_text())["known"]
    assert entry["config"].endswith("mine.toml") is launched


def test_config_show_previews_what_start_would_do_with_the_same_flags(cli, start):
    flags = ("--lr", "0.25", "--set", "seed=5", "--target-gpus", "0,1", "--drafter-gpus", "2")
    shown = json.loads(cli("config", "show", "--json", *flags).stdout)["training"]
    assert {key: entry["value"] for key, entry in shown.items()} | {"resume": ""} == start(*flags) | {"resume": ""}
    assert shown["lr"]["origin"] == "--lr"
    assert "lr=0.25*" in cli("config", "show", *flags).stdout
    assert cli("config", "show", "--lr", "fast").returncode == ExitCode.USAGE


def test_config_show_names_the_place_that_the_far_end_chooses(cli, make_tree):
    (cli.directory / "dflashctl.toml").write_text(f'source = "{make_tree()}"\n')
    rows = {line.split()[0]: line for line in cli("config", "show").stdout.splitlines() if line}
    assert rows["root"].endswith("(the far end's default)")
    assert json.loads(cli("config", "show", "--json").stdout)["settings"]["root"]["value"] == ""


def test_the_user_file_lies_in_home_and_the_project_file_beats_it(cli, make_tree):
    cli.home.mkdir()
    (cli.home / "config.toml").write_text(f'source = "{make_tree()}"\nlimit = 11\ngrace = 22\n')
    (cli.directory / "dflashctl.toml").write_text("grace = 33\n")
    settings = json.loads(cli("config", "show", "--json").stdout)["settings"]
    assert settings["limit"] == {"value": "11", "origin": str(cli.home / "config.toml")}
    assert settings["grace"] == {"value": "33", "origin": str(cli.directory / "dflashctl.toml")}


@pytest.mark.parametrize("place", ["home", "directory"])
def test_a_typing_error_in_a_settings_file_stops_every_verb(cli, place):
    cli.home.mkdir()
    file = cli.home / "config.toml" if place == "home" else cli.directory / "dflashctl.toml"
    file.write_text('hots = "h"\n')
    for verb in ("status", "deploy", "start", "stop", "logs", "runs", "releases", "rollback"):
        done = cli(verb)
        assert done.returncode == ExitCode.USAGE
        assert "unknown key 'hots'" in done.stderr
        assert f"cause: {file} sets it" in done.stderr
        assert "did you mean 'host'?" in done.stderr


def test_a_broken_memory_of_destinations_is_an_error_with_a_way_out(cli):
    cli.home.mkdir()
    (cli.home / "destinations.json").write_text('{"known": [')
    done = cli("status")
    assert (done.returncode, "deploy again" in done.stderr) == (ExitCode.FAILED, True)


def test_the_destination_is_remembered_with_what_was_deployed(cli, start):
    known = json.loads((cli.home / "destinations.json").read_text())
    (entry,) = known["known"]
    assert known["current"] == "local"
    assert (entry["root"], entry["python"], entry["source"]) == (str(cli.root), sys.executable, str(start.tree))
    assert (cli.root / "releases" / entry["release"] / "MANIFEST").is_file()
