"""From a checkpoint to what serving engines load: `config.json` and `model.safetensors` in the z-lab layout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from remote.protocol.errors import preflight_error
from trainer.checkpoint_files import DRAFTER_CONFIG_FILE, DRAFTER_FILE, read_state
from trainer.config import TrainConfig
from trainer.drafter.config import DrafterConfig
from trainer.drafter.fresh import fresh_drafter
from trainer.drafter.model import Drafter
from trainer.target.facts import read_config
from trainer.target.new_directory import new_directory

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def export_drafter(state: Mapping[str, torch.Tensor], config: DrafterConfig, destination: Path, dtype: str) -> None:
    """Write a drafter's state under its serving names, cast to `dtype`, as a new directory that appears whole.

    Raises:
        DflashError: `destination` exists, or the state would break serving: names or shapes that do not belong to the
            configuration, a non-finite weight, an unknown dtype (code 7).
    """
    if dtype not in DTYPES:
        raise preflight_error(f"unknown dtype {dtype!r}", hint=f"one of {', '.join(DTYPES)}")
    _check_state(state, config)
    tensors = {name: tensor.detach().to("cpu", DTYPES[dtype]).contiguous() for name, tensor in state.items()}
    # After the cast: float16 overflows at 65,504, and an engine would serve the infinity.
    overflowed = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if overflowed:
        raise preflight_error(
            "the drafter holds numbers that are not finite",
            cause=f"{overflowed[0]} in {dtype}, and {len(overflowed) - 1} more tensors",
            hint="export an earlier checkpoint, or another dtype",
        )
    with new_directory(destination) as directory:
        text = json.dumps(config.to_zlab(dtype), indent=2)
        (directory / "config.json").write_text(text + "\n", encoding="utf-8")
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load_exported(directory: Path, dtype: torch.dtype = torch.float32, num_target_layers: int | None = None) -> Drafter:
    """Return the drafter of an exported directory on the CPU, in `dtype`, in eval mode.

    `num_target_layers` is the target's, for directories of others whose config.json does not name it.

    Raises:
        DflashError: files missing or damaged, names or shapes wrong, or tensors of another type than config.json says
            (code 7).
    """
    raw = read_config(directory)
    config = DrafterConfig.from_zlab(raw, num_target_layers)
    state = _read_state(directory / "model.safetensors")
    _check_state(state, config)
    # vLLM casts to what config.json says; a file that lies there is a drafter with other weights.
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in state.values()}
    # transformers 4 called it torch_dtype; a file that says nothing is believed.
    said = raw.get("dtype") or raw.get("torch_dtype")
    if said is not None and types != {str(said).removeprefix("torch.")}:
        raise preflight_error(
            f"{directory} is inconsistent",
            cause=f"config.json says dtype {said}, the tensors are {', '.join(sorted(types))}",
            hint="export it again",
        )
    return _build(config, state, dtype)


def load_checkpoint(directory: Path) -> tuple[dict[str, torch.Tensor], DrafterConfig]:
    """Return (state, configuration) of a training checkpoint directory.

    Raises:
        DflashError: it is none, or is damaged (code 7).
    """
    path = directory / DRAFTER_CONFIG_FILE
    if not path.is_file():
        raise preflight_error(
            f"{directory} is no checkpoint",
            cause=f"it has no {DRAFTER_CONFIG_FILE}",
            hint="give a step directory below the run's checkpoints",
        )
    try:
        config = DrafterConfig.from_zlab(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as problem:
        raise preflight_error(f"{path} is no JSON", cause=str(problem)) from problem
    return _read_state(directory / DRAFTER_FILE), config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `python -m trainer export`."""
    parser.add_argument("--checkpoint", type=Path, required=True, help="a checkpoint directory of a run")
    parser.add_argument("--output", type=Path, required=True, help="the directory to make")
    parser.add_argument("--untrained", action="store_true", help="the drafter as it was before the run's first step")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="type of the exported tensors")


def run(arguments: argparse.Namespace) -> int:
    """Export as the command line says; return the exit code. Prints the directory, which is the verb's answer."""
    state, config = load_checkpoint(arguments.checkpoint)
    if arguments.untrained:
        trained_with = TrainConfig.from_mapping(read_state(arguments.checkpoint).config, "the checkpoint")
        state = fresh_drafter(trained_with).state_dict()
    export_drafter(state, config, arguments.output, arguments.dtype)
    print(f"{len(state)} tensors, {sum(t.numel() for t in state.values()):,} parameters", file=sys.stderr)
    print(arguments.output.resolve())
    return 0


def _read_state(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as problem:
        raise preflight_error(f"cannot read {path}", cause=str(problem), hint="the file is missing or cut off") from (
            problem
        )


def _check_state(state: Mapping[str, torch.Tensor], config: DrafterConfig) -> None:
    # Shapes only; the 27B drafter's 1.7 billion parameters are not allocated for the comparison.
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in Drafter(config).state_dict().items()}
    wrong = _first_difference(state, expected)
    if wrong:
        raise preflight_error(
            "the state is not that of the configured drafter",
            cause=wrong,
            hint="names carry no prefix; embedding and head are the target's",
        )


def _first_difference(state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size]) -> str:
    for name in sorted(state.keys() | expected.keys()):
        if name not in expected:
            return f"unexpected tensor {name}"
        if name not in state:
            return f"missing tensor {name}"
        if state[name].shape != expected[name]:
            return f"{name} is {list(state[name].shape)}, the configuration says {list(expected[name])}"
    return ""


def _build(config: DrafterConfig, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Drafter:
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()}, strict=True, assign=True)
    return drafter.eval().requires_grad_(False)
