"""`python -m trainer train`: the story's flag names, a TOML file, or the JSON that the agent wrote."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from remote.protocol.codec import loads_object
from remote.protocol.errors import usage_error
from trainer.config import (
    PATH_KEYS,
    TRACE_STEPS,
    TrainConfig,
    base_of_paths,
    coerce,
    config_flags,
    load_toml,
    parse_set,
)
from trainer.pipeline.foreground import attend
from trainer.pipeline.leader import lead, supervised

# Environment variables of the story's script, read here and nowhere else, where the flag is not given.
_STORY_VARIABLES = {"DFLASH_PROFILE_INTERVAL": "profile_interval", "DFLASH_SPLIT_FC_LAYERS": "split_fc"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `train`: the configuration's, and --only-batch."""
    add_config_arguments(parser)
    parser.epilog = (
        "Ctrl-C, or TERM, saves a checkpoint after the step and ends; a second one ends at once, without a checkpoint."
    )
    parser.add_argument(
        "--only-batch",
        type=Path,
        metavar="FILE",
        help="run a batch from a run's bad/ once, without an optimizer step, and show what of it is not finite; keys come "
        "from that run, flags replace them",
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare every key of the configuration, and where else keys come from."""
    parser.usage = "%(prog)s [--config FILE] [flags]"  # forty flags in brackets help nobody
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file of keys; its relative paths lead from it"
    )
    parser.add_argument("--config-json", type=Path, metavar="FILE", help="JSON file of keys, as the agent writes it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set any key")
    parser.add_argument("--grad-accum", type=int, metavar="N", help="micro-batches per step and drafter")
    parser.add_argument("--trace", action="store_true", help=f"trace a few steps: --trace-steps {TRACE_STEPS}")
    for flag in config_flags():
        parser.add_argument(flag.name, dest=flag.key, metavar=flag.metavar, help=flag.help.replace("%", "%%"))


def read_config(arguments: argparse.Namespace) -> TrainConfig:
    """Return the configuration that all sources together give. Raises a usage error."""
    return TrainConfig.from_mapping(read_values(arguments), "the configuration")


def read_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Join the sources: flag, --set, environment of the story, file. Raises a usage error."""
    values: dict[str, Any] = {}
    if arguments.config is not None:
        values.update(_beside(load_toml(arguments.config), arguments.config))
    if arguments.config_json is not None:
        values.update(_load_json(arguments.config_json))
    for variable, key in _STORY_VARIABLES.items():
        if text := os.environ.get(variable):
            text = {"0": "off", "1": "on"}.get(text, text) if key == "split_fc" else text
            values[key] = coerce(key, text, variable)
    values.update(parse_set(assignment) for assignment in arguments.set)
    if arguments.trace:
        values["trace_steps"] = TRACE_STEPS
    for flag in config_flags():
        if (text := getattr(arguments, flag.key)) is not None:
            values[flag.key] = coerce(flag.key, text)
    if arguments.grad_accum is not None:
        drafters = len(values.get("drafter_gpus", TrainConfig().drafter_gpus))
        values["micro_batches_per_step"] = arguments.grad_accum * drafters
    return values


def _beside(values: dict[str, Any], file: Path) -> dict[str, Any]:
    base = base_of_paths(file)
    places = {
        key: str(base / value) for key, value in values.items() if key in PATH_KEYS and isinstance(value, str) and value
    }
    return values | places


def _load_json(path: Path) -> dict[str, Any]:
    try:
        return loads_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise usage_error(
            f"cannot read the configuration {path}", cause=str(error), hint="it must be a JSON object"
        ) from error


def run(arguments: argparse.Namespace) -> int:
    """Train; returns the exit code, or under a supervisor not at all when the launch succeeds. With --only-batch its own."""
    if arguments.only_batch is not None:
        from trainer.pipeline import only_batch  # Imports torch, for which no other use of this verb waits.

        return only_batch.run(arguments.only_batch, read_values(arguments))
    config = read_config(arguments)
    return lead(config) if supervised() else attend(config)
