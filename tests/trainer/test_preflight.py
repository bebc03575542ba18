"""Issue 2, check 6: what can be known before a launch is said before it, with cause and hint, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remote.protocol.errors import DflashError, ExitCode
from trainer.config import TrainConfig
from trainer.drafter.config import DrafterConfig, derive
from trainer.drafter.model import Drafter
from trainer.pipeline.check_command import check_continues
from trainer.pipeline.plan import RunPlan
from trainer.preflight import drafter_config, layer_shapes, parameter_count, preflight, ring_size
from trainer.target.facts import target_facts

ROOT = Path(__file__).resolve().parents[2]

Values = dict[str, Any]


@pytest.fixture(scope="module")
def values(make_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Values:
    data = tmp_path_factory.mktemp("data") / "data.jsonl"
    data.write_text("".join(json.dumps({"input_ids": list(range(4, 30)), "prompt_len": 3}) + "\n" for _ in range(20)))
    return {
        "target_model": str(make_target()), "data_dir": str(data), "mask_token_id": 3, "block_size": 4, "drafter_layers": 2,
        "captured_layers": 2, "max_length": 64, "token_budget": 128, "bucket_tokens": 16, "num_anchors": 8,
        "row_anchors": 24, "epochs": 2, "micro_batches_per_step": 3, "device": "cpu", "ring_mib": 8,
    }  # fmt: skip


def check(values: Values, directory: Path) -> Any:
    return preflight(TrainConfig.from_mapping(values), directory)


def refused(values: Values, directory: Path, code: ExitCode = ExitCode.PREFLIGHT) -> DflashError:
    with pytest.raises(DflashError) as caught:
        check(values, directory)
    assert caught.value.code == code
    assert caught.value.cause
    assert caught.value.hint
    return caught.value


def unsupervised(directory: Path) -> dict[str, Any]:
    path = directory / "unsupervised.jsonl"
    path.write_text(json.dumps({"input_ids": [5, 6, 7, 8], "prompt_len": 4}) + "\n")
    return {"data_dir": str(path)}


BROKEN: dict[str, Callable[[Path], Values]] = {
    "model directory missing": lambda d: {"target_model": str(d / "missing")},
    "model directory empty": lambda d: {"target_model": str(d)},
    "data missing": lambda d: {"data_dir": str(d / "missing.jsonl")},
    "no supervised token": unsupervised,
    "mask token outside the vocabulary": lambda _: {"mask_token_id": 48},
    "layer id out of range": lambda _: {"target_layer_ids": [1, 6]},
    "last layer": lambda _: {"target_layer_ids": [1, 5]},
    "ring too small for two slots": lambda _: {"ring_mib": 1, "token_budget": 100_000},
    "no space for the ring": lambda _: {"ring_mib": 2**40, "token_budget": 2**31},
    "no space for checkpoints": lambda _: {"drafter_ffn": 2**40},
}
SAYS = {
    "model directory missing": "missing",
    "data missing": "missing.jsonl",
    "no supervised token": "supervised",
    "mask token outside the vocabulary": "48",
    "layer id out of range": "6",
    "ring too small for two slots": "ring_mib",
    "no space for the ring": "no space left for the ring",
    "no space for checkpoints": "no space left for checkpoints",
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_wrong_is_said_before_the_launch(values: Values, tmp_path: Path, what: str) -> None:
    error = refused(values | BROKEN[what](tmp_path), tmp_path)
    assert SAYS.get(what, "") in error.render()


@pytest.mark.parametrize("what", BROKEN)
def test_a_refused_train_exits_with_7_and_leaves_nothing_reserved(values: Values, tmp_path: Path, what: str) -> None:
    from trainer.__main__ import main

    run = tmp_path / "runs" / "20261130-120000-abcdef"
    arguments = tmp_path / "config.json"
    arguments.write_text(json.dumps(values | BROKEN[what](tmp_path)))
    os.environ["DFLASH_RUN_DIR"] = str(run)
    try:
        assert main(["train", "--config-json", str(arguments)]) == ExitCode.PREFLIGHT
    finally:
        del os.environ["DFLASH_RUN_DIR"]
    assert not run.joinpath("sockets.path").exists()  # Written before the ring and the sockets' directory are made.
    filed = json.loads((run / "errors" / "rank--1.json").read_text())
    assert (filed["role"], filed["phase"], filed["code"]) == ("leader", "preflight", 7)
    assert filed["hint"]
    assert not (run / "plan.json").exists()
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize("key", ["target_model", "data_dir"])
def test_what_must_be_named_is_asked_for_by_its_flag(values: Values, tmp_path: Path, key: str) -> None:
    error = refused(values | {key: ""}, tmp_path, ExitCode.USAGE)
    assert "--" + key.replace("_", "-") in error.hint


def test_the_mask_token_must_be_named(values: Values, tmp_path: Path) -> None:
    assert "--mask-token-id" in refused(values | {"mask_token_id": -1}, tmp_path, ExitCode.USAGE).hint


@pytest.mark.parametrize("key", ["data_dir", "held_out_dir"])
def test_a_mask_token_that_is_a_label_is_refused(values: Values, tmp_path: Path, key: str) -> None:
    path = tmp_path / "data.jsonl"
    rows = [{"input_ids": [3, 5, 6, 7, 8], "prompt_len": 2}, {"input_ids": [4, 5, 3, 7, 3], "prompt_len": 2}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    error = refused(values | {key: str(path)}, tmp_path)
    assert error.error == "mask_token_id 3 occurs in the data"
    # In a prompt it disturbs nothing: the drafter sees states there, not tokens.
    assert error.cause == f"2 labels of {path} are this token"
    check(values | {key: str(path), "mask_token_id": 4}, tmp_path)
    check(values | {key: str(path), "mask_token_id": 2}, tmp_path)


def test_a_good_configuration_is_described(values: Values, tmp_path: Path) -> None:
    found = check(values, tmp_path / "not" / "yet" / "there")
    assert len(found.dataset) == 20
    assert found.total_steps == found.schedule.total_steps
    assert list(tmp_path.iterdir()) == []
    assert check(values | {"max_steps": 2}, tmp_path).total_steps == 2
    assert check(values | {"max_steps": 10**6}, tmp_path).total_steps == found.total_steps


def test_a_slot_more_would_not_fit_the_bound(values: Values, tmp_path: Path) -> None:
    drafter = check(values, tmp_path).drafter
    for mib in (1, 2, 8):
        config = TrainConfig.from_mapping(values | {"ring_mib": mib, "micro_batches_per_step": 10**6})
        size, slots = ring_size(config, drafter)
        assert slots >= 2
        assert slots * size <= mib << 20 < (slots + 1) * size


def test_a_ring_holds_no_more_than_a_steps_micro_batches(values: Values, tmp_path: Path) -> None:
    drafter = check(values, tmp_path).drafter
    assert ring_size(TrainConfig.from_mapping(values), drafter)[1] == 3
    one = TrainConfig.from_mapping(values | {"micro_batches_per_step": 1})
    assert ring_size(one, drafter)[1] == 2


def test_the_last_layer_takes_its_place_in_every_slot_when_the_drafter_learns_from_it(
    values: Values, tmp_path: Path
) -> None:
    drafter = check(values, tmp_path).drafter
    configs = [TrainConfig.from_mapping(values | {"kl_weight": share}) for share in (0.0, 0.1)]
    without, with_kl = (ring_size(each, drafter)[0] for each in configs)
    assert with_kl - without == 128 * drafter.hidden_size * 2  # bfloat16


def test_shared_roles_need_no_ring(values: Values, tmp_path: Path) -> None:
    drafter = check(values, tmp_path).drafter
    config = TrainConfig.from_mapping(values | {"target_gpus": [0], "drafter_gpus": [0]})
    assert ring_size(config, drafter)[1] == 0


@pytest.mark.parametrize(("limit", "fits"), [("max", True), ("4096", False), ("8388608", True), (None, True)])
def test_a_ring_beyond_the_containers_memory_is_refused(
    values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, fits: bool
) -> None:
    monkeypatch.setattr("trainer.preflight.CGROUP", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    if fits:
        check(values, tmp_path)
    else:
        assert "memory limit" in refused(values, tmp_path).cause


@pytest.mark.parametrize("changes", [{}, {"num_layers": 1}, {"num_target_layer_ids": 4}, {"intermediate_size": 7}])
def test_parameters_are_counted_as_the_drafter_has_them(changes: dict[str, int]) -> None:
    target = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 40, "rms_norm_eps": 1e-5, "rope_theta": 1000.0,
    }  # fmt: skip
    config = derive(
        target, **({"num_layers": 3, "block_size": 4, "mask_token_id": 3, "num_target_layer_ids": 2} | changes)
    )
    assert parameter_count(config) == sum(parameter.numel() for parameter in Drafter(config).parameters())


def test_the_published_drafter_of_27b_has_its_parameters() -> None:
    target = {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "num_key_value_heads": 4, "vocab_size": 248320, "rms_norm_eps": 1e-6, "rope_theta": 1e7, "head_dim": 256,
    }  # fmt: skip
    config = derive(
        target, num_layers=5, block_size=16, mask_token_id=248070, num_target_layer_ids=5, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    assert parameter_count(config) == 1_730_213_120


@pytest.mark.parametrize(
    "module", ["trainer.pipeline.leader", "trainer.preflight", "trainer.config", "trainer.__main__"]
)
def test_the_leader_never_imports_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_everything_that_is_missing_is_told_at_once(values: Values, tmp_path: Path) -> None:
    missing = {"target_model": str(tmp_path / "model"), "data_dir": str(tmp_path / "data"), "device": "cuda"}
    error = refused(values | missing | {"drafter_gpus": [99]}, tmp_path)
    assert len(error.problems) == 3
    assert error.error.startswith("3 things")
    told = [problem.error for problem in error.problems]
    assert "no GPU" in told[0]
    assert str(tmp_path / "model") in told[1] + error.problems[1].cause
    assert str(tmp_path / "data") in told[2] + error.problems[2].cause
    assert DflashError.from_json(error.to_json()).to_json() == error.to_json()
    config = TrainConfig.from_mapping(values | missing)
    with pytest.raises(DflashError) as caught:
        preflight(config, tmp_path, devices=False)
    assert [problem.error for problem in caught.value.problems] == told[1:]


def test_room_that_the_old_run_gives_back_counts(
    values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.preflight._free", lambda path: 10**12 if path == tmp_path else 1000)
    config = TrainConfig.from_mapping(values)
    drafter = derive_of(config)
    size, slots = ring_size(config, drafter)
    assert "/dev/shm" in refused(values, tmp_path).cause
    assert preflight(config, tmp_path, freed_shm=size * slots - 1000).total_steps
    with pytest.raises(DflashError):
        preflight(config, tmp_path, freed_shm=size * slots - 1001)


def test_whether_a_runs_next_checkpoint_could_be_resumed_from(values: Values, tmp_path: Path) -> None:
    """A restart with --resume asks before it stops a run that has saved nothing yet."""
    config = TrainConfig.from_mapping(values)
    found = preflight(config, tmp_path)
    run = RunPlan(
        run_id="r", run_dir=str(tmp_path), config=config.to_dict(), leader_pid=1, sockets="", ring_file="", slot_bytes=1,
        slots_per_pair=2, captured_layers=2, hidden_size=8, documents="", data_fingerprint=found.dataset.fingerprint,
        total_steps=found.total_steps, first_step=1, output_dir="",
    )  # fmt: skip
    check_continues(run, found)
    check_continues(run, check(values | {"ring_mib": 16, "profile_interval": 1}, tmp_path))
    for changes, words in (({"lr": 0.5}, "lr:"), ({"epochs": 3}, "epochs: 2 then, 3 now")):
        with pytest.raises(DflashError) as caught:
            check_continues(run, check(values | changes, tmp_path))
        assert words in caught.value.cause
    run.save(tmp_path / "plan.json")
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "preflight", "--continues", str(tmp_path / "plan.json"), "--lr", "0.5"]
        + [f"--{key.replace('_', '-')}={value}" for key, value in values.items()],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, "lr:" in done.stderr) == (ExitCode.PREFLIGHT, True), done.stderr


@pytest.mark.parametrize(
    ("changes", "key"), [({"captured_layers": 9}, "captured_layers"), ({"drafter_heads": 3}, "drafter_heads")]
)
def test_a_hint_names_a_key_that_exists(values: Values, tmp_path: Path, changes: Values, key: str) -> None:
    assert key in refused(values | changes, tmp_path).hint
    assert key in {field.name for field in dataclasses.fields(TrainConfig)}


@pytest.mark.parametrize(
    ("changes", "layers", "served"),
    [
        ({}, ["sliding", "full"], "SGLang; vLLM 0.32 refuses a mixture"),
        ({"attention": "full"}, ["full", "full"], "SGLang, vLLM"),
        ({"layer_types": ["sliding", "sliding"]}, ["sliding", "sliding"], "SGLang, vLLM"),
    ],
)
def test_who_could_serve_it_is_said_before_it_is_trained(
    values: Values, capsys: pytest.CaptureFixture[str], changes: Values, layers: list[str], served: str
) -> None:
    from trainer.__main__ import main

    words = [f"--{key.replace('_', '-')}={text(value)}" for key, value in (values | changes).items()]
    assert main(["preflight", "--json", *words]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["layer_types"], found["served_by"]) == (layers, served)


def text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def derive_of(config: TrainConfig) -> DrafterConfig:
    return drafter_config(config, target_facts(Path(config.target_model)))


# ---- a start from the target's layers


def test_the_shapes_of_a_layer_are_those_of_the_drafter(values: Values) -> None:
    for changes in ({}, {"drafter_heads": 2, "drafter_kv_heads": 1, "drafter_head_dim": 12, "drafter_ffn": 20}):
        config = TrainConfig.from_mapping(values | changes)
        drafter = drafter_config(config, target_facts(config.target_model))
        layer = dict(Drafter(drafter).layers[1].named_parameters())
        assert {name: tuple(parameter.shape) for name, parameter in layer.items()} == layer_shapes(drafter)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drafter_heads": 2}, "self_attn.q_proj.weight is [16, 32] in the drafter, [32, 32] in the target's layer 4"),
        ({"drafter_ffn": 20}, "mlp.gate_proj.weight is [20, 32] in the drafter, [64, 32] in the target's layer 4"),
        ({"drafter_layers": 7}, "missing in the target's layer -1"),
    ],
)
def test_a_start_from_layers_that_do_not_fit_is_refused(
    values: Values, tmp_path: Path, changes: Values, words: str
) -> None:
    check(values | changes, tmp_path)  # Without it they may differ.
    with pytest.raises(DflashError, match="cannot start from this target's layers") as caught:
        check(values | changes | {"init_from_target": "on"}, tmp_path)
    assert caught.value.code == ExitCode.PREFLIGHT
    assert words in caught.value.cause


def test_a_hybrid_gives_no_start_and_is_told_why(
    values: Values, make_target: Callable[..., Path], tmp_path: Path
) -> None:
    hybrid = {"target_model": str(make_target("Qwen3_5ForCausalLM", tie_word_embeddings=False)), "drafter_layers": 3}
    check(values | hybrid, tmp_path)
    error = refused(values | hybrid | {"init_from_target": "on"}, tmp_path)
    assert "missing in the target's layer" in error.cause
    assert error.hint == "a hybrid's last layers are recurrent; init_from_target needs a plain target: turn it off"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_a_start_that_fits_is_let_through(
    values: Values, make_target: Callable[..., Path], tmp_path: Path, architecture: str
) -> None:
    check(values | {"target_model": str(make_target(architecture)), "init_from_target": "on"}, tmp_path)
