"""Which checkpoints exist, what they say of themselves, and whether a run may go on from one. Torch-free: the leader asks.

<output_dir>/step-00000500/   drafter.safetensors (float32 masters at least), drafter_config.json, optimizer.safetensors,
                              trainer_state.json; complete because the directory was renamed into place
<output_dir>/best -> step-N   that of the lowest held-out loss, if held-out data is measured; in a resumed run it may lie in
                              the directory of the run before
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote.protocol.errors import DflashError, preflight_error
from remote.protocol.files import fsync_directory
from remote.protocol.records import read_record
from trainer.config import TrainConfig
from trainer.target.fingerprint import same_target

STATE_FILE = "trainer_state.json"
DRAFTER_FILE = "drafter.safetensors"
DRAFTER_CONFIG_FILE = "drafter_config.json"
OPTIMIZER_FILE = "optimizer.safetensors"
BEST = "best"
_NAME = re.compile(r"step-([0-9]{8})")

# What decides which numbers a step computes. Layout, threads, transfer mode and intervals may change on resume; these may not.
_BINDING = (
    "mask_token_id", "block_size", "drafter_layers", "captured_layers", "target_layer_ids", "attention", "layer_types",
    "sliding_window", "drafter_heads", "drafter_kv_heads", "drafter_head_dim", "drafter_ffn", "drafter_rope_theta",
    "max_length", "token_budget", "bucket_tokens", "num_anchors", "row_anchors", "noise_std", "seed", "epochs", "max_steps",
    "lr", "warmup_ratio", "weight_decay", "beta1", "beta2", "max_grad_norm", "micro_batches_per_step", "gamma",
    "objective", "dpace_alpha", "kl_weight", "loss_vocab_extra", "dtype",
)  # fmt: skip


@dataclass(frozen=True)
class TrainerState:
    """trainer_state.json: the last step a checkpoint contains, and what it was trained with.

    `best_held_out_loss`: the lowest so far, this checkpoint's included and those of the runs that it was resumed from.
    """

    step: int
    total_steps: int
    data_fingerprint: str
    config: dict[str, Any]
    run_id: str = ""
    loss: float | None = None
    target_fingerprint: str = ""
    held_out_fingerprint: str = ""
    held_out_loss: float | None = None
    best_held_out_loss: float | None = None
    target_architecture: str = ""
    schema: int = 1


def step_directory(output_dir: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint."""
    return output_dir / f"step-{step:08d}"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    if not output_dir.is_dir():
        return []
    found = [path for path in output_dir.iterdir() if _NAME.fullmatch(path.name) and (path / STATE_FILE).is_file()]
    return sorted(found)


def mark_best(output_dir: Path, checkpoint: Path) -> None:
    """Let the link `best` point to a checkpoint; at any moment it points to the old one or to the new one. Raises OSError."""
    link = output_dir / f".{BEST}"
    link.unlink(missing_ok=True)
    # Relative: a directory that is moved as a whole keeps its best. That of the run before lies elsewhere.
    link.symlink_to(checkpoint.name if checkpoint.parent == output_dir else checkpoint.resolve())
    link.rename(output_dir / BEST)
    fsync_directory(output_dir)


def best_before(resumed: Path) -> tuple[Path, float] | None:
    """Return the best checkpoint up to the one that a run goes on from, and its held-out loss; None if none was measured.

    By what the checkpoints say, not by the link alone: a kill between a save and its link left the link behind, and a run
    may go on from a checkpoint that is older than the best.
    """
    last = read_state(resumed).step
    found: dict[Path, float] = {}
    for path in (resumed, resumed.parent / BEST, *list_checkpoints(resumed.parent)):
        try:
            state = read_state(path)
        except DflashError:
            continue  # Removed, or damaged: it can be nobody's best.
        if state.held_out_loss is not None and state.step <= last:
            found[path.resolve()] = state.held_out_loss
    return min(found.items(), key=lambda each: each[1]) if found else None


def rotate(output_dir: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best, and what a killed save or rotation left behind."""
    for leftover in output_dir.glob(".step-*"):
        shutil.rmtree(leftover)
    best = (output_dir / BEST).resolve()
    for path in list_checkpoints(output_dir)[:-keep]:
        if path.resolve() == best:
            continue
        # Renamed first: a kill between its files would leave a directory with a state and without weights, which counts as whole.
        removed = path.with_name(f".{path.name}.old")
        path.rename(removed)
        shutil.rmtree(removed)


def _below(directory: Path) -> list[Path]:
    """Return the complete checkpoints of the runs in a directory, or of one run's, oldest first by when they were saved."""
    places = [*directory.glob("checkpoints"), *directory.glob("*/checkpoints"), *directory.glob("*/")]
    found = [path for place in places for path in list_checkpoints(place)]
    return sorted(found, key=lambda path: (path / STATE_FILE).stat().st_mtime_ns)


def read_state(checkpoint: Path) -> TrainerState:
    """Return what a checkpoint says of itself. Raises a preflight error when it is none."""
    try:
        state = read_record(TrainerState, checkpoint / STATE_FILE)
    except ValueError as error:
        raise preflight_error(
            f"{checkpoint} is no usable checkpoint", cause=str(error), hint="name another one"
        ) from error
    if state is None:
        near = list_checkpoints(checkpoint) or _below(checkpoint) or list_checkpoints(checkpoint.parent)
        hint = f"the newest complete one there is {near[-1]}" if near else "no complete checkpoint lies there"
        raise preflight_error(f"{checkpoint} is no checkpoint", cause=f"there is no {STATE_FILE} in it", hint=hint)
    return state


def check_resumable(
    state: TrainerState, config: TrainConfig, *, fingerprint: str, target: str, held_out: str, total_steps: int
) -> None:
    """Raise a preflight error when a run with this configuration would not continue the checkpoint's run.

    `fingerprint`, `target` and `held_out`: of the training data, of the target model, and of the held-out data ("": none).
    """
    # A key that the checkpoint's version did not know had its default's effect then: new keys must not orphan old checkpoints.
    then, now = TrainConfig().to_dict() | state.config, config.to_dict()
    differences = [f"{key}: {then[key]!r} then, {now[key]!r} now" for key in _BINDING if then[key] != now[key]]
    if state.data_fingerprint != fingerprint:
        differences.append("the training data is another set")
    # It decides the sub-vocabulary with the training data, and the best of two sets cannot be told.
    if state.held_out_fingerprint != held_out:
        differences.append("the held-out data is another set")
    # Checkpoints of before the fingerprint have none.
    if not same_target(state.target_fingerprint, target):
        differences.append("the target is another model")
    if differences:
        raise preflight_error(
            "the checkpoint belongs to another configuration",
            cause="; ".join(differences),
            hint="resume with the configuration it was trained with, or start fresh without --resume",
        )
    if state.step >= total_steps:
        bound = f"max_steps = {config.max_steps}" if total_steps == config.max_steps else f"epochs = {config.epochs}"
        raise preflight_error(
            f"the checkpoint's run is complete at step {state.step}",
            cause=f"the configuration trains {total_steps} steps ({bound})",
            hint=f"export it, or start a fresh run with more than {bound}",
        )
