"""`python -m trainer train | preflight` up to the launch: where keys come from, how failures look, what the leader leaves."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remote.protocol.errors import DflashError, ExitCode
from remote.protocol.identity import ProcessIdentity
from remote.protocol.layout import RunLayout, is_run_id
from remote.protocol.locks import is_held
from trainer import __main__ as entry
from trainer import preflight
from trainer.config import TrainConfig
from trainer.pipeline import command, leader, names
from trainer.pipeline.layout import Layout
from trainer.pipeline.plan import PLAN_VARIABLE, RunPlan

ROOT = Path(__file__).resolve().parents[2]


def parse(*arguments: str) -> TrainConfig:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.read_config(parser.parse_args(arguments))


@pytest.fixture(autouse=True)
def no_inherited_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DFLASH_PROFILE_INTERVAL", "DFLASH_SPLIT_FC_LAYERS", "DFLASH_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)


# ---- where keys come from


def test_a_flag_beats_set_beats_environment_beats_json_beats_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml, from_json = tmp_path / "c.toml", tmp_path / "c.json"
    toml.write_text("profile_interval = 1\nlr = 1e-1\nseed = 1\nepochs = 1\n")
    from_json.write_text('{"profile_interval": 2, "lr": 0.02, "seed": 2}')
    sources = ["--config", str(toml), "--config-json", str(from_json)]
    assert parse(*sources[:2]).profile_interval == 1
    assert parse(*sources).profile_interval == 2
    monkeypatch.setenv("DFLASH_PROFILE_INTERVAL", "3")
    assert parse(*sources).profile_interval == 3
    sources += ["--set", "profile-interval=4"]
    assert parse(*sources).profile_interval == 4
    sources += ["--profile-interval", "5"]
    config = parse(*sources)
    assert (config.profile_interval, config.lr, config.seed, config.epochs) == (5, 0.02, 2, 1)


@pytest.mark.parametrize(("text", "value"), [("0", "off"), ("1", "on"), ("on", "on"), ("off", "off"), ("", "off")])
def test_the_storys_variables_are_read(monkeypatch: pytest.MonkeyPatch, text: str, value: str) -> None:
    monkeypatch.setenv("DFLASH_SPLIT_FC_LAYERS", text)
    assert parse().split_fc == value
    assert parse("--split-fc", "on").split_fc == "on"


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_PROFILE_INTERVAL", "often")
    with pytest.raises(DflashError) as caught:
        parse()
    assert "DFLASH_PROFILE_INTERVAL" in caught.value.cause


def test_the_storys_command_line_is_understood() -> None:
    config = parse(
        "--target-model", "/m", "--data-dir", "/d", "--output-dir", "/o", "--target-gpus", "0,1,2,3,4",
        "--drafter-gpus", "5,6,7", "--epochs", "6", "--lr", "6e-4", "--warmup-ratio", "0.04", "--weight-decay", "0.01",
        "--grad-accum", "4",
    )  # fmt: skip
    assert config.target_gpus == (0, 1, 2, 3, 4)
    assert config.micro_batches_per_step == 12  # accumulation 4 on 3 drafters


@pytest.mark.parametrize(
    ("flags", "steps"),
    [((), 0), (("--trace",), 3), (("--trace-steps", "5"), 5), (("--trace", "--trace-steps", "1"), 1)],
)
def test_a_trace_is_asked_for_with_and_without_a_number(flags: tuple[str, ...], steps: int) -> None:
    assert parse(*flags).trace_steps == steps


def test_accumulation_counts_the_drafters_of_any_source(tmp_path: Path) -> None:
    assert parse("--grad-accum", "2").micro_batches_per_step == 2
    assert parse("--grad-accum", "2", "--set", "drafter_gpus=1,2").micro_batches_per_step == 4


@pytest.mark.parametrize("content", ["[1]", "{", "", None])
def test_a_json_file_that_is_none_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "c.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DflashError) as caught:
        parse("--config-json", str(path))
    assert caught.value.code == ExitCode.USAGE
    assert str(path) in caught.value.error


# ---- exit codes and messages


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["train", "--set", "epocs=3"], 2, "did you mean 'epochs'?"),
        (["train", "--target-gpus", "0,1", "--drafter-gpus", "1"], 2, "[1]"),
        (["train", "--lr", "-1"], 2, "must be at least 0"),
        (["preflight"], 2, "--target-model"),
        (["preflight", "--device", "cpu", "--target-model", "/nowhere", "--data-dir", "/nowhere"], 7, "/nowhere"),
    ],
)
def test_failures_are_said_with_cause_and_hint(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    assert entry.main(arguments) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "\n  hint: " in err
    assert says in err
    assert "Traceback" not in err


def test_a_failure_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["preflight", "--json", "--lr", "-1"]) == 2
    data = json.loads(capsys.readouterr().out)
    assert (data["code"], data["error"]) == (2, "lr = -1.0 is not possible")


def test_a_bug_is_a_traceback_and_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: TrainConfig) -> None:
        raise ZeroDivisionError("bucket_ids")

    monkeypatch.setattr(command, "attend", broken)
    assert entry.main(["train"]) == 1
    assert "ZeroDivisionError: bucket_ids" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["-h"], 0), (["fly"], 2)])
def test_verbs_are_listed(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> None:
    assert entry.main(arguments) == code
    err = capsys.readouterr().err
    assert all(verb in err for verb in ("train", "prepare", "generate", "evaluate", "export", "selfcheck"))


def test_the_preflight_says_what_a_run_would_be(values: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(values))
    assert entry.main(["preflight", "--config-json", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == 20
    assert found["first_step"] == 1
    assert found["topology"] == "1 target / 1 drafter on cpu"
    assert found["target_layer_ids"] == [1, 3]
    assert "held_out" not in found
    # Data that are held out only by name are told before a run believes its best checkpoint.
    path.write_text(json.dumps(values | {"held_out_dir": values["data_dir"]}))
    assert entry.main(["preflight", "--config-json", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["held_out"] == "20 documents, 20 also trained on"
    path.write_text(json.dumps(values))
    assert entry.main(["preflight", "--config-json", str(path)]) == 0
    assert "1 target / 1 drafter on cpu" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]


def test_the_preflight_counts_the_ring_of_a_dead_run_as_space(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(names, "SHARED_MEMORY", tmp_path)
    with subprocess.Popen(["true"]) as process:
        owner = ProcessIdentity.of(process.pid)
    ring = tmp_path / f"dflash-{names.scope()}-{owner.pid}-{owner.start_ticks}-0123abcd"
    ring.write_bytes(b"x" * 100)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(values))
    assert entry.main(["preflight", "--config-json", str(path), "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"removed what a dead run had left: {ring}\n"
    assert json.loads(shown.out)["documents"] == 20
    assert not ring.exists()


def test_the_help_says_what_ctrl_c_does(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        entry.main(["train", "--help"])
    assert "Ctrl-C, or TERM, saves a checkpoint" in capsys.readouterr().out


# ---- the leader


@pytest.fixture(scope="module")
def values(make_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    data = tmp_path_factory.mktemp("data") / "data.jsonl"
    data.write_text("".join(json.dumps({"input_ids": list(range(4, 30)), "prompt_len": 3}) + "\n" for _ in range(20)))
    return {
        "target_model": str(make_target()), "data_dir": str(data), "mask_token_id": 3, "block_size": 4, "drafter_layers": 2,
        "target_layer_ids": [1, 3], "max_length": 64, "token_budget": 128, "bucket_tokens": 16, "num_anchors": 8,
        "row_anchors": 24, "micro_batches_per_step": 3, "device": "cpu", "ring_mib": 8,
    }  # fmt: skip


def test_a_plan_names_what_was_reserved_and_forgets_it(values: dict[str, Any], tmp_path: Path) -> None:
    run = RunLayout(tmp_path / "run")
    run.create()
    plan = leader.prepare(TrainConfig.from_mapping(values), run)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert RunPlan.load(path) == plan
    ring = Path(plan.ring_file)
    assert ring.stat().st_size == plan.slot_bytes * plan.slots_per_pair
    assert Path(plan.sockets).stat().st_mode & 0o777 == 0o700
    assert run.sockets.read_text() == f"{plan.sockets}\n"
    assert len(str(plan.pair_address(99, 99))) < 100  # An AF_UNIX path has 107 bytes.
    plan.forget_names()
    assert not ring.exists()
    assert not Path(plan.sockets).exists()
    plan.forget_names()  # A second time is no error.


def test_a_long_temporary_directory_gives_short_socket_paths(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 60) / ("y" * 60)
    long.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(long))
    run = RunLayout(tmp_path / "run")
    run.create()
    plan = leader.prepare(TrainConfig.from_mapping(values), run)
    plan.forget_names()
    assert len(str(plan.pair_address(99, 99))) < 100


def test_a_launcher_that_cannot_be_executed_leaves_nothing_reserved(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(DflashError, match="cannot execute"):
        leader.lead(TrainConfig.from_mapping(values))
    plan = RunPlan.load(tmp_path / "run" / "plan.json")
    assert not Path(plan.ring_file).exists()
    assert not Path(plan.sockets).exists()
    assert (tmp_path / "run" / "errors" / "rank--1.json").exists()


def test_a_run_directory_is_made_where_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for config, parent in ((TrainConfig(output_dir="out"), tmp_path / "out"), (TrainConfig(), tmp_path / "runs")):
        run = leader.run_layout(config)
        assert is_run_id(run.run_id)
        assert run.path.parent == parent


def test_checkpoints_go_to_a_directory_of_the_run(values: dict[str, Any], tmp_path: Path) -> None:
    run = RunLayout(tmp_path / "20261130-120000-abcdef")
    run.create()
    for changes, place in (({}, run.checkpoints), ({"output_dir": str(tmp_path / "o")}, tmp_path / "o" / run.run_id)):
        plan = leader.prepare(TrainConfig.from_mapping(values | changes), run)
        plan.forget_names()
        assert Path(plan.output_dir) == place


EXECED = """
import json, os, sys
from pathlib import Path
from trainer.config import TrainConfig
from trainer.pipeline import leader
leader.launcher_argv = lambda layout, log_dir, module: [sys.executable, "-c", sys.argv[2], sys.argv[1]]
leader.lead(TrainConfig.from_mapping(json.loads(Path(sys.argv[1]).read_text())))
"""
REPORT = """
import json, os, sys
print(json.dumps({"pid": os.getpid(), "env": dict(os.environ), "fds": os.listdir("/proc/self/fd")}), flush=True)
sys.stdin.read()
"""


def test_the_leader_keeps_its_pid_and_its_lock_over_the_exec(values: dict[str, Any], tmp_path: Path) -> None:
    config = tmp_path / "c.json"
    config.write_text(json.dumps(values | {"threads": 3}))
    run = RunLayout(tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-c", EXECED, str(config), REPORT],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "DFLASH_RUN_DIR": str(run.path)},
    )
    with process:
        assert process.stdout is not None
        seen = json.loads(process.stdout.readline())
        assert seen["pid"] == process.pid
        assert is_held(run.run_lock)
        assert seen["env"][PLAN_VARIABLE] == str(run.path / "plan.json")
        assert seen["env"]["OMP_NUM_THREADS"] == "3"
        plan = RunPlan.load(run.path / "plan.json")
        assert plan.leader_pid == process.pid
        plan.forget_names()
    assert not is_held(run.run_lock)


def test_one_process_per_device_and_no_restart() -> None:
    argv = leader.launcher_argv(Layout("cpu", (0, 1), (2,)), Path("/run/launcher"))
    assert "--log-dir=/run/launcher" in argv
    assert argv[0] == sys.executable
    assert "--nproc-per-node=3" in argv
    assert "--max-restarts=0" in argv
    assert argv[-2:] == ["-m", "trainer.pipeline.rank"]


def test_a_ring_that_cannot_be_reserved_leaves_no_sockets(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Somebody else took the space between the check and the reservation.
    run = RunLayout(tmp_path / "run")
    run.create()

    def full(path: Path, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(leader, "create_ring_file", full)
    with pytest.raises(DflashError, match="no space left for the ring") as caught:
        leader.prepare(TrainConfig.from_mapping(values), run)
    assert caught.value.code == ExitCode.PREFLIGHT
    assert not Path(run.sockets.read_text().strip()).exists()


def test_relative_paths_of_a_file_lead_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "c.toml"
    file.write_text('target_model = "model"\ndata_dir = "/abs/data"\noutput_dir = ""\n')
    monkeypatch.chdir(tmp_path)
    config = parse("--config", str(file))
    assert config.target_model == str(tmp_path / "mine" / "model")
    assert config.data_dir == "/abs/data"
    assert config.output_dir == ""
    # What is typed means what it means in the shell.
    assert parse("--config", str(file), "--target-model", "here").target_model == "here"


def test_relative_paths_of_a_template_lead_from_its_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse("--config", str(ROOT / "templates" / "demo.toml"))
    assert config.target_model == str(ROOT / "build" / "demo" / "target")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], ["error: no such verb: trian", "hint: did you mean train?"]),
        (["train", "--lrr", "1"], ["error: unrecognized arguments: --lrr 1", "hint: did you mean --lr?"]),
        (["export"], ["error: the following arguments are required: --checkpoint, --output", "hint: `python -m"]),
    ],
)
def test_a_wrong_command_line_is_said_in_three_lines(
    arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.main(arguments) == ExitCode.USAGE
    shown = capsys.readouterr().err
    assert all(each in shown for each in said)
    assert "Traceback" not in shown


def test_a_gpu_that_is_not_there_is_said_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "visible_gpus", lambda: 2)
    preflight.check_devices(TrainConfig(target_gpus=(0,), drafter_gpus=(1,)))
    preflight.check_devices(TrainConfig(device="cpu", target_gpus=(7,), drafter_gpus=(8,)))
    with pytest.raises(DflashError, match="there is no GPU 2, 5") as caught:
        preflight.check_devices(TrainConfig(target_gpus=(0, 5), drafter_gpus=(2,)))
    assert caught.value.code is ExitCode.PREFLIGHT
    assert caught.value.cause == "CUDA's driver shows 2 GPUs here"


def test_gpus_are_counted_without_torch() -> None:
    program = "import sys; from trainer.preflight import visible_gpus; print(visible_gpus(), 'torch' in sys.modules)"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False"]


def test_a_train_that_is_refused_by_itself_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert entry.main(["train", "--device", "cpu", "--target-model", "/nowhere", "--data-dir", "/nowhere"]) == 7
    assert list(tmp_path.glob("runs/*")) == []


def test_an_output_dir_that_cannot_be_one_is_refused(values: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "file"
    file.touch()
    config = tmp_path / "c.json"
    config.write_text(json.dumps(values | {"output_dir": str(file)}))
    for verb in ("preflight", "train"):
        assert entry.main([verb, "--config-json", str(config)]) == ExitCode.PREFLIGHT
        shown = capsys.readouterr().err
        assert str(file) in shown
        assert "--output-dir" in shown
        assert "Traceback" not in shown


def test_a_run_directory_that_cannot_be_made_is_refused_under_a_supervisor_too(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DFLASH_RUN_DIR", str(tmp_path / "file" / "run"))
    config = tmp_path / "c.json"
    config.write_text(json.dumps(values))
    assert entry.main(["train", "--config-json", str(config)]) == ExitCode.PREFLIGHT
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_launch_leaves_nothing(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, number: int, code: int
) -> None:
    reserved: list[Path] = []

    def interrupted(path: Path, size: int) -> None:
        path.touch()
        reserved.append(path)
        os.kill(os.getpid(), number)

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(leader, "create_ring_file", interrupted)
    config = tmp_path / "c.json"
    config.write_text(json.dumps(values | {"output_dir": str(tmp_path / "out")}))
    assert entry.main(["train", "--config-json", str(config)]) == code
    assert capsys.readouterr().err == "interrupted before the run began\n"
    (ring,) = reserved
    assert not ring.exists()
    assert list((tmp_path / "out").iterdir()) == []
    assert {each: signal.getsignal(each) for each in before} == before
