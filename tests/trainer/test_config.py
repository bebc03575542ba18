"""The configuration: every key by every way in, every rule broken once, and errors that name the way out."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.protocol.codec import dumps, loads_object
from remote.protocol.errors import DflashError, ExitCode
from trainer.config import PATH_KEYS, TrainConfig, coerce, config_flags, load_toml, parse_set

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
NUMBERS = [name for name, field in FIELDS.items() if field.type in ("int", "float")]


def text_of(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def bounds(field: dataclasses.Field[Any]) -> tuple[float, float]:
    low, high = field.metadata["low"], field.metadata["high"]
    return (-1e6 if low is None else low), (1e6 if high is None else high)


@st.composite
def assignments(draw: st.DrawFn) -> tuple[str, Any]:
    """A key with a value that its own rule allows."""
    field = FIELDS[draw(st.sampled_from(sorted(FIELDS)))]
    low, high = bounds(field)
    if field.type == "tuple[str, ...]":
        return field.name, tuple(draw(st.lists(st.sampled_from(field.metadata["choices"]), max_size=5)))
    if field.metadata["choices"]:
        return field.name, draw(st.sampled_from(field.metadata["choices"]))
    if field.type == "int":
        return field.name, draw(st.integers(math.ceil(low), int(high)))
    if field.type == "float":
        return field.name, draw(st.floats(low, high, allow_nan=False))
    if field.type == "str":
        return field.name, draw(st.text(st.characters(exclude_categories=["Cs"])).map(str.strip))
    return field.name, tuple(draw(st.lists(st.integers(0, 99), max_size=5)))


@given(assignments())
def test_a_value_survives_the_command_line(assignment: tuple[str, Any]) -> None:
    key, value = assignment
    assert coerce(key, text_of(value)) == value
    assert parse_set(f"{key}={text_of(value)}") == (key, value)
    assert parse_set(f"{key.replace('_', '-')} = {text_of(value)}") == (key, value)


@given(st.lists(assignments(), max_size=6))
def test_a_configuration_survives_the_plan_file(changes: list[tuple[str, Any]]) -> None:
    config = TrainConfig(**dict(changes))
    try:
        config.validate()
    except DflashError:
        return
    data = loads_object(dumps(config.to_dict()))
    assert TrainConfig.from_mapping(data) == config
    assert TrainConfig.from_mapping(config.changed()) == config


def test_defaults_are_a_possible_configuration() -> None:
    TrainConfig().validate()
    assert TrainConfig().changed() == {}


def test_the_storys_values_are_the_defaults() -> None:
    config = TrainConfig()
    assert (config.lr, config.warmup_ratio, config.weight_decay, config.max_grad_norm) == (6e-4, 0.04, 0.01, 1.0)
    assert (config.epochs, config.max_length, config.seed, config.micro_batches_per_step) == (6, 4096, 42, 12)
    assert (config.split_fc, config.device, config.on_nan) == ("off", "cuda", "stop")


def test_relative_paths_lead_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(target_model="model", data_dir="/data", resume="../run/step-1").with_absolute_paths()
    assert (config.target_model, config.data_dir) == (str(tmp_path / "model"), "/data")
    assert Path(config.resume).resolve() == tmp_path.parent / "run" / "step-1"
    # An empty one means something else than the current directory.
    assert (config.held_out_dir, config.output_dir) == ("", "")
    assert all(isinstance(getattr(config, key), str) for key in PATH_KEYS)


def test_a_record_of_a_newer_version_opens_and_its_values_are_still_judged() -> None:
    values = TrainConfig(lr=0.5).to_dict() | {"invented_later": {"a": 1}}
    assert TrainConfig.from_record(values, "a checkpoint") == TrainConfig(lr=0.5)
    with pytest.raises(DflashError, match="lr = -1 is not possible"):
        TrainConfig.from_record(values | {"lr": -1}, "a checkpoint")


# ---- what is refused


def refused(**values: Any) -> DflashError:
    with pytest.raises(DflashError) as caught:
        TrainConfig.from_mapping(values, "run.toml")
    assert caught.value.code == ExitCode.USAGE
    assert caught.value.cause
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("key", "near"),
    [("drafter_gpu", "drafter_gpus"), ("learning_rate", ""), ("epoch", "epochs"), ("maxlength", "max_length"),
     ("mask-token-id", "mask_token_id"), ("zzzzzz", "")],
)  # fmt: skip
def test_an_unknown_key_names_the_nearest(key: str, near: str) -> None:
    error = refused(**{key: 1})
    assert key in error.error
    assert "run.toml" in error.cause
    if near:
        assert error.hint == f"did you mean {near!r}?"


@pytest.mark.parametrize("name", NUMBERS)
def test_every_bound_holds(name: str) -> None:
    field = FIELDS[name]
    low, high = field.metadata["low"], field.metadata["high"]
    for value in ([low - 1] if low is not None else []) + ([high + 1] if high is not None else []):
        error = refused(**{name: value})
        assert error.error == f"{name} = {value!r} is not possible"
        assert "must be at" in error.cause
        assert field.metadata["help"] in error.hint


@pytest.mark.parametrize(
    "name", [name for name, field in FIELDS.items() if field.metadata["choices"] and field.type == "str"]
)
def test_every_choice_holds(name: str) -> None:
    error = refused(**{name: "maybe"})
    for choice in FIELDS[name].metadata["choices"]:
        assert choice in error.cause
        assert TrainConfig.from_mapping({name: choice})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epochs", "6"), ("epochs", 6.0), ("epochs", True), ("epochs", None), ("lr", "fast"), ("lr", math.nan),
        ("lr", math.inf), ("lr", True), ("target_gpus", 0), ("target_gpus", ["0"]), ("target_gpus", [True]),
        ("target_gpus", [-1]), ("layer_types", "full"), ("layer_types", [1]), ("layer_types", ["full_attention"]),
        ("data_dir", 3), ("data_dir", True), ("transfer", True), ("split_fc", 1), ("data_dir", None),
    ],
)  # fmt: skip
def test_every_type_holds(key: str, value: Any) -> None:
    assert refused(**{key: value}).error.startswith(f"{key} = ")


def test_a_toml_boolean_is_on_or_off() -> None:
    assert TrainConfig.from_mapping({"split_fc": True}).splits_fc
    assert not TrainConfig.from_mapping({"split_fc": False}).splits_fc


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"target_gpus": []}, "target_gpus"),
        ({"drafter_gpus": []}, "drafter_gpus"),
        ({"target_gpus": [2, 2]}, "target_gpus"),
        ({"drafter_gpus": [3, 3]}, "drafter_gpus"),
        ({"target_gpus": [0, 1], "drafter_gpus": [1, 2]}, "drafter_gpus"),
        ({"target_gpus": [0, 1], "drafter_gpus": [1, 0]}, "drafter_gpus"),
        ({"drafter_gpus": [1, 2, 3], "micro_batches_per_step": 2}, "micro_batches_per_step"),
        ({"max_length": 5000}, "max_length"),
        ({"num_anchors": 513}, "num_anchors"),
        ({"target_layer_ids": [3, 1]}, "target_layer_ids"),
        ({"target_layer_ids": [1, 1]}, "target_layer_ids"),
        ({"layer_types": ["full"] * 4}, "layer_types"),
        ({"attention_backend": "flex", "device": "cpu"}, "attention_backend"),
        ({"gpu_memory_gib": 94, "device": "cpu"}, "gpu_memory_gib"),
        ({"max_grad_norm": 0}, "max_grad_norm"),
        ({"beta1": 1}, "beta1"),
        ({"beta2": 1.0}, "beta2"),
    ],
)
def test_every_rule_between_keys_holds(values: dict[str, Any], key: str) -> None:
    assert refused(**values).error.startswith(f"{key} = ")


def test_overlapping_devices_are_named() -> None:
    assert "[1]" in refused(target_gpus=[0, 1], drafter_gpus=[1, 2]).cause


def test_identical_devices_are_shared_roles() -> None:
    config = TrainConfig.from_mapping({"target_gpus": [0, 1], "drafter_gpus": [0, 1]})
    assert config.shared_roles
    assert not TrainConfig().shared_roles


def test_betas_that_pass_are_those_that_the_optimizer_takes() -> None:
    import torch

    for beta in (0.0, math.nextafter(1.0, 0.0)):
        config = TrainConfig.from_mapping({"beta1": beta, "beta2": beta})
        torch.optim.AdamW([torch.zeros(1)], betas=(config.beta1, config.beta2))
    with pytest.raises(ValueError, match="beta"):
        torch.optim.AdamW([torch.zeros(1)], betas=(1.0, 0.9))


# ---- ways in


@pytest.mark.parametrize("assignment", ["lr", "", "lr:3"])
def test_a_set_without_an_equals_sign_is_refused(assignment: str) -> None:
    with pytest.raises(DflashError, match="no assignment"):
        parse_set(assignment)


def test_a_set_may_hold_equals_signs_in_its_value() -> None:
    assert parse_set("data_dir=/data/a=b") == ("data_dir", "/data/a=b")


@pytest.mark.parametrize("text", ["", "six", "1e3", "0x10"])
def test_a_number_that_is_none_is_refused_with_its_key(text: str) -> None:
    with pytest.raises(DflashError) as caught:
        coerce("epochs", text)
    assert caught.value.cause == "expected a whole number, in command line"


def test_a_toml_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('lr = 1e-3\ntarget_gpus = [0, 1]\ndrafter_gpus = [2]\nsplit_fc = "on"\n')
    config = TrainConfig.from_mapping(load_toml(path), str(path))
    assert (config.lr, config.target_gpus, config.splits_fc) == (1e-3, (0, 1), True)


@pytest.mark.parametrize("content", [b"lr = ", b"\xff\xfe", None])
def test_a_file_that_is_no_toml_is_refused_with_its_path(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DflashError) as caught:
        load_toml(path)
    assert caught.value.code == ExitCode.USAGE
    assert str(path) in caught.value.error


def test_every_key_is_a_flag() -> None:
    flags = {flag.key: flag for flag in config_flags()}
    assert flags.keys() == FIELDS.keys()
    for key, flag in flags.items():
        assert flag.name == "--" + key.replace("_", "-")
        assert flag.help
    assert {"--target-model", "--data-dir", "--output-dir", "--target-gpus", "--drafter-gpus", "--epochs", "--lr",
            "--warmup-ratio", "--weight-decay"} <= {flag.name for flag in flags.values()}  # fmt: skip


def test_the_configuration_is_torch_free() -> None:
    code = "import sys, trainer.config; sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xef\xbb\xbflr = 0.5\n")
    assert load_toml(path) == {"lr": 0.5}


@pytest.mark.parametrize("place", ["/dev/zero", ".", "large.toml"])
def test_what_is_no_file_of_sane_size_is_not_read(tmp_path: Path, place: str) -> None:
    (tmp_path / "large.toml").write_bytes(b"# " + b"x" * (1 << 20) + b"\n")
    with pytest.raises(DflashError, match="is no configuration") as caught:
        load_toml(tmp_path / place)
    assert caught.value.code is ExitCode.USAGE


@pytest.mark.parametrize(("key", "value"), [("epochs", 10**9), ("seed", 2**63), ("seed", 10**30)])
def test_numbers_that_nothing_could_hold_are_refused(key: str, value: int) -> None:
    # Each epoch's rows are counted before the launch, and a seed is a 64-bit key.
    with pytest.raises(DflashError, match="is not possible"):
        TrainConfig.from_mapping({key: value})
