"""dflashctl's own settings: flag > DFLASHCTL_* > ./dflashctl.toml > user file > remembered destination > default.

The training configuration is another matter (trainer/config.py); `config` here is the path of one.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashctl.destinations import Destination
from dflashctl.transport.pct import is_ct
from remote.protocol.errors import DflashError, usage_error

PROJECT_FILE = "dflashctl.toml"
PREFIX = "DFLASHCTL_"
# Read by dflashctl, but no setting that a file could hold.
_ENVIRONMENT_ONLY = ("HOME",)


@dataclass(frozen=True)
class Setting:
    """One key: its meaning, its default as text, the check of a value (raises ValueError) and whether it is a path."""

    key: str
    help: str
    default: str = ""
    check: Callable[[str], None] = lambda text: None
    is_path: bool = False


def _check_ct(text: str) -> None:
    if text and not is_ct(text):
        raise ValueError("a container id is 100 or more, in digits")


def _check_seconds(text: str) -> None:
    if not 0 < float(text) < 1e7:
        raise ValueError("expected a positive number of seconds")


def _check_host(text: str) -> None:
    # A leading dash would become an option of ssh (-oProxyCommand=...), which runs commands here.
    if not text.isprintable() or text.startswith("-") or any(letter.isspace() for letter in text) or not text:
        raise ValueError("expected a host name, user@host, or local")


def _is_plain(text: str) -> bool:
    # argv of the far end: `pct exec` destroys what is not ASCII when the host's locale is C.
    return text.isascii() and text.isprintable() and not text.startswith("-")


def _check_root(text: str) -> None:
    if not _is_plain(text):
        raise ValueError("expected a directory over there, in ASCII and without a leading dash")
    # It becomes part of the trainer's PYTHONPATH, which is cut at each colon.
    if ":" in text:
        raise ValueError("a colon in its name would cut Python's search path")


def _check_python(text: str) -> None:
    if not _is_plain(text):
        raise ValueError("expected the path of a Python interpreter, in ASCII and without a leading dash")


SETTINGS = {
    setting.key: setting
    for setting in (
        Setting("host", "where runs live: local, or an ssh destination", "local", _check_host),
        Setting("ct", "container id on that host, where there is one", "", _check_ct),
        Setting("ssh_config", "ssh configuration file to use", is_path=True),
        Setting("root", "directory of releases and runs over there; empty: it chooses", check=_check_root),
        Setting("python", "Python interpreter over there; empty: chosen by kind of host", check=_check_python),
        Setting("source", "source tree to deploy; empty: nearest parent directory that is one", is_path=True),
        Setting("config", "training configuration `start` uses; empty: the last one, else a preset", is_path=True),
        Setting("limit", "start: seconds without a sign of progress before it gives up waiting", "600", _check_seconds),
        Setting(
            "grace",
            "stop: seconds without checkpoint progress before it gets rougher; `stop --now` does not wait at all",
            "120",
            _check_seconds,
        ),
    )
}


@dataclass(frozen=True)
class Value:
    """A setting as resolved, and where it came from."""

    text: str
    origin: str


@dataclass(frozen=True)
class Settings:
    """All settings with their origins."""

    values: Mapping[str, Value]

    def __getitem__(self, key: str) -> str:
        return self.values[key].text

    def path(self, key: str) -> Path | None:
        """Return a setting that is a path; None when it is empty."""
        return Path(self[key]) if self[key] else None

    def seconds(self, key: str) -> float:
        """Return a setting that is a time."""
        return float(self[key])

    @property
    def is_here(self) -> bool:
        """Whether runs live in this machine's own file system: no host and no container between."""
        return self["host"] == "local" and not self["ct"]

    def is_given(self, key: str) -> bool:
        """Whether somebody set the key, rather than its default."""
        return self.values[key].origin != "default"


def unknown_setting(key: str, origin: str, known: list[str]) -> DflashError:
    """Return the usage error for a key that is no setting, with the nearest one that is."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return usage_error(f"unknown key {key!r}", cause=f"{origin} sets it, but no such setting exists", hint=hint)


def resolve(
    flags: Mapping[str, str | None], environment: Mapping[str, str], project: Path | None, user: Path
) -> Settings:
    """Put all layers but the remembered destination together; a None flag was not given.

    Raises a usage error for an unknown key, or a value that breaks its rule, naming where it stands.
    """
    layers = [
        {key: Value(text, f"--{key.replace('_', '-')}") for key, text in flags.items() if text is not None},
        _environment_layer(environment),
        {} if project is None else _file_layer(project),
        _file_layer(user) if user.is_file() else {},
    ]
    found: dict[str, Value] = {key: Value(setting.default, "default") for key, setting in SETTINGS.items()}
    # The weakest first, so that each stronger layer overwrites it.
    for layer in reversed(layers):
        found.update(layer)
    _check_all(found)
    return Settings(found)


def with_destination(settings: Settings, remembered: Destination | None) -> Settings:
    """Fill what nobody set from the remembered destination, unless another one was asked for."""
    if remembered is None:
        return settings
    asked = settings.is_given("host") or settings.is_given("ct")
    if asked and (settings["host"], settings["ct"]) != (remembered.host, remembered.ct):
        return settings
    # Above the defaults, below everything that somebody wrote down.
    filled = dict(settings.values)
    for key in ("host", "ct", "root", "python", "ssh_config"):
        text = getattr(remembered, key)
        if text and not settings.is_given(key):
            filled[key] = Value(text, "remembered by the last deploy")
    return Settings(filled)


def find_project_file(start: Path) -> Path | None:
    """Return dflashctl.toml of the nearest parent directory of `start` that has one."""
    for directory in (start, *start.parents):
        if (directory / PROJECT_FILE).is_file():
            return directory / PROJECT_FILE
    return None


def _environment_layer(environment: Mapping[str, str]) -> dict[str, Value]:
    layer: dict[str, Value] = {}
    known = [PREFIX + key.upper() for key in SETTINGS]
    for name, text in environment.items():
        if not name.startswith(PREFIX) or name.removeprefix(PREFIX) in _ENVIRONMENT_ONLY:
            continue
        if name not in known:
            raise unknown_setting(name, "the environment", known)
        # `DFLASHCTL_CT= dflashctl ...` unsets, as shells have it.
        if text:
            layer[name.removeprefix(PREFIX).lower()] = Value(text, name)
    return layer


def _file_layer(path: Path) -> dict[str, Value]:
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise usage_error(
            f"cannot read {path}", cause=str(error), hint="it must be TOML, one `key = value` a line"
        ) from error
    layer: dict[str, Value] = {}
    for key, value in data.items():
        if key not in SETTINGS:
            raise unknown_setting(key, str(path), list(SETTINGS))
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise usage_error(f"{key} = {value!r} is not possible", cause=f"expected text or a number, in {path}")
        # A path in a file means a place beside that file, wherever the command is typed.
        text = str(path.parent / Path(str(value)).expanduser()) if SETTINGS[key].is_path and value else str(value)
        layer[key] = Value(text, str(path))
    return layer


def _check_all(values: Mapping[str, Value]) -> None:
    for key, value in values.items():
        try:
            SETTINGS[key].check(value.text)
        except ValueError as error:
            raise usage_error(
                f"{key} = {value.text!r} is not possible",
                cause=f"{error}, from {value.origin}",
                hint=SETTINGS[key].help,
            ) from None
