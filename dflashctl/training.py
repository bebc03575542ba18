"""Which training configuration a start uses, key by key, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashctl.destinations import Destination
from dflashctl.settings import Settings
from dflashctl.source import Source, is_source
from remote.protocol.errors import usage_error
from trainer.config import TrainConfig, coerce, config_flags, load_toml, parse_set, unknown_key

PRESET_LOCAL = "demo.toml"
PRESET_ELSEWHERE = "qwen3.6-27b-8gpu.toml"
_PATHS = ("target_model", "data_dir", "output_dir", "resume")


@dataclass(frozen=True)
class Training:
    """A validated configuration, the origin of every key that is not a default, and the file it began with."""

    config: TrainConfig
    origins: Mapping[str, str]
    file: Path
    file_origin: str


def choose_file(settings: Settings, remembered: Destination | None, source: Source) -> tuple[Path, str]:
    """Return the configuration file to begin with and why that one."""
    if (path := settings.path("config")) is not None:
        return path.expanduser().absolute(), settings.values["config"].origin
    if remembered is not None and remembered.config:
        return Path(remembered.config), "the last `start --config` for this destination"
    preset = PRESET_LOCAL if settings["host"] == "local" else PRESET_ELSEWHERE
    return source.directory / "templates" / preset, "preset"


def resolve_training(
    settings: Settings,
    remembered: Destination | None,
    source: Source,
    flags: Mapping[str, str | None],
    assignments: Sequence[str],
) -> Training:
    """Put file, `--set` and flags together, the later ones on top. Raises usage errors of trainer.config."""
    # The command line first: what is wrong with it is said even where the file is missing.
    typed = [(key, value, f"--set {key}") for key, value in map(parse_set, assignments)]
    typed += [(key, coerce(key, text), f"--{key.replace('_', '-')}") for key, text in flags.items() if text is not None]
    path, file_origin = choose_file(settings, remembered, source)
    values, origins = _file_values(path)
    for key, value, origin in typed:
        values[key], origins[key] = value, origin
    if settings["host"] == "local":
        _make_absolute(values, origins, path)
    else:
        _refuse_relative(values, origins)
    config = TrainConfig.from_mapping(values, "the configuration")
    return Training(config, origins, path, file_origin)


def _file_values(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    values = load_toml(path)
    # Here and not in from_mapping: there the origin of a single key is no longer known.
    known = {flag.key for flag in config_flags()}
    for key in values:
        if key not in known:
            raise unknown_key(key, str(path))
    return values, dict.fromkeys(values, str(path))


def _make_absolute(values: dict[str, Any], origins: Mapping[str, str], file: Path) -> None:
    """Resolve relative paths, for the trainer runs in its run's directory, not in the shell's.

    In a file they mean a place beside it, wherever the command is typed; in a template, a place in the tree it belongs to.
    """
    tree = file.parent.parent
    base = tree if file.parent.name == "templates" and is_source(tree) else file.parent
    for key in _PATHS:
        text = values.get(key)
        if isinstance(text, str) and text:
            from_file = origins[key] == str(file)
            values[key] = str((base if from_file else Path.cwd()) / Path(text).expanduser())


def _refuse_relative(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    for key in _PATHS:
        text = values.get(key)
        if isinstance(text, str) and text and not text.startswith("/"):
            raise usage_error(
                f"{key} = {text!r} is not possible",
                cause=f"{origins[key]} names a relative path, but the trainer runs on another machine",
                hint="write the absolute path it has over there",
            )
