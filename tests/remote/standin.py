"""A trainer without training: locks, pidfiles, events and stop behaviour of the real one, in milliseconds.

The leader forks ranks into sessions of their own, as torch's launcher does; rank 0 writes the events.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import errno
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from remote.protocol import events as ev
from remote.protocol.files import write_json
from remote.protocol.identity import ProcessIdentity, write_pidfile
from remote.protocol.layout import RunLayout
from remote.protocol.locks import LockKind, acquire
from remote.protocol.records import RankError

RUN = RunLayout(Path(os.environ["DFLASH_RUN_DIR"]))
ROLES = ("drafter", "target")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--hang-after", type=int, default=0, help="stand still after this step")
    parser.add_argument("--load", type=float, default=0.0, help="seconds before the first step")
    parser.add_argument("--save", type=float, default=0.0, help="seconds that the checkpoint of a stop takes")
    parser.add_argument("--save-at", type=int, default=0, help="write a checkpoint after this step")
    parser.add_argument("--fail-save", action="store_true", help="the checkpoint of a stop finds the disk full")
    parser.add_argument("--silent", action="store_true", help="never a word")
    parser.add_argument("--crash", action="store_true", help="rank 0 raises before its first step")
    parser.add_argument("--fail-leader", action="store_true", help="the leader raises before any rank lives")
    parser.add_argument("--finish-early", action="store_true", help="end well before the first step")
    parser.add_argument("--ignore-stop", action="store_true")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--grandchild", action="store_true", help="leave a process outside session, group and records")
    parser.add_argument("--alarm", action="store_true", help="raise an alarm at step 2")
    parser.add_argument("--refuse", type=int, default=0, help="a step that is not applied")
    parser.add_argument("--sockets", action="store_true", help="leave a temporary directory behind")
    return parser.parse_args()


def emit(event: ev.Event) -> None:
    # As the real one: a full disk costs the events, not the run.
    with contextlib.suppress(OSError):
        with RUN.events.open("a", encoding="ascii") as file:
            file.write(ev.encode(event) + "\n")
        print(ev.render_line(event), flush=True)


def die_with_parent(leader: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != leader:
        os._exit(1)


def rank_main(rank: int, leader: int, opts: argparse.Namespace) -> None:
    """One rank: lock, session, pidfile; then steps until the end or a stop."""
    acquire(RUN.run_lock, LockKind.SHARED)
    os.setsid()
    die_with_parent(leader)
    write_pidfile(RUN.rank_pid(rank), ProcessIdentity.of())
    try:
        if rank == 0:
            train(opts)
        else:
            while not (RUN.path / "bye").exists():
                time.sleep(0.01)
    except Exception as error:
        write_json(
            RUN.error(rank),
            RankError(
                rank=rank,
                role=ROLES[rank % 2],
                device="cpu",
                phase="loading",
                kind=type(error).__name__,
                message=str(error),
                traceback=traceback.format_exc(),
                time=time.time(),
                hint="mend the model",
            ),
        )
        raise
    RUN.rank_pid(rank).unlink()


def train(opts: argparse.Namespace) -> None:
    emit(
        ev.RunStarted(
            time=time.time(), run_id=RUN.run_id, topology="1 target / 1 drafter", total_steps=opts.steps, first_step=1
        )
    )
    for rank in range(opts.ranks):
        emit(ev.Phase(time=time.time(), rank=rank, role=ROLES[rank % 2], phase="loading"))
    time.sleep(opts.load)
    if opts.crash:
        raise RuntimeError("model.safetensors is torn")
    step = 0
    while step < (0 if opts.finish_early else opts.steps):
        if RUN.stop.exists() and not opts.ignore_stop:
            return finish("stopped", step, save(step, opts.save, opts.fail_save))
        time.sleep(opts.pause)
        step += 1
        if opts.hang_after and step > opts.hang_after:
            time.sleep(600)
        emit(dataclasses.replace(step_event(step, opts.steps), applied=step != opts.refuse))
        if step == opts.save_at:
            measured = ev.HeldOutMeasured(
                time=time.time(), step=step, loss=2.5, accuracy=0.25, accept_len=1.5, seconds=0.0
            )
            emit(measured)
            save(step, 0.0, best=True)
        if step == 2 and opts.alarm:
            emit(ev.AlarmRaised(time=time.time(), alarm="loss_not_positive", message="loss 0.0 on drafter 0", step=2))
    return finish("finished", step, "")


def step_event(step: int, total: int) -> ev.Step:
    return ev.Step(
        time=time.time(),
        step=step,
        total_steps=total,
        epoch=0,
        loss=10.0 / step,
        accuracy=0.1,
        accept_len=1.1,
        lr=1e-4,
        grad_norm=1.0,
        tokens=100,
        tokens_per_second=1000.0,
    )


def save(step: int, seconds: float, fail: bool = False, *, best: bool = False) -> str:
    """Write a checkpoint with progress, as slowly as asked."""
    if fail:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for written in range(1, 11):
        emit(ev.SaveProgress(time=time.time(), step=step, written=written, total=10))
        time.sleep(seconds / 10)
    path = RUN.checkpoints / f"step-{step:06d}"
    path.mkdir(parents=True)
    emit(ev.CheckpointSaved(time=time.time(), step=step, path=str(path), bytes=10, seconds=seconds, best=best))
    return str(path)


def finish(result: str, step: int, checkpoint: str) -> None:
    emit(ev.RunFinished(time=time.time(), result=result, step=step, checkpoint=checkpoint))
    (RUN.path / "bye").touch()


def leave_grandchild() -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 256)
            time.sleep(600)
        os._exit(0)


def lead(opts: argparse.Namespace) -> int:
    """Fork the ranks, wait for them; the first that fails ends them all."""
    if opts.fail_leader:
        raise NameError("name 'bucket_ids' is not defined")
    leader = os.getpid()
    children = set()
    for rank in range(opts.ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank_main(rank, leader, opts)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.add(child)
    failed = False
    while children:
        pid, status = os.wait()
        if pid in children and status != 0:
            failed = True
            # As the launcher does it: some time later, so that the cause is long dead before its peers are.
            time.sleep(0.2)
            for other in children - {pid}:
                os.kill(other, signal.SIGKILL)
        children.discard(pid)
    return 1 if failed else 0


def main() -> int:
    opts = options()
    # The descriptor stays open for the life of the process.
    acquire(RUN.run_lock, LockKind.SHARED)
    if opts.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if opts.silent:
        time.sleep(600)
    if opts.sockets:
        RUN.sockets.write_text(tempfile.mkdtemp(prefix="dflash-"), encoding="utf-8")
    if opts.grandchild:
        leave_grandchild()
    return lead(opts)


if __name__ == "__main__":
    sys.exit(main())
