"""`python -m trainer preflight`: everything `train` would refuse, found before anything is launched or stopped."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from remote.protocol.codec import dumps
from trainer.checkpoint_files import TrainerState, check_resumable
from trainer.pipeline import command
from trainer.pipeline.layout import Layout
from trainer.pipeline.leader import resume_point, take_away_leftovers
from trainer.pipeline.plan import RunPlan
from trainer.preflight import Prepared, parameter_count, preflight
from trainer.target.fingerprint import target_fingerprint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `train`, and --json."""
    command.add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as one line of JSON")
    parser.add_argument("--skip-devices", action="store_true", help="do not look at the GPUs")
    parser.add_argument(
        "--freed-shm", type=int, default=0, metavar="BYTES", help="what a run that ends before gives back of /dev/shm"
    )
    parser.add_argument(
        "--continues", metavar="PLAN", help="plan.json of a run: could its next checkpoint be resumed from?"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check; prints what a run would be. Raises one DflashError (2 or 7) for all that is wrong."""
    config = command.read_config(arguments)
    # As the run will: else the ring of a killed one would be refused as space that is not there.
    take_away_leftovers()
    found = preflight(
        config,
        Path(config.output_dir or ".").absolute(),
        devices=not arguments.skip_devices,
        freed_shm=arguments.freed_shm,
    )
    resume, first_step = resume_point(config, found, target_fingerprint(found.facts))
    if arguments.continues:
        check_continues(RunPlan.load(Path(arguments.continues)), found)
    findings = {
        "documents": len(found.dataset),
        "tokens": int(found.dataset.lengths.sum()),
        "steps": found.total_steps,
        "first_step": first_step,
        "resume": resume,
        "drafter_parameters": parameter_count(found.drafter),
        "target_layer_ids": found.drafter.target_layer_ids,
        "layer_types": [kind.removesuffix("_attention") for kind in found.drafter.layer_types],
        # Better learnt before six epochs than at the export.
        "served_by": "SGLang, vLLM"
        if len(set(found.drafter.layer_types)) == 1
        else "SGLang; vLLM 0.32 refuses a mixture",
        "topology": Layout.of(config).describe(),
    }
    if found.held_out is not None:
        # Learnt by heart, they would tell nothing of other text, and the best checkpoint would be the last one.
        findings["held_out"] = (
            f"{len(found.held_out)} documents, {found.dataset.common(found.held_out)} also trained on"
        )
    if arguments.json:
        print(dumps(findings))
    else:
        for name, value in findings.items():
            print(f"{name:<20} {value}")
    return 0


def check_continues(plan: RunPlan, found: Prepared) -> None:
    """Raise a preflight error when a checkpoint that the run of `plan` will write could not be resumed from."""
    state = TrainerState(plan.first_step, plan.total_steps, plan.data_fingerprint, plan.config, plan.run_id)
    state = dataclasses.replace(
        state, target_fingerprint=plan.target_fingerprint, held_out_fingerprint=plan.held_out_fingerprint
    )
    check_resumable(
        state,
        found.config,
        fingerprint=found.dataset.fingerprint,
        target=target_fingerprint(found.facts),
        held_out=found.held_out.fingerprint if found.held_out else "",
        total_steps=found.total_steps,
    )
