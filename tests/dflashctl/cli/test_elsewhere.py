"""`start` at a destination that is not this machine: what it trains, and all that is missing over there, at once.

The way there is this machine under another name; agent, release and trainer are the real ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dflashctl.transport.local import Local
from remote.protocol.errors import ExitCode

REPOSITORY = Path(__file__).resolve().parents[3]
WHERE = ("--host", "10.1.2.6", "--ct", "200")


@pytest.fixture
def elsewhere(cli, monkeypatch):
    """Every destination is this machine; returns a function that deploys a tree to container 200 on 10.1.2.6."""
    monkeypatch.setattr("dflashctl.session.make_transport", lambda *place: Local())

    def deploy(tree, *extra):
        where = (*WHERE, "--root", str(cli.root), "--python", sys.executable)
        done = cli("deploy", *where, "--source", str(tree), *extra)
        assert done.returncode == 0, done.stderr

    return deploy


def test_without_a_configuration_it_is_the_27b_preset_and_all_that_is_missing_is_told_at_once(cli, elsewhere):
    elsewhere(REPOSITORY, "--no-selfcheck")
    done = cli("start", "--json")
    lines = done.stderr.splitlines()
    preset = REPOSITORY / "templates" / "qwen3.6-27b-8gpu.toml"
    assert lines[0] == f"configuration: {preset} (preset); * differs from the default"
    shown = [index for index, line in enumerate(lines) if line.startswith("  ")]
    assert shown[-1] < 40
    words = " ".join(lines)
    for setting in (
        "target_model=/dev/shm/Qwen3.6-27B*", "data_dir=/workspace/tokenized_completions*",
        "output_dir=/workspace/checkpoints*", "target_gpus=0,1,2,3,4*", "drafter_gpus=5,6,7*",
    ):  # fmt: skip
        assert setting in words
    error = json.loads(done.stdout)
    assert (done.returncode, error["code"]) == (ExitCode.PREFLIGHT, 7)
    told = [problem["error"] for problem in error["problems"]]
    assert len(told) == 3
    assert "GPU" in told[0]
    assert "/dev/shm/Qwen3.6-27B" in told[1]
    assert "/workspace/tokenized_completions" in told[2]
    assert all(problem["hint"] for problem in error["problems"])
    # For people: each with its own three lines below the sum.
    assert "error: 3 things are in the way of this run" in done.stderr
    assert [line.strip()[:9] for line in lines if line.strip()[1:8] == ". error"] == [
        "1. error:",
        "2. error:",
        "3. error:",
    ]
    assert list((cli.root / "runs").iterdir()) == []


def test_the_layers_of_configuration_are_those_of_the_local_machine(cli, elsewhere, standin_tree):
    tree = standin_tree("--finish-early")
    (tree / "templates" / "qwen3.6-27b-8gpu.toml").write_text('device = "cpu"\nlr = 0.5\n')
    elsewhere(tree)

    def lr(*arguments, **environment):
        done = cli("start", *arguments, "--json", **environment)
        assert done.returncode == 0, done.stderr
        run = json.loads(done.stdout)
        assert (run["host"], run["ct"]) == ("10.1.2.6", "200")
        return json.loads(Path(run["run_dir"], "config.json").read_text())["lr"]

    def toml(name, value):
        (cli.directory / name).write_text(f'device = "cpu"\nlr = {value}\n')
        return str(cli.directory / name)

    assert lr() == 0.5
    assert lr("--config", toml("flag.toml", 0.4)) == 0.4
    assert lr() == 0.4
    toml("project.toml", 0.3)
    (cli.directory / "dflashctl.toml").write_text('config = "project.toml"\n')
    assert lr() == 0.3
    assert lr(DFLASHCTL_CONFIG=toml("variable.toml", 0.2)) == 0.2
    assert lr("--config", "flag.toml", DFLASHCTL_CONFIG=toml("variable.toml", 0.2)) == 0.4
    # A configuration is remembered for its destination alone: another one has its preset.
    assert (cli.directory / "dflashctl.toml").write_text("") == 0
    other = cli("config", "show", "--host", "10.1.2.7", "--json")
    assert json.loads(other.stdout)["config_file"]["origin"] == "preset"


def test_restart_and_relative_paths_at_another_machine(cli, elsewhere, standin_tree):
    tree = standin_tree()
    (tree / "templates" / "qwen3.6-27b-8gpu.toml").write_text('device = "cpu"\ndata_dir = "/there/data"\n')
    elsewhere(tree)
    refused = cli("start", "--target-model", "models/m")
    assert (refused.returncode, "absolute path it has over there" in refused.stderr) == (ExitCode.USAGE, True)
    old = json.loads(cli("start", "--target-model", "/there/m", "--json").stdout)["run_id"]
    refused = cli("restart", "--data-dir", "data")
    assert (refused.returncode, json.loads(cli("status", "--json").stdout)["state"]) == (ExitCode.USAGE, "running")
    new = json.loads(cli("restart", "--seed", "3", "--json").stdout)
    assert (new["restarted_from"], new["ct"]) == (old, "200")
    config = json.loads(Path(new["run_dir"], "config.json").read_text())
    assert (config["target_model"], config["data_dir"], config["seed"]) == ("/there/m", "/there/data", 3)
