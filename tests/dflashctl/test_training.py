"""Which configuration a start uses, key by key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.destinations import Destination
from dflashctl.settings import resolve
from dflashctl.source import Source
from dflashctl.training import choose_file, resolve_training, typed_values
from remote.protocol.codec import dumps, from_plain, loads_object, plain
from remote.protocol.errors import DflashError, ExitCode
from remote.protocol.records import RunSpec
from trainer.config import TrainConfig


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A source tree with both presets and a configuration file beside it; returns a function that resolves."""
    for folder in ("templates", "trainer", "remote/agent"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "templates" / "demo.toml").write_text('device = "cpu"\nlr = 0.5\ntarget_model = "build/target"\n')
    (tmp_path / "templates" / "qwen3.6-27b-8gpu.toml").write_text('target_model = "/dev/shm/model"\nlr = 0.25\n')
    (tmp_path / "run.toml").write_text('lr = 0.125\nseed = 7\ndata_dir = "data"\n')
    directory = tmp_path / "cwd"
    directory.mkdir()
    monkeypatch.chdir(directory)

    def run(host="local", config=None, remembered=None, flags=None, assignments=(), resumed=None):
        settings = resolve({"host": host, "config": config}, {}, None, tmp_path / "none")
        typed = typed_values(flags or {}, assignments)
        return resolve_training(settings, remembered, Source(tmp_path, "test"), typed, resumed)

    run.directory = tmp_path
    return run


def test_the_preset_depends_on_the_destination(world):
    assert world().config.lr == 0.5
    assert world(host="10.1.2.6").config.lr == 0.25
    assert world().base_origin == "preset"


def test_a_file_beats_the_remembered_one_beats_the_preset(world):
    remembered = Destination(config=str(world.directory / "run.toml"))
    assert world(remembered=remembered).config.lr == 0.125
    other = world.directory / "other.toml"
    other.write_text("lr = 1.0\n")
    assert world(config=str(other), remembered=remembered).config.lr == 1.0


def test_flags_beat_set_beats_the_file_and_origins_say_so(world):
    training = world(
        config=str(world.directory / "run.toml"), assignments=["lr=0.2", "seed=8"], flags={"seed": "9", "epochs": None}
    )
    assert (training.config.lr, training.config.seed, training.config.epochs) == (0.2, 9, 6)
    assert training.origins["lr"] == "--set lr"
    assert training.origins["seed"] == "--seed"
    assert "epochs" not in training.origins
    assert training.origins["data_dir"].endswith("run.toml")


def spec_of(**values):
    return RunSpec("20260101-000000-abcdef", (), {}, ("cpu",), config=TrainConfig.from_mapping(values).to_dict())


def test_a_resumed_run_begins_with_its_own_configuration_whatever_the_files_say(world):
    resumed = spec_of(max_steps=40, lr=0.3, seed=5, resume="/old/step-00000003", trace_steps=3)
    remembered = Destination(config=str(world.directory / "gone.toml"))
    training = world(remembered=remembered, resumed=resumed, flags={"seed": "9"}, assignments=["epochs=2"])
    config = training.config
    assert (config.max_steps, config.lr, config.seed, config.epochs, config.resume) == (40, 0.3, 9, 2, "")
    assert config.trace_steps == 0
    assert training.base == "run 20260101-000000-abcdef"
    assert (training.origins["lr"], training.origins["seed"]) == (training.base, "--seed")
    assert world(host="h", resumed=spec_of(data_dir="/there")).config.data_dir == "/there"


def test_a_key_that_this_version_no_longer_has_names_the_run(world):
    resumed = spec_of()
    resumed.config["warp"] = 9
    with pytest.raises(DflashError) as caught:
        world(resumed=resumed)
    assert "run 20260101-000000-abcdef sets it" in caught.value.cause


@given(
    max_steps=st.integers(0, 10**6), lr=st.floats(1e-9, 1.0), gpus=st.lists(st.integers(0, 63), min_size=2, unique=True)
)
def test_any_configuration_comes_back_from_a_run_as_it_was(max_steps, lr, gpus):
    config = TrainConfig.from_mapping(
        {"max_steps": max_steps, "lr": lr, "target_gpus": gpus[:-1], "drafter_gpus": gpus[-1:]}
    )
    spec = RunSpec("20260101-000000-abcdef", (), {}, (), config=config.to_dict())
    spec = from_plain(RunSpec, loads_object(dumps(plain(spec))))
    settings = resolve({"host": "h"}, {}, None, Path("/nonexistent"))
    assert resolve_training(settings, None, Source(Path("/"), ""), [], spec).config == config


def test_relative_paths_of_a_local_run_become_absolute(world):
    assert world().config.target_model == str(world.directory / "build" / "target")
    cwd = world.directory / "cwd"
    training = world(config=str(world.directory / "run.toml"), flags={"target_model": "m"})
    assert (training.config.data_dir, training.config.target_model) == (
        str(world.directory / "data"),
        str(cwd / "m"),
    )
    # The same file from elsewhere means the same places, and so does a template that is named with --config.
    template = world(config=str(world.directory / "templates" / "demo.toml"))
    assert template.config.target_model == str(world.directory / "build" / "target")
    lonely = cwd / "templates" / "demo.toml"
    lonely.parent.mkdir()
    lonely.write_text('data_dir = "x"\n')
    assert world(config=str(lonely)).config.data_dir == str(cwd / "templates" / "x")


def test_relative_paths_for_another_machine_are_refused(world):
    with pytest.raises(DflashError, match="data_dir") as caught:
        world(host="h", flags={"data_dir": "data"})
    assert caught.value.code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("flags", "assignments", "text"),
    [
        ({}, ["epocs=3"], "did you mean 'epochs'?"),
        ({}, ["epochs"], "write --set key=value"),
        ({"epochs": "many"}, [], "whole number"),
        ({"split_fc": "maybe"}, [], "off, on"),
        ({"target_gpus": "0,1", "drafter_gpus": "1"}, [], "[1]"),
    ],
)
def test_what_is_wrong_is_said_before_any_contact(world, flags, assignments, text):
    with pytest.raises(DflashError) as caught:
        world(flags=flags, assignments=assignments)
    assert text in caught.value.render()
    assert caught.value.code == ExitCode.USAGE


def test_an_unknown_key_in_a_file_names_file_and_neighbour(world):
    (world.directory / "bad.toml").write_text("learning_rat = 1\nlrr = 2\n")
    with pytest.raises(DflashError) as caught:
        world(config=str(world.directory / "bad.toml"))
    assert "bad.toml" in caught.value.cause


def test_a_missing_file_is_said(world):
    with pytest.raises(DflashError, match="no configuration"):
        world(config="/nonexistent.toml")


def test_choose_file_expands_home(world, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    settings = resolve({"config": "~/x.toml"}, {}, None, world.directory / "none")
    assert str(choose_file(settings, None, Source(world.directory, ""))[0]) == "/home/me/x.toml"
