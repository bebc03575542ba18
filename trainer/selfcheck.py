"""`python -m trainer selfcheck`: would this release run here? Before it is used, not after a long model load.

Every module is compiled and imported, every global name that a function uses must exist, and the whole pipeline trains two steps of
a toy on the CPU. It caught the story's `bucket_ids`, which was met only after the model had been loaded.
"""

from __future__ import annotations

import argparse
import builtins
import dis
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType

import remote.protocol
import trainer
from remote.protocol import events as ev
from remote.protocol.codec import dumps
from remote.protocol.errors import DflashError, preflight_error
from remote.protocol.layout import RunLayout
from remote.protocol.records import RankError, read_record
from trainer import toy

_TRAIN_SECONDS = 180.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--json", action="store_true", help="print phases and findings as lines of JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check; returns 0. Raises a preflight error (7) for what would not run."""
    report = _print_json if arguments.json else _print_text
    report("selfcheck", "imports")
    modules = list(import_all())
    missing = [name for module in modules for name in undefined_names(module)]
    if missing:
        raise preflight_error(
            f"{len(missing)} undefined name{'s' if len(missing) > 1 else ''}",
            cause="; ".join(missing[:5]),
            hint="mend it and deploy again",
        )
    report("selfcheck", "two training steps of a toy")
    start = time.monotonic()
    loss = train_toy()
    seconds = time.monotonic() - start
    if arguments.json:
        print(dumps({"ok": True, "modules": len(modules), "loss": loss, "seconds": seconds}))
    else:
        print(f"{len(modules)} modules, toy loss {loss:.4f}, {seconds:.1f} s")
    return 0


def _print_json(phase: str, detail: str) -> None:
    print(ev.encode(ev.Phase(time=time.time(), role="leader", phase=phase, detail=detail)), flush=True)


def _print_text(phase: str, detail: str) -> None:
    print(f"{phase}: {detail}", flush=True)


def import_all() -> Iterator[ModuleType]:
    """Import and yield every module of trainer and remote.protocol. Raises a preflight error for one that does not import."""
    for package in (trainer, remote.protocol):
        yield package
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            try:
                yield importlib.import_module(found.name)
            except Exception as error:
                raise preflight_error(
                    f"{found.name} cannot be imported",
                    cause=f"{type(error).__name__}: {error}",
                    hint="mend it and deploy again",
                ) from error


def undefined_names(module: ModuleType) -> list[str]:
    """Return 'file:line name' of every global that the module's code loads and neither the module nor Python defines."""
    if module.__file__ is None:
        return []
    source = Path(module.__file__).read_text(encoding="utf-8")
    known = set(vars(module)) | set(vars(builtins))
    code = compile(source, module.__file__, "exec")
    return [f"{Path(module.__file__).name}:{line} {name}" for name, line in _globals_loaded(code) if name not in known]


def _globals_loaded(code: CodeType) -> Iterator[tuple[str, int]]:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno or line if instruction.positions else line
        if instruction.opname == "LOAD_GLOBAL":
            yield str(instruction.argval), line
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_loaded(constant)


def train_toy() -> float:
    """Train two steps with one target and one drafter process; returns the last loss. Raises a preflight error."""
    with tempfile.TemporaryDirectory(prefix="dflash-selfcheck-") as directory:
        base = Path(directory)
        toy.make_toy_target(base / "target")
        toy.make_toy_data(base / "data.jsonl")
        (base / "config.json").write_text(
            json.dumps(toy.toy_config(base / "target", base / "data.jsonl")), encoding="ascii"
        )
        run_dir = base / "run"
        command = [sys.executable, "-m", "trainer", "train", "--config-json", str(base / "config.json")]
        environment = {**os.environ, "DFLASH_RUN_DIR": str(run_dir), "CUDA_VISIBLE_DEVICES": ""}
        try:
            done = subprocess.run(  # noqa: PLW1510  the exit code is judged below, with the events
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TRAIN_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise preflight_error(
                "the toy did not train", cause=f"no end after {_TRAIN_SECONDS:.0f} s", hint="look at the machine's load"
            ) from error
        losses = [event.loss for event in _events(run_dir) if isinstance(event, ev.Step)]
        if done.returncode != 0 or len(losses) != 2:
            raise _not_trained(RunLayout(run_dir), done.stdout + done.stderr)
        return losses[-1]


def _events(run_dir: Path) -> list[ev.Event]:
    file = run_dir / "events.jsonl"
    return list(ev.read_events(file.read_bytes())) if file.exists() else []


def _not_trained(run: RunLayout, output: str) -> DflashError:
    """Return the error that names what went wrong first, for the others only lost their peer."""
    records = [read_record(RankError, path) for path in run.error(0).parent.glob("rank-*.json")]
    first = min((record for record in records if record is not None), key=lambda record: record.time, default=None)
    if first is None:
        # torch adds its C++ stack, which pushes what happened out of sight.
        lines = [line for line in output.splitlines() if line.strip() and not line.startswith("frame #")]
        return preflight_error(
            "the toy did not train",
            cause=lines[-1] if lines else "it said nothing",
            hint="mend it and deploy again",
            detail="\n".join(lines)[-4000:],
        )
    return preflight_error(
        f"the toy did not train: the {first.role} failed in {first.phase}",
        cause=f"{first.kind}: {first.message}",
        hint="mend it and deploy again",
        detail=first.traceback,
    )
