"""A run that goes on with the exported drafter of another: it begins where that one ended."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from remote.protocol.errors import ExitCode
from trainer import __main__ as entry

FIRST = {"epochs": 3, "attention": "full"}


def export(run: Any, output: Path, *words: str) -> dict[str, torch.Tensor]:
    """Export a run's last checkpoint; return its tensors."""
    checkpoint = str(run.checkpoints[-1])
    words = ("--checkpoint", checkpoint, "--output", str(output), "--dtype", "float32", *words)
    assert entry.main(["export", *words]) == ExitCode.OK
    return load_file(output / "model.safetensors")


@pytest.mark.parametrize("layout", [{}, {"drafter_gpus": [1, 2]}])
def test_the_loss_goes_on_where_the_earlier_run_ended(
    trained: Callable[..., Any], start: Callable[..., Any], finish: Callable[[Any], Any], tmp_path: Path, layout: Any
) -> None:
    first = trained(**FIRST)
    tensors = export(first, tmp_path / "drafter")
    keys = FIRST | layout | {"lr": 1e-9, "init_from_drafter": str(tmp_path / "drafter"), "checkpoint_every": 2}
    second = finish(start(**keys))
    assert set(second.codes) == {0}, second.log
    # Rows of the same first epoch: the same batch meets other weights.
    assert second.losses[1] < first.losses[1] - 0.1
    begun = export(second, tmp_path / "begun", "--untrained")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in begun.items())
    export(second, tmp_path / "second")
    assert f"| init_from_drafter | {tmp_path / 'drafter'} |" in (tmp_path / "second" / "README.md").read_text()
    # What a resumed run needs is in the checkpoint.
    shutil.rmtree(tmp_path / "drafter")
    rest = finish(start(**keys, resume=str(second.checkpoints[0])))
    assert set(rest.codes) == {0}, rest.log
    assert rest.losses == {step: loss for step, loss in second.losses.items() if step in rest.losses}
