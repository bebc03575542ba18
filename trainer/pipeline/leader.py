"""`python -m trainer train`: check, decide, reserve, then become torch's launcher. Torch-free, so a typo costs no model load.

The process keeps its pid over the exec, so the pid that the supervisor wrote down is the launcher's, with run.lock still held.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np

from remote.protocol.errors import DflashError, preflight_error
from remote.protocol.files import read_json
from remote.protocol.layout import RunLayout, new_run_id
from trainer import checkpoint_files
from trainer.config import TrainConfig
from trainer.pipeline import names
from trainer.pipeline.caches import cache_environment
from trainer.pipeline.layout import Layout
from trainer.pipeline.membership import file_error, hold_run_lock
from trainer.pipeline.plan import PLAN_VARIABLE, RunPlan
from trainer.pipeline.slots import create_ring_file
from trainer.preflight import SHARED_MEMORY, Prepared, preflight, ring_size
from trainer.target.facts import read_header
from trainer.target.fingerprint import target_fingerprint

RUN_DIR_VARIABLE = "DFLASH_RUN_DIR"
"""Set by the supervisor; without it the run's directory is made inside output_dir."""

LEADER = -1
"""Rank number of the leader's own error record."""

LAUNCHER = "torch.distributed.run"


def run_layout(config: TrainConfig) -> RunLayout:
    """Return where this run keeps its files: as the supervisor says, else in a new directory."""
    if supervised():
        return RunLayout(Path(os.environ[RUN_DIR_VARIABLE]))
    base = Path(config.output_dir or "runs")
    return RunLayout((base / new_run_id()).absolute())


def supervised() -> bool:
    """Whether a supervisor started this process, and with it says where the run lies."""
    return bool(os.environ.get(RUN_DIR_VARIABLE))


def lead(config: TrainConfig) -> NoReturn:
    """Prepare a supervised run and become the launcher. Raises DflashError for what the preflight finds."""
    run = run_layout(config)
    with writable():
        hold_run_lock(run, inheritable=True)
    try:
        plan = prepare(config, run)
        try:
            become_launcher(plan)
        except BaseException:
            plan.forget_names()
            raise
    except Exception as error:
        file_error(run, error, rank=LEADER, role="leader", device="", phase="preflight", time=time.time())
        raise


@contextmanager
def writable() -> Iterator[None]:
    """Raise what cannot be read or written in the block as a preflight error."""
    try:
        yield
    except OSError as error:
        raise preflight_error(
            "the run cannot be prepared",
            cause=f"{error.filename}: {error.strerror}" if error.filename else str(error),
            hint="free space there, or name a directory that can be written with --output-dir",
        ) from error


def prepare(config: TrainConfig, run: RunLayout, *, saves: bool = True) -> RunPlan:
    """Check the configuration, reserve the ring and decide the plan. Raises DflashError; then nothing is left reserved.

    Without `saves` no checkpoint will be written, so no room for one is asked for.
    """
    take_away_leftovers()
    config = config.with_absolute_paths()
    # A directory of its own under output_dir too: a run never writes among another run's checkpoints.
    output_dir = Path(config.output_dir) / run.run_id if config.output_dir else run.checkpoints
    found = preflight(config, output_dir if saves else None)
    target = target_fingerprint(found.facts)
    resume, first_step = resume_point(config, found, target)
    documents = run.path / "documents.npz"
    size, slots = ring_size(config, found.drafter)
    with writable():
        save_documents(documents, config, found)
        sockets, ring_file = reserve(config, run, size * slots)
    return RunPlan(
        run_id=run.run_id,
        run_dir=str(run.path),
        config=config.to_dict(),
        leader_pid=os.getpid(),
        sockets=str(sockets),
        ring_file=ring_file,
        slot_bytes=size,
        slots_per_pair=slots,
        captured_layers=len(found.drafter.target_layer_ids),
        hidden_size=found.drafter.hidden_size,
        documents=str(documents),
        data_fingerprint=found.dataset.fingerprint,
        total_steps=found.total_steps,
        first_step=first_step,
        output_dir=str(output_dir),
        resume=resume,
        target_fingerprint=target,
        held_out_fingerprint=found.held_out.fingerprint if found.held_out else "",
        target_architecture=found.facts.architecture,
    )


def take_away_leftovers() -> None:
    """Remove what killed runs left in shared places, and say so. Before space is counted: a ring takes as much as the next."""
    for path in names.sweep():
        print(f"removed what a dead run had left: {path}", file=sys.stderr, flush=True)


def save_documents(path: Path, config: TrainConfig, found: Prepared) -> None:
    """Write what ranks compute the schedule from: lengths and candidates of both data sets, and the tokens that occur."""
    nothing = np.zeros(0, dtype=np.int64)
    seen = [nothing]
    if config.loss_vocab_extra >= 0:
        # Reads every document: only where the softmax runs over the data's tokens. Held-out labels need their place in it too.
        seen = [dataset.token_ids_seen() for dataset in (found.dataset, found.held_out) if dataset is not None]
    np.savez(
        path,
        lengths=found.dataset.lengths,
        candidates=found.dataset.candidates,
        held_out_lengths=found.held_out.lengths if found.held_out else nothing.astype(np.int32),
        held_out_candidates=found.held_out.candidates if found.held_out else nothing.astype(np.int32),
        token_ids_seen=np.unique(np.concatenate(seen)),
    )


def resume_point(config: TrainConfig, found: Prepared, target: str) -> tuple[str, int]:
    """Return (checkpoint directory, first step to train). Raises a preflight error when it does not fit this run.

    `target`: the target's fingerprint.
    """
    if not config.resume:
        return "", 1
    state = checkpoint_files.read_state(Path(config.resume))
    check_whole(Path(config.resume))
    checkpoint_files.check_resumable(
        state,
        config,
        fingerprint=found.dataset.fingerprint,
        target=target,
        held_out=found.held_out.fingerprint if found.held_out else "",
        total_steps=found.total_steps,
    )
    return str(Path(config.resume).absolute()), state.step + 1


def check_whole(checkpoint: Path) -> None:
    """Raise a preflight error when a file of a checkpoint is damaged or cut off, by its header and its length."""
    try:
        for name in (checkpoint_files.DRAFTER_FILE, checkpoint_files.OPTIMIZER_FILE):
            read_header(checkpoint / name)
        if read_json(checkpoint / checkpoint_files.DRAFTER_CONFIG_FILE) is None:
            raise ValueError("there is no such file")
    except (DflashError, ValueError) as error:
        cause = error.cause if isinstance(error, DflashError) else f"{checkpoint_files.DRAFTER_CONFIG_FILE}: {error}"
        raise preflight_error(
            f"{checkpoint} cannot be resumed from", cause=cause, hint="resume from an earlier checkpoint"
        ) from error


def reserve(config: TrainConfig, run: RunLayout, slots_size: int) -> tuple[Path, str]:
    """Make the sockets' directory and the ring's file, named alike; both or, when there is no room, neither."""
    sockets = names.make_sockets(run)
    try:
        return sockets, reserve_ring(config, sockets.name, slots_size)
    except BaseException:
        sockets.rmdir()
        raise


def reserve_ring(config: TrainConfig, name: str, slots_size: int) -> str:
    """Create the ring's file with its pages reserved; empty with shared roles. Raises a preflight error when there is no room."""
    pairs = len(Layout.of(config).pairs)
    if pairs == 0:
        return ""
    path = SHARED_MEMORY / name
    try:
        create_ring_file(path, slots_size * pairs)
    except OSError as error:
        raise preflight_error(
            "no space left for the ring",
            cause=f"{SHARED_MEMORY}: {error.strerror}, {slots_size * pairs >> 20} MiB are needed",
            hint="lower ring_mib, or free shared memory",
        ) from error
    return str(path)


def launcher_argv(layout: Layout, log_dir: Path, module: str = LAUNCHER) -> list[str]:
    """Return the argv of torch's launcher: one process per device, no restarts, rendezvous on a free loopback port."""
    return [
        sys.executable,
        "-u",
        "-m",
        module,
        "--nnodes=1",
        f"--nproc-per-node={layout.ranks}",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        # Or it leaves an empty /tmp/torchelastic_* behind for every run.
        f"--log-dir={log_dir}",
        "-m",
        "trainer.pipeline.rank",
    ]


def become_launcher(plan: RunPlan, module: str = LAUNCHER) -> NoReturn:
    """Write the plan down and become the launcher. Raises DflashError."""
    path = plan.run.path / "plan.json"
    with writable():
        plan.save(path)
    launch(plan.layout(), path, plan.train_config(), module)


def launch(layout: Layout, plan: Path, config: TrainConfig, module: str = LAUNCHER) -> NoReturn:
    """Become the launcher."""
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // layout.ranks)
    # On a CPU nothing is compiled or tuned.
    caches, warning = cache_environment(plan.parent, os.environ) if config.device == "cuda" else ({}, "")
    if warning:
        print(warning, file=sys.stderr, flush=True)
    environment = {
        **os.environ,
        **caches,
        PLAN_VARIABLE: str(plan),
        "OMP_NUM_THREADS": str(threads),
        # Freed memory of one shape must serve another: fragmentation was one of the story's out-of-memory failures.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10",
        "TOKENIZERS_PARALLELISM": "false",
    }
    argv = launcher_argv(layout, plan.parent / "launcher", module)
    try:
        os.execve(argv[0], argv, environment)
    except OSError as error:
        raise DflashError("cannot execute torch's launcher", cause=f"{argv[0]}: {error.strerror}") from error
