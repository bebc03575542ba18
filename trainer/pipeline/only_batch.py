"""`train --only-batch FILE`: a batch of a refused step once more, without an optimizer step: what is not finite, where first.

It goes through the very code of a run with shared roles, on the first target's device; its states are made anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from remote.protocol import events as ev
from remote.protocol.errors import ExitCode, usage_error
from remote.protocol.layout import RunLayout, new_run_id
from trainer.checkpoint_files import DRAFTER_FILE
from trainer.config import TrainConfig
from trainer.data.rows import Row
from trainer.data.schedule import MicroBatch
from trainer.drafter.blocks import Run, document_runs
from trainer.pipeline import leader, roles
from trainer.pipeline.bad_batch import BadBatch
from trainer.pipeline.layout import Role
from trainer.pipeline.packed import RowTokens
from trainer.pipeline.post import take_post
from trainer.pipeline.session import DrafterSession
from trainer.pipeline.target_side import Producer, SharedReceiver
from trainer.pipeline.watch import Watch
from trainer.pipeline.world import World
from trainer.telemetry import PhaseLog

_SHOWN = 12
_SEEN = {
    "states": "states that were not finite when they were packed",
    "copy": "states that were finite when they were packed, and not on the drafter",
    "loss": "a loss that is not finite, of finite states",
    "gradient": "a gradient that is not finite, of finite losses",
    "": "nothing that is not finite",
}


def run(file: Path, changes: Mapping[str, Any]) -> int:
    """Run the batch and print what is not finite; returns 1 when something is, 0 when nothing is.

    `changes`: keys that replace those of the run's configuration. Raises DflashError when the file or the model cannot be read.
    """
    bad = BadBatch.load(file)
    row = bad.row
    runs = document_runs(row.document_ids.numpy())
    print(f"batch {row.batch} of step {row.step}, epoch {row.epoch}: {len(runs)} documents, {row.tokens} tokens")
    print(f"the run saw   {_SEEN[bad.seen]} (target {bad.target})")
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="dflash-") as scratch, _session(bad, changes, Path(scratch)) as parts:
        producer, session = parts
        _load_weights(session, file.parent / DRAFTER_FILE)
        here = _pass_once(bad, runs, producer, session, watch)
    print(f"here there is {_SEEN[here]}{_compared(bad.seen, here)}")
    for number, finding in enumerate(watch.findings[:_SHOWN], 1):
        print(f"{number:>3}. {finding}")
    if len(watch.findings) > _SHOWN:
        print(f"     and {len(watch.findings) - _SHOWN} more")
    return ExitCode.FAILED if watch.findings else ExitCode.OK


def _compared(seen: str, here: str) -> str:
    if here == seen:
        return ", as in the run"
    if here:
        return ""
    # The same tokens through the same weights gave finite numbers: what differed was how they travelled, or the device.
    return ": look at the way that the states took (--verify-copies all), at the other batches of the step, and at the device"


class _Nobody:
    """Telemetry of a batch that belongs to no run."""

    def emit(self, event: ev.Event) -> None:
        return

    def close(self) -> None:
        return


@contextlib.contextmanager
def _session(bad: BadBatch, changes: Mapping[str, Any], scratch: Path) -> Iterator[tuple[Producer, DrafterSession]]:
    """Yield target and drafter of a run of one rank whose data set is the batch."""
    documents = scratch / "documents.jsonl"
    documents.write_text("".join(json.dumps(each) + "\n" for each in _documents(bad.row)), encoding="ascii")
    values = bad.config | dict(changes)
    device = values["target_gpus"][:1]
    values |= {
        "target_gpus": device,
        "drafter_gpus": device,
        "data_dir": str(documents),
        "held_out_dir": "",
        "output_dir": "",
        "resume": "",
        # The weights that the batch met lie beside it.
        "init_from_drafter": "",
    }
    layout = RunLayout(scratch / new_run_id())
    layout.create()
    plan = leader.prepare(TrainConfig.from_record(values, "the batch's configuration"), layout, saves=False)
    try:
        world = World(rank=0, local_rank=0, machine=0, machines=1, drafters=None, drafter_count=1)
        with take_post(plan, world, _Nobody(), PhaseLog(_Nobody(), role=Role.SHARED, rank=0)) as post:
            # The softmax over a sub-vocabulary is that of the run's data, not of this batch.
            post = dataclasses.replace(post, token_ids_seen=bad.token_ids_seen.numpy())
            producer = roles.load_producer(post)
            yield producer, roles.make_session(post, producer, *roles.build_drafter(post, producer))
    finally:
        plan.forget_names()


def _documents(row: RowTokens) -> Iterator[dict[str, list[int]]]:
    for start, end, _ in document_runs(row.document_ids.numpy()):
        yield {"input_ids": row.input_ids[start:end].tolist(), "loss_mask": row.loss_mask[start:end].tolist()}


def _load_weights(session: DrafterSession, file: Path) -> None:
    if not file.exists():
        print(f"the drafter   is a fresh one: there is no {file}")
        return
    try:
        session.drafter.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise usage_error(
            f"{file} is not the drafter of this batch", cause=str(error), hint="copy the whole step-N directory again"
        ) from error


def _pass_once(bad: BadBatch, runs: list[Run], producer: Producer, session: DrafterSession, watch: Watch) -> str:
    """Make the states, draft, backpropagate; returns what is not finite, in the words of a run."""
    row = bad.row
    micro_batch = MicroBatch(row.batch, row.step, row.epoch, Row(tuple(range(len(runs))), row.tokens), 0, 0, 0)
    read = producer.read(micro_batch)
    assert isinstance(session.receiver, SharedReceiver)
    with watch.target(producer.target.stack, read.lengths, [run.document_id for run in runs]):
        made = session.receiver.make(read)
    # Tokens and document ids of the file: anchors and noise are drawn by the ids in the run's data set.
    packed = dataclasses.replace(made, row=row)
    watch.states(packed)
    watch.look_at_weights("drafter", session.drafter)
    if float(packed.verdict()):
        return "states"
    with watch.modules("drafter", session.drafter):
        sums = session.backward(packed, last=True)
    loss = sums.loss_sum.detach()
    if not bool(torch.isfinite(loss)):
        watch.look("head of the target", session.ends.head)
        watch.look("loss", loss)
        return "loss"
    gradients = {name: each.grad for name, each in session.drafter.named_parameters() if each.grad is not None}
    for name, gradient in gradients.items():
        watch.look(f"gradient of drafter {name}", gradient)
    norm = nn.utils.get_total_norm(list(gradients.values())) / sums.weight_sum
    watch.look("gradient norm", norm)
    print(f"loss {float(loss / sums.weight_sum):.6g}, gradient norm {float(norm):.6g}")
    return "" if bool(torch.isfinite(norm)) else "gradient"
