"""Which training configuration a start uses, key by key, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashctl.destinations import Destination
from dflashctl.settings import Settings
from dflashctl.source import Source
from remote.protocol.errors import usage_error
from remote.protocol.records import RunSpec
from trainer.config import (
    PATH_KEYS,
    TrainConfig,
    base_of_paths,
    coerce,
    config_flags,
    load_toml,
    parse_set,
    unknown_key,
)

PRESET_LOCAL = "demo.toml"
PRESET_ELSEWHERE = "qwen3.6-27b-8gpu.toml"


@dataclass(frozen=True)
class Training:
    """A validated configuration, the origin of every key that is not a default, and what it began with: a file or a run."""

    config: TrainConfig
    origins: Mapping[str, str]
    base: str
    base_origin: str


@dataclass(frozen=True)
class Typed:
    """One key as the command line sets it."""

    key: str
    value: Any
    origin: str


def typed_values(flags: Mapping[str, str | None], assignments: Sequence[str]) -> list[Typed]:
    """Return what `--set` and then the flags set, checked. Raises usage errors of trainer.config."""
    typed = [Typed(key, value, f"--set {key}") for key, value in map(parse_set, assignments)]
    given = [(key, text) for key, text in flags.items() if text is not None]
    return typed + [Typed(key, coerce(key, text), f"--{key.replace('_', '-')}") for key, text in given]


def choose_file(settings: Settings, remembered: Destination | None, source: Source) -> tuple[Path, str]:
    """Return the configuration file to begin with and why that one."""
    if (path := settings.path("config")) is not None:
        return path.expanduser().absolute(), settings.values["config"].origin
    if remembered is not None and remembered.config:
        return Path(remembered.config), "the last `start --config` for this destination"
    preset = PRESET_LOCAL if settings.is_here else PRESET_ELSEWHERE
    return source.directory / "templates" / preset, "preset"


def resolve_training(
    settings: Settings,
    remembered: Destination | None,
    source: Source,
    typed: Sequence[Typed],
    run: RunSpec | None = None,
    why: str = "the run that is resumed",
) -> Training:
    """Put `typed` on top of a run's configuration, whose part in it `why` says, else of the file.

    Raises usage errors of trainer.config.
    """
    if run is not None:
        base, base_origin = f"run {run.run_id}", why
        # Which checkpoint that run itself began with is its own past, and a trace is asked for once.
        values = {key: value for key, value in run.config.items() if key not in ("resume", "trace_steps")}
        folder = Path.cwd()
    else:
        path, base_origin = choose_file(settings, remembered, source)
        base, values, folder = str(path), load_toml(path), base_of_paths(path)
    _refuse_unknown(values, base)
    origins = dict.fromkeys(values, base)
    for each in typed:
        values[each.key], origins[each.key] = each.value, each.origin
    if settings.is_here:
        _make_absolute(values, {key: folder for key, origin in origins.items() if origin == base})
    else:
        _refuse_relative(values, origins)
    return Training(TrainConfig.from_mapping(values, "the configuration"), origins, base, base_origin)


def _refuse_unknown(values: Mapping[str, Any], origin: str) -> None:
    # Here and not in from_mapping: there the origin of a single key is no longer known.
    known = {flag.key for flag in config_flags()}
    for key in values:
        if key not in known:
            raise unknown_key(key, origin)


def _make_absolute(values: dict[str, Any], folders: Mapping[str, Path]) -> None:
    """Resolve relative paths, for the trainer runs in its run's directory, not in the shell's.

    `folders` has the base of the keys that were not typed: a file means the same wherever the command is typed.
    """
    for key in PATH_KEYS:
        text = values.get(key)
        if isinstance(text, str) and text:
            values[key] = str(folders.get(key, Path.cwd()) / Path(text).expanduser())


def _refuse_relative(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    for key in PATH_KEYS:
        text = values.get(key)
        if isinstance(text, str) and text and not text.startswith("/"):
            raise usage_error(
                f"{key} = {text!r} is not possible",
                cause=f"{origins[key]} names a relative path, but the trainer runs on another machine",
                hint="write the absolute path it has over there",
            )
