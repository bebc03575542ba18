"""The line of doctor about the interpreter: its version, the packages that train, and how to get what is missing."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from remote.agent.environment import home
from remote.agent.finding import FAILED, OK, WARNING, Finding
from remote.agent.interpreters import Interpreter
from remote.protocol.errors import DflashError, preflight_error

OLDEST = (3, 11)
NEEDED = {
    "torch": ">=2.11,<2.14",
    "transformers": ">=5.15,<6",
    "safetensors": ">=0.5,<1",
    "numpy": ">=2,<3",
}
"""What every run imports, with the ranges of pyproject.toml, which does not travel with a release."""

KERNELS = {"flash-linear-attention": ">=0.6,<0.7"}
"""For a GPU alone: on a CPU transformers would pick its kernels and fail."""

_SHOWN = {"torch": "torch", "transformers": "transformers", "flash-linear-attention": "fla"}
_BOUND = re.compile(r"(>=|<)([0-9.]+)")
_NUMBERS = re.compile(r"[0-9]{1,9}")


def python_finding(found: Interpreter, device: str) -> Finding:
    """Return the line for a run on `device` ("cuda", "cpu" or "" where no configuration is known)."""
    if numbers(found.python)[:2] < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        text = f"{found.python} at {found.path} is too old"
        return Finding("python", FAILED, text, f"name a Python {wanted} or newer with --python PATH")
    text = ", ".join([found.python, *_packages(found), f"at {found.path}"])
    ranges = NEEDED | (KERNELS if device == "cuda" else {})
    missing = [name for name in ranges if name not in found.versions]
    odd = [name for name in ranges if name not in missing and not within(found.versions[name], ranges[name])]
    install = _install(found, ranges, [*missing, *odd])
    if missing:
        # Without the kernels a plain target trains as ever, a hybrid one on transformers' loops, many times slower.
        state = WARNING if set(missing) <= KERNELS.keys() else FAILED
        return Finding("python", state, f"{text}; no {', '.join(missing)}", install)
    if odd:
        return Finding("python", WARNING, f"{text}; untested: {', '.join(odd)}", install)
    if device == "cpu" and (kernels := KERNELS.keys() & found.versions.keys()):
        name = ", ".join(kernels)
        hint = f"{shlex.quote(found.path)} -m pip uninstall {name}"
        return Finding("python", WARNING, f"{text}; {name} breaks hybrid targets on a CPU", hint)
    return Finding("python", OK, text)


def lacking(found: Interpreter) -> DflashError | None:
    """Return the preflight error for an interpreter without something that every run imports, None for a complete one."""
    missing = [name for name in NEEDED if name not in found.versions]
    if not missing:
        return None
    return preflight_error(
        f"{found.path} lacks {', '.join(missing)}",
        cause=f"Python {found.python} there is fine, but the trainer imports what it does not have",
        hint=f"over there: {_install(found, NEEDED, missing)}",
    )


def _packages(found: Interpreter) -> list[str]:
    """Return the packages that a reader looks for, each with its place where that is not the interpreter's own tree."""
    home = Path(found.path).parent.parent
    shown: list[str] = []
    for name, short in _SHOWN.items():
        place = found.where.get(name, "")
        if name in found.versions:
            elsewhere = f" in {place}" if place and not Path(place).is_relative_to(home) else ""
            shown.append(f"{short} {found.versions[name]}{elsewhere}")
    return shown


def _install(found: Interpreter, ranges: Mapping[str, str], names: Sequence[str]) -> str:
    wanted = " ".join(shlex.quote(f"{name}{ranges[name]}") for name in names)
    python = shlex.quote(found.path)
    if not found.managed:
        return f"{python} -m pip install {wanted}"
    # Debian's own interpreter: pip refuses, and forcing it would break the system's packages.
    place = "/opt/dflash-venv" if os.geteuid() == 0 else str(home() / "dflash-venv")
    return (
        f"{python} -m venv {place} && {place}/bin/pip install {wanted}, then pass --python {Path(place, 'bin/python')}"
    )


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) for 2.13.0+cpu; () where it has none."""
    found: list[int] = []
    for part in version.split("."):
        match = _NUMBERS.match(part)
        if match is None:
            break
        found.append(int(match[0]))
    return tuple(found)


def within(version: str, bounds: str) -> bool:
    """Whether `version` lies in `bounds`, e.g. ">=2.11,<2.14". A version without a number is nobody's business."""
    ours = numbers(version)
    if not ours:
        return True
    for operator, text in _BOUND.findall(bounds):
        below = ours < numbers(text)
        if below != (operator == "<"):
            return False
    return True
