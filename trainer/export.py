"""From a checkpoint to what serving engines load: `config.json`, `model.safetensors` and a model card."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from remote.protocol.errors import preflight_error
from trainer.checkpoint_files import DRAFTER_CONFIG_FILE, DRAFTER_FILE, STATE_FILE, TrainerState, read_state
from trainer.config import TrainConfig
from trainer.drafter.config import DrafterConfig
from trainer.drafter.fresh import fresh_drafter
from trainer.export_speculators import speculators_config
from trainer.exported import check_state, read_state_file
from trainer.model_card import Card
from trainer.target.facts import HYBRID, read_config
from trainer.target.new_directory import new_directory, told_if_unwritable

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LAYOUTS = ("zlab", "speculators")


def export_drafter(
    state: Mapping[str, torch.Tensor],
    config: DrafterConfig,
    destination: Path,
    dtype: str,
    *,
    served_config: Mapping[str, Any] | None = None,
    card: str = "",
) -> None:
    """Write a drafter's state under its serving names, cast to `dtype`, as a new directory that appears whole.

    `served_config` is what becomes config.json, that of the z-lab layout unless given; `card` becomes README.md.

    Raises:
        DflashError: `destination` exists, or the state would break serving: names or shapes that do not belong to the
            configuration, a non-finite weight, an unknown dtype (code 7).
    """
    if dtype not in DTYPES:
        raise preflight_error(f"unknown dtype {dtype!r}", hint=f"one of {', '.join(DTYPES)}")
    check_state(state, config)
    tensors = {name: tensor.detach().to("cpu", DTYPES[dtype]).contiguous() for name, tensor in state.items()}
    # After the cast: float16 overflows at 65,504, and an engine would serve the infinity.
    overflowed = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if overflowed:
        raise preflight_error(
            "the drafter holds numbers that are not finite",
            cause=f"{overflowed[0]} in {dtype}, and {len(overflowed) - 1} more tensors",
            hint="export an earlier checkpoint, or another dtype",
        )
    with told_if_unwritable(destination), new_directory(destination) as directory:
        text = json.dumps(served_config or config.to_zlab(dtype), indent=2)
        (directory / "config.json").write_text(text + "\n", encoding="utf-8")
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        if card:
            (directory / "README.md").write_text(card, encoding="utf-8")


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
    return read_state_file(directory / DRAFTER_FILE), config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `python -m trainer export`."""
    parser.add_argument("--checkpoint", type=Path, required=True, help="a checkpoint directory of a run")
    parser.add_argument("--output", type=Path, required=True, help="the directory to make")
    parser.add_argument("--untrained", action="store_true", help="the drafter as it was before the run's first step")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="type of the exported tensors")
    layout = "zlab (default): for vLLM and SGLang; speculators: for vLLM, names its target itself"
    parser.add_argument("--layout", choices=LAYOUTS, default="zlab", help=layout)
    target = "hub id or directory that serves the target (default: the one the run was trained with)"
    parser.add_argument("--target-name", default="", help=target)
    parser.add_argument("--drafter-name", default="", help="hub id it will have (default: the directory to make)")


def run(arguments: argparse.Namespace) -> int:
    """Export as the command line says; return the exit code. Prints the directory, which is the verb's answer."""
    state, config = load_checkpoint(arguments.checkpoint)
    trainer_state = read_state(arguments.checkpoint) if (arguments.checkpoint / STATE_FILE).is_file() else None
    if arguments.untrained:
        trained_with = TrainConfig.from_record(read_state(arguments.checkpoint).config, "the checkpoint")
        state = fresh_drafter(trained_with).state_dict()
    target = arguments.target_name or str(trainer_state.config.get("target_model", "") if trainer_state else "")
    if not target:
        raise preflight_error(
            f"{arguments.checkpoint} does not say which target it belongs to",
            cause=f"it has no {STATE_FILE}",
            hint="name the target's hub id or directory with --target-name",
        )
    architectures = _architectures(target, trainer_state)
    served = None
    if arguments.layout == "speculators":
        served = speculators_config(config, arguments.dtype, target, architectures)
    count = sum(tensor.numel() for tensor in state.values())
    card = Card(
        config=config,
        target=target,
        drafter=arguments.drafter_name or str(arguments.output.resolve()),
        layout=arguments.layout,
        dtype=arguments.dtype,
        parameters=count,
        hybrid_target=bool(set(architectures) & set(HYBRID)) if architectures else None,
        state=trainer_state,
        untrained=arguments.untrained,
    )
    export_drafter(state, config, arguments.output, arguments.dtype, served_config=served, card=card.render())
    if not architectures:
        print(f"warning: it is not known here whether {target} is a hybrid; see the card", file=sys.stderr)
    print(f"{len(state)} tensors, {count:,} parameters", file=sys.stderr)
    print(arguments.output.resolve())
    return 0


def _architectures(target: str, state: TrainerState | None) -> tuple[str, ...]:
    """Return what the target's config.json names, if it is here, else what the run noted; nothing where neither says it."""
    noted = state.target_architecture if state else ""
    # Checkpoints of before that note: where the run had its target.
    trained_with = str(state.config.get("target_model", "")) if state and not noted else ""
    for directory in (Path(place) for place in (target, trained_with) if place):
        if (directory / "config.json").is_file():
            return tuple(read_config(directory).get("architectures") or ())
    return (noted,) if noted else ()
