"""Export: what a serving engine reads is what was trained; what would break serving is refused."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from remote.protocol.errors import DflashError, ExitCode
from remote.protocol.files import write_json
from trainer import evaluate, export
from trainer.checkpoint_files import STATE_FILE, TrainerState, read_state
from trainer.config import TrainConfig
from trainer.drafter.config import DrafterConfig, derive
from trainer.drafter.model import Drafter
from trainer.export_speculators import speculators_config, zlab_of
from trainer.exported import load_exported
from trainer.model_card import Card, sglang_line, vllm_line

TARGET = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}


@pytest.fixture(scope="module")
def config() -> DrafterConfig:
    return derive(TARGET, num_layers=2, block_size=4, mask_token_id=3, num_target_layer_ids=3)


@pytest.fixture(scope="module")
def drafter(config) -> Drafter:
    torch.manual_seed(0)
    return Drafter(config)


@pytest.fixture
def checkpoint(tmp_path, config, drafter):
    directory = tmp_path / "step-7"
    directory.mkdir()
    save_file(drafter.state_dict(), directory / export.DRAFTER_FILE)
    (directory / export.DRAFTER_CONFIG_FILE).write_text(json.dumps(config.to_zlab("float32")))
    trained_with = TrainConfig(target_model="/models/Qwen3-8B", data_dir="/data/replies", lr=3e-4).to_dict()
    write_json(directory / STATE_FILE, TrainerState(7, 20, "ab" * 32, trained_with, loss=2.5))
    return directory


def run(*words):
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    return export.run(parser.parse_args([str(word) for word in words]))


def test_a_checkpoint_becomes_a_served_directory(checkpoint, tmp_path, drafter, capsys):
    out = tmp_path / "out"
    assert run("--checkpoint", checkpoint, "--output", out) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    served = json.loads((out / "config.json").read_text())
    assert served["dtype"] == "bfloat16"
    assert served["architectures"] == ["DFlashDraftModel"]
    assert served["block_size"] == served["dflash_config"]["block_size"] == 4
    assert "auto_map" not in served
    tensors = load_file(out / "model.safetensors")
    assert tensors.keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensors[name], tensor.bfloat16())


def test_what_was_exported_in_float32_is_loaded_bit_for_bit(tmp_path, config, drafter):
    export.export_drafter(drafter.state_dict(), config, tmp_path / "out", "float32")
    loaded = load_exported(tmp_path / "out")
    assert loaded.config == config
    assert not loaded.training
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def break_state(kind, state):
    state = dict(state)
    if kind == "prefix":
        return {f"draft_model.{name}": tensor for name, tensor in state.items()}
    if kind == "missing":
        del state["norm.weight"]
    if kind == "embedding":
        state["embed_tokens.weight"] = torch.zeros(40, 32)
    if kind == "shape":
        state["fc.weight"] = torch.zeros(32, 64)
    if kind == "nan":
        state["fc.weight"] = torch.full((32, 96), float("nan"))
    return state


@pytest.mark.parametrize("kind", ["prefix", "missing", "embedding", "shape", "nan"])
def test_what_breaks_serving_is_refused_and_nothing_is_left(tmp_path, config, drafter, kind):
    with pytest.raises(DflashError) as caught:
        export.export_drafter(break_state(kind, drafter.state_dict()), config, tmp_path / "out", "bfloat16")
    assert caught.value.code is ExitCode.PREFLIGHT
    assert caught.value.cause
    assert list(tmp_path.iterdir()) == []


def test_a_weight_too_large_for_the_type_is_refused(tmp_path, config, drafter):
    state = drafter.state_dict() | {"norm.weight": torch.full((32,), 1e6)}
    with pytest.raises(DflashError, match="not finite"):
        export.export_drafter(state, config, tmp_path / "out", "float16")
    export.export_drafter(state, config, tmp_path / "out", "bfloat16")


def test_an_existing_directory_is_not_overwritten(tmp_path, config, drafter):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").touch()
    with pytest.raises(DflashError, match="exists already"):
        export.export_drafter(drafter.state_dict(), config, tmp_path / "out", "bfloat16")


def test_an_unknown_type_is_refused(tmp_path, config, drafter):
    with pytest.raises(DflashError, match="int8"):
        export.export_drafter(drafter.state_dict(), config, tmp_path / "out", "int8")


def test_a_directory_that_is_no_checkpoint(tmp_path):
    with pytest.raises(DflashError, match="no checkpoint") as caught:
        run("--checkpoint", tmp_path, "--output", tmp_path / "out")
    assert caught.value.code is ExitCode.PREFLIGHT


def test_a_cut_off_checkpoint(checkpoint, tmp_path):
    weights = checkpoint / export.DRAFTER_FILE
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(DflashError, match="cannot read"):
        run("--checkpoint", checkpoint, "--output", tmp_path / "out")


def test_a_type_that_config_and_tensors_disagree_on(tmp_path, config, drafter):
    export.export_drafter(drafter.state_dict(), config, tmp_path / "out", "float32")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(config.to_zlab("bfloat16")))
    with pytest.raises(DflashError, match="inconsistent") as caught:
        load_exported(tmp_path / "out")
    assert "float32" in caught.value.cause


def sliding(config):
    return replace(config, layer_types=("sliding_attention",) * 2, sliding_window=16)


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_the_speculators_layout_counts_layers_from_one_and_has_one_flag(config, kind):
    drafter_config = sliding(config) if kind == "sliding" else config
    served = speculators_config(drafter_config, "bfloat16", "Qwen/Qwen3-8B", ("Qwen3ForCausalLM",))
    assert served["aux_hidden_state_layer_ids"] == [i + 1 for i in config.target_layer_ids]
    assert served["sliding_window_non_causal"] is (kind == "full")
    assert served["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == config.block_size - 1
    assert served["speculators_config"]["verifier"] == {
        "name_or_path": "Qwen/Qwen3-8B",
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert served["draft_vocab_size"] == served["transformer_layer_config"]["vocab_size"] == 40
    assert served["transformer_layer_config"]["layer_types"] == list(drafter_config.layer_types)
    read = DrafterConfig.from_zlab(zlab_of(json.loads(json.dumps(served))), num_target_layers=8)
    assert read == drafter_config


def test_a_mixture_is_refused_in_the_speculators_layout_with_a_way_out(config, checkpoint, tmp_path):
    mixed = replace(config, layer_types=("sliding_attention", "full_attention"), sliding_window=16)
    (checkpoint / export.DRAFTER_CONFIG_FILE).write_text(json.dumps(mixed.to_zlab("float32")))
    words = ["--checkpoint", checkpoint, "--output", tmp_path / "out"]
    with pytest.raises(DflashError, match="full and sliding") as caught:
        run(*words, "--layout", "speculators")
    assert "z-lab layout" in caught.value.hint
    assert not (tmp_path / "out").exists()
    assert run(*words) == 0
    assert "vLLM 0.32 refuses" in (tmp_path / "out" / "README.md").read_text()


def test_the_speculators_layout_is_written_and_loaded_again(checkpoint, tmp_path, config, drafter, make_target):
    target = make_target("Qwen3ForCausalLM")
    words = ["--layout", "speculators", "--target-name", target, "--dtype", "float32"]
    assert run("--checkpoint", checkpoint, "--output", tmp_path / "out", *words) == 0
    served = json.loads((tmp_path / "out" / "config.json").read_text())
    assert served["speculators_config"]["verifier"]["architectures"] == ["Qwen3ForCausalLM"]
    loaded = load_exported(tmp_path / "out", num_target_layers=8)
    assert loaded.config == config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"    vllm serve {tmp_path / 'out'}\n" in card
    assert "sglang" not in card


def note_architecture(checkpoint, name):
    """The checkpoint as its run would have saved it for a target of this architecture."""
    write_json(checkpoint / STATE_FILE, replace(read_state(checkpoint), target_architecture=name))


@pytest.mark.parametrize(("name", "hybrid"), [("Qwen3_5ForConditionalGeneration", True), ("Qwen3ForCausalLM", False)])
def test_the_targets_kind_is_known_where_no_directory_of_it_is(checkpoint, tmp_path, name, hybrid):
    note_architecture(checkpoint, name)
    words = ["--checkpoint", checkpoint, "--target-name", "Qwen/Qwen3.6-27B"]
    assert run(*words, "--output", tmp_path / "zlab") == 0
    card = (tmp_path / "zlab" / "README.md").read_text()
    assert ("--speculative-num-draft-tokens 4 --mamba-scheduler-strategy extra_buffer\n" in card) is hybrid
    assert "If the target has" not in card
    assert run(*words, "--output", tmp_path / "speculators", "--layout", "speculators") == 0
    served = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert served["speculators_config"]["verifier"]["architectures"] == [name]


def test_the_directory_that_serves_is_asked_before_the_note(checkpoint, tmp_path, make_target):
    note_architecture(checkpoint, "LlamaForCausalLM")
    words = ["--layout", "speculators", "--target-name", make_target("Qwen3ForCausalLM")]
    assert run("--checkpoint", checkpoint, "--output", tmp_path / "out", *words) == 0
    served = json.loads((tmp_path / "out" / "config.json").read_text())
    assert served["speculators_config"]["verifier"]["architectures"] == ["Qwen3ForCausalLM"]


def test_an_unknown_kind_of_target_is_a_warning_or_refused(checkpoint, tmp_path, capsys):
    """Checkpoints of before the note, exported where no directory of the target is."""
    words = ["--checkpoint", checkpoint, "--output", tmp_path / "out", "--target-name", "Qwen/Qwen3.6-27B"]
    with pytest.raises(DflashError, match="architecture") as caught:
        run(*words, "--layout", "speculators")
    assert "--target-name" in caught.value.hint
    assert not (tmp_path / "out").exists()
    assert run(*words) == 0
    assert "warning: it is not known here whether Qwen/Qwen3.6-27B is a hybrid" in capsys.readouterr().err
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "If the target has recurrent layers (Qwen3.5, Qwen3.6), add `--mamba-scheduler-strategy extra_buffer`." in card
    )


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"speculators_model_type": "eagle3"}, "algorithm is eagle3"),
        ({"draft_vocab_size": 32}, "vocabulary of its own"),
        ({"sample_from_anchor": True}, "anchor's row"),
        ({"sliding_window_non_causal": True}, "both directions"),
    ],
)
def test_what_another_trainer_may_have_written_is_refused_when_it_computes_something_else(config, changed, cause):
    served = speculators_config(sliding(config), "bfloat16", "t", ("Qwen3ForCausalLM",))
    with pytest.raises(DflashError) as caught:
        zlab_of(served | changed)
    assert cause in caught.value.cause


def test_an_older_directory_of_others_is_loaded(tmp_path, config, drafter):
    """What z-lab's first releases lack: dtype under its old name, layer_types, num_target_layers."""
    export.export_drafter(drafter.state_dict(), config, tmp_path / "out", "bfloat16")
    path = tmp_path / "out" / "config.json"
    served = json.loads(path.read_text())
    for key in ("dtype", "layer_types", "num_target_layers", "rope_parameters"):
        del served[key]
    path.write_text(json.dumps(served | {"torch_dtype": "bfloat16"}))
    assert load_exported(tmp_path / "out", num_target_layers=8).config == config
    path.write_text(json.dumps(served | {"torch_dtype": "float16"}))
    with pytest.raises(DflashError, match="inconsistent"):
        load_exported(tmp_path / "out", num_target_layers=8)
    with pytest.raises(DflashError, match="no config") as caught:
        load_exported(tmp_path / "out")
    assert "num_target_layers" in caught.value.cause


def flags(line):
    """The words of a command line, each flag with the word behind it."""
    words = shlex.split(line)
    return {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--")}, words


def test_serve_lines_are_those_of_the_published_drafters(config):
    given, words = flags(vllm_line(config, "Qwen/Qwen3-8B", "/out/my drafter"))
    assert words[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    # vLLM counts guesses, SGLang counts rows.
    assert json.loads(given["--speculative-config"]) == {
        "method": "dflash",
        "model": "/out/my drafter",
        "num_speculative_tokens": 3,
    }
    assert given["--attention-backend"] == "flash_attn"
    assert "--attention-backend" not in vllm_line(sliding(config), "t", "d")
    given, words = flags(sglang_line(config, "Qwen/Qwen3-8B", "/out/my drafter", hybrid_target=False))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert given == {
        "--model-path": "Qwen/Qwen3-8B",
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": "/out/my drafter",
        "--speculative-num-draft-tokens": "4",
    }
    assert "extra_buffer" in sglang_line(config, "t", "d", hybrid_target=True)


def test_the_card_says_what_it_is_how_to_serve_it_and_how_it_was_trained(checkpoint, tmp_path, config):
    out = tmp_path / "out"
    names = ["--target-name", "Qwen/Qwen3-8B", "--drafter-name", "me/Qwen3-8B-DFlash"]
    assert run("--checkpoint", checkpoint, "--output", out, *names) == 0
    card = (out / "README.md").read_text()
    assert card.startswith("---\nbase_model: Qwen/Qwen3-8B\n")
    assert f"    {vllm_line(config, 'Qwen/Qwen3-8B', 'me/Qwen3-8B-DFlash')}\n" in card
    assert f"    {sglang_line(config, 'Qwen/Qwen3-8B', 'me/Qwen3-8B-DFlash', False)}\n" in card
    assert "Step 7 of 20, loss 2.5000" in card
    assert "| lr | 0.0003 |" in card
    assert "| reads the outputs of target layers | 1, 3, 5 of 8, counted from 0 |" in card
    assert "| layers | 2: 2 full |" in card


def measuring(card):
    """The lines of a card that measure, in order."""
    return [line.strip() for line in card.splitlines() if line.startswith(("    hf ", "    python -m trainer"))]


def test_the_measuring_lines_name_directories_and_the_device_of_the_run(checkpoint, tmp_path):
    words = ["--checkpoint", checkpoint, "--output", tmp_path / "out", "--target-name", "Qwen/Qwen3-8B"]
    assert run(*words, "--drafter-name", "me/Qwen3-8B") == 0
    *fetched, line = measuring((tmp_path / "out" / "README.md").read_text())
    # Two models of one name do not land in one directory.
    assert fetched == [f"hf download {name} --local-dir {name}" for name in ("Qwen/Qwen3-8B", "me/Qwen3-8B")]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    evaluate.add_arguments(parser)
    given = parser.parse_args(shlex.split(line)[4:])
    assert (str(given.target_model), list(map(str, given.drafter))) == ("Qwen/Qwen3-8B", ["me/Qwen3-8B"])
    assert (given.device, given.dtype) == ("cuda", "bfloat16")


def test_directories_are_measured_as_they_stand(checkpoint, tmp_path):
    state = read_state(checkpoint)
    write_json(checkpoint / STATE_FILE, replace(state, config=state.config | {"device": "cpu"}))
    assert run("--checkpoint", checkpoint, "--output", tmp_path / "my out") == 0
    (line,) = measuring((tmp_path / "my out" / "README.md").read_text())
    expected = f"--target-model /models/Qwen3-8B --drafter '{tmp_path}/my out'"
    assert line == f"python -m trainer evaluate {expected}"


def test_names_default_to_the_directories_of_the_run(checkpoint, tmp_path):
    assert run("--checkpoint", checkpoint, "--output", tmp_path / "out") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model" not in card
    assert f'vllm serve /models/Qwen3-8B --speculative-config \'{{"method": "dflash", "model": "{tmp_path}/out"' in card


def test_an_untrained_drafter_says_so(config):
    state = TrainerState(7, 20, "ab" * 32, {}, loss=2.5)
    card = Card(config, "t", "d", "zlab", "float32", 10, state=state, untrained=True).render()
    assert "None: these are the weights that a run started from" in card
    assert "Step 7" not in card


def test_a_checkpoint_that_does_not_name_its_target_asks_for_it(checkpoint, tmp_path):
    (checkpoint / STATE_FILE).unlink()
    with pytest.raises(DflashError, match="which target") as caught:
        run("--checkpoint", checkpoint, "--output", tmp_path / "out")
    assert "--target-name" in caught.value.hint
    assert run("--checkpoint", checkpoint, "--output", tmp_path / "out", "--target-name", "Qwen/Qwen3-8B") == 0
    assert "## Training" not in (tmp_path / "out" / "README.md").read_text()
