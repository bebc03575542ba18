"""A run that was given relative paths, seen from another directory: an export and a saved batch find target and data."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remote.protocol.errors import ExitCode
from trainer import __main__ as entry
from trainer.checkpoint_files import STATE_FILE, read_state


@pytest.fixture(scope="module")
def run(start: Callable[..., Any], finish: Callable[[Any], Any], poisoned: dict[str, str]) -> Any:
    """Ends with a checkpoint although a batch was refused and saved."""
    relative = {key: os.path.relpath(place) for key, place in poisoned.items()}
    return finish(start(**relative, on_nan="continue", attention="full"))


@pytest.fixture(autouse=True)
def elsewhere(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory of the test is not the one that the run was started in."""
    monkeypatch.chdir(tmp_path)


def test_what_is_written_down_leads_there_from_everywhere(run: Any, poisoned: dict[str, str]) -> None:
    plan = json.loads((run.layout.path / "plan.json").read_text())
    state = read_state(run.checkpoints[-1])
    for key, place in poisoned.items():
        assert Path(plan["config"][key]).samefile(place)
        assert Path(state.config[key]).samefile(place)
    assert state.target_architecture == "LlamaForCausalLM"


def test_the_untrained_drafter_is_exported_from_another_directory(run: Any, poisoned: dict[str, str]) -> None:
    words = ["--checkpoint", str(run.checkpoints[-1]), "--output", "out", "--layout", "speculators", "--untrained"]
    assert entry.main(["export", *words]) == ExitCode.OK
    verifier = json.loads(Path("out/config.json").read_text())["speculators_config"]["verifier"]
    assert Path(verifier["name_or_path"]).samefile(poisoned["target_model"])
    assert verifier["architectures"] == ["LlamaForCausalLM"]


def test_keys_of_a_newer_version_do_not_keep_a_checkpoint_from_its_export(run: Any) -> None:
    newer = Path(shutil.copytree(run.checkpoints[-1], "newer"))
    state = json.loads((newer / STATE_FILE).read_text())
    state["config"]["invented_later"] = 3
    (newer / STATE_FILE).write_text(json.dumps(state))
    words = ["--untrained", "--dtype", "float32"]
    for checkpoint, output in ((run.checkpoints[-1], "old"), (newer, "new")):
        assert entry.main(["export", "--checkpoint", str(checkpoint), "--output", output, *words]) == ExitCode.OK
    assert Path("new/model.safetensors").read_bytes() == Path("old/model.safetensors").read_bytes()


def test_a_saved_batch_is_run_in_another_directory(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (directory,) = run.layout.bad.iterdir()
    file = sorted(directory.glob("batch-*.safetensors"))[0]
    assert entry.main(["train", "--only-batch", str(file)]) == ExitCode.FAILED
    assert "output of target embed_tokens" in capsys.readouterr().out
