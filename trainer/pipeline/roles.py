"""The two roles of a rank: load, pass the barrier that ends warm-up, work, finish."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from remote.protocol import events as ev
from remote.protocol.errors import preflight_error
from trainer import checkpoint
from trainer.config import TrainConfig
from trainer.data.documents import open_dataset
from trainer.data.rows import padding_share
from trainer.data.schedule import MicroBatch
from trainer.drafter.attention_choice import DENSE, Backend, Choice, agree, choose, wants_flex
from trainer.drafter.fresh import empty_drafter, fresh_drafter
from trainer.drafter.model import Drafter
from trainer.drafter.objective import make_vocab_subset
from trainer.optimizer import StepOptimizer
from trainer.pipeline.figures import DeferredFigures
from trainer.pipeline.handover import Receiver, Sender
from trainer.pipeline.layout import Role
from trainer.pipeline.loading import LoadProgress
from trainer.pipeline.packed import PackBuffer
from trainer.pipeline.plan import RunPlan
from trainer.pipeline.post import DTYPES, Joint, Post, take_post
from trainer.pipeline.pulse import Pulse
from trainer.pipeline.reader import RowReader
from trainer.pipeline.receiver import Arrival, Fetcher, PrefetchReceiver, SyncReceiver
from trainer.pipeline.reporting import Desk, PipelineProfiler, Reporter
from trainer.pipeline.sender import AsyncSender, Publisher, SyncSender
from trainer.pipeline.session import DrafterSession, Ends
from trainer.pipeline.startup import OTHERS
from trainer.pipeline.target_side import Producer, SharedReceiver, produce
from trainer.pipeline.warm_up import WarmUp
from trainer.pipeline.world import join_world
from trainer.preflight import drafter_config
from trainer.target.ends import load_ends
from trainer.target.facts import target_facts
from trainer.target.load import load_final_norm, load_target
from trainer.telemetry import EventWriter, PhaseLog, Telemetry
from trainer.train import TrainResult, train

# Pack buffers of a target, device buffers of a drafter: one in use, one being copied.
_BUFFERS = 2


def run(plan: RunPlan, role: Role, telemetry: Telemetry, phases: PhaseLog, pulse: Pulse) -> None:
    """Play a role to its end. Raises whatever goes wrong; the caller files it."""
    layout = plan.layout()
    if layout.device == "cuda" and not torch.cuda.is_available():
        raise preflight_error(
            "there is no usable GPU",
            cause="torch.cuda.is_available() is False on this machine",
            hint="check the driver and the container's devices, or train on the CPU with --device cpu",
        )
    with contextlib.ExitStack() as stack:
        with phases.phase("loading", OTHERS):
            limit = collective_limit(plan.train_config())
            world = stack.enter_context(join_world(layout, timeout=limit, pulse=pulse))
            post = stack.enter_context(take_post(plan, world, telemetry, phases))
        if role is Role.TARGET:
            run_target(post)
        else:
            run_drafter(post)


def collective_limit(config: TrainConfig) -> float:
    """Return the seconds after which a collective gives up. NCCL aborts the process without a word: the watchdogs come first."""
    return max(config.collective_timeout, 2.5 * config.stall_timeout)


def load_producer(post: Post) -> Producer:
    """Load the target and open the data."""
    config = post.config
    with post.phases.phase("loading", f"target {config.target_model} on {post.device}"):
        facts = target_facts(Path(config.target_model))
        layer_ids = drafter_config(config, facts).target_layer_ids
        target = load_target(
            Path(config.target_model),
            dtype=post.dtype,
            device=post.device,
            target_layer_ids=layer_ids,
            last_output=config.distils,
            progress=LoadProgress(f"target on {post.device}", post.world.pulse, lambda text: _say(post, "info", text)),
        )
        dataset = open_dataset(Path(config.data_dir), max_length=config.max_length, vocab_size=facts.vocab_size)
        return Producer(
            target,
            RowReader(dataset, config.bucket_tokens),
            post.clock,
            device=post.device,
            verify_copies=config.verify_copies,
            held_out=held_out_reader(config, facts.vocab_size),
        )


def held_out_reader(config: TrainConfig, vocab_size: int) -> RowReader | None:
    """Return the reader of the held-out data, None where there is none."""
    if not config.held_out_dir:
        return None
    dataset = open_dataset(Path(config.held_out_dir), max_length=config.max_length, vocab_size=vocab_size)
    return RowReader(dataset, config.bucket_tokens)


def run_target(post: Post) -> None:
    """Produce states until the data ends or the drafters say goodbye."""
    producer = None if post.plan.run.stop.exists() else load_producer(post)
    buffers: list[PackBuffer] = []
    if producer is not None:
        with post.phases.phase("warmup", f"target on {post.device}"):
            buffers = device_buffers(post)
            warm_up = WarmUp(post)
            warm_up.target(producer, buffers)
            post.phases.detail = warm_up.finish()
    if post.end_of_warm_up() or producer is None:
        return
    assert post.joint is not None
    machine, plan = post.world.machine, post.plan
    training = until(post.schedule.for_target(machine, post.index, first_step=plan.first_step), post.plan.total_steps)
    batches = post.held_out.join(training, plan.first_step, machine, target=post.index)
    with post.phases.phase("training"):
        sender = make_sender(post, post.joint, buffers)
        produce(producer, post.trace.following(batches), sender, post.copier, post.clock, post.timer)
        post.trace.close()


def until(batches: Iterator[MicroBatch], last_step: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches up to a step."""
    for micro_batch in batches:
        if micro_batch.step > last_step:
            return
        yield micro_batch


def device_buffers(post: Post) -> list[PackBuffer]:
    """Allocate what states are packed in, or copied to: one buffer where nothing is copied beside its use."""
    return post.buffers(1 if post.joint is None or post.config.transfer == "sync" else _BUFFERS)


def make_sender(post: Post, joint: Joint, buffers: list[PackBuffer]) -> Sender:
    """Return the target's end of the ring in the configured mode."""
    publisher = Publisher(joint.ring, post.copier, post.clock, pairs=joint.pairs, channels=joint.channels)
    shape = {"layers": post.plan.packed_layers, "hidden": post.plan.hidden_size}
    if post.config.transfer == "sync":
        return SyncSender(publisher, buffers[0], **shape)
    return AsyncSender(publisher, buffers, **shape)


def make_receiver(post: Post, producer: Producer | None, reporter: Reporter, buffers: list[PackBuffer]) -> Receiver:
    """Return where a drafter's states come from: its own target with shared roles, else the ring."""
    machine, plan = post.world.machine, post.plan
    training = until(post.schedule.for_drafter(machine, post.index, first_step=plan.first_step), plan.total_steps)
    batches = post.held_out.join(training, plan.first_step, machine, drafter=post.index)
    if post.joint is None:
        assert producer is not None
        return SharedReceiver(producer, batches, buffers[0])
    fetcher = Fetcher(
        post.joint.ring,
        post.copier,
        pairs=post.joint.pairs,
        channels=post.joint.channels,
        verify_copies=post.config.verify_copies,
        alarm=lambda seen, step: reporter.alarm("wrong_copy", seen, step),
        here=post.layout.place(Role.DRAFTER, post.index, machine),
        targets=[post.layout.place(Role.TARGET, target, machine) for target in range(post.layout.targets)],
        clock=post.clock,
    )
    arrivals = (Arrival(each.b, each.target) for each in batches)
    if post.config.transfer == "sync":
        return SyncReceiver(fetcher, arrivals, buffers[0], post.copier)
    return PrefetchReceiver(fetcher, arrivals, buffers, post.copier)


def run_drafter(post: Post) -> None:
    """Train from the first step to the last; with shared roles, run the target too."""
    producer = None
    built = None
    if not post.plan.run.stop.exists() and post.layout.shared:
        producer = load_producer(post)
    if not post.plan.run.stop.exists():
        built = build_drafter(post, producer)
    session = None
    # What follows meets the other drafters. One that stops must not be missed there: they decide together.
    if not post.world.any_loader(built is None or post.plan.run.stop.exists()) and built is not None:
        session = warm_session(post, producer, *built)
    if post.end_of_warm_up() or session is None:
        _finish(post, TrainResult("stopped", post.plan.first_step - 1, None), None)
        return
    if session.desk is not None:
        _announce(post)
    with post.phases.phase("training"):
        outcome = train(session)
    with post.phases.within("finishing"):
        session.close()
        _finish(post, outcome, session)


def warm_session(
    post: Post, producer: Producer | None, drafter: Drafter, optimizer: StepOptimizer, ends: Ends, choice: Choice
) -> DrafterSession:
    """Join the pieces of a drafter's work, and run every shape once; with shared roles those of the target first."""
    with post.phases.phase("warmup", f"drafter on {post.device}"):
        session = make_session(post, producer, drafter, optimizer, ends, choice)
        warm_up = WarmUp(post)
        if producer is not None:
            warm_up.target(producer, session.buffers)
        warm_up.drafter(session)
        post.phases.detail = warm_up.finish()
    return session


def build_drafter(post: Post, producer: Producer | None) -> tuple[Drafter, StepOptimizer, Ends, Choice]:
    """Make the drafter, fresh, started from the target or restored, load the target's two ends, and try the attention.

    With shared roles the embedding is the one that `producer` has.
    """
    config, plan = post.config, post.plan
    with post.phases.phase("loading", f"drafter on {post.device}"):
        facts = target_facts(Path(config.target_model))
        masters = torch.float64 if config.dtype == "float64" else torch.float32
        if plan.resume:
            drafter = empty_drafter(config, masters, post.device)
        else:
            drafter = fresh_drafter(config).to(device=post.device, dtype=masters)
        optimizer = StepOptimizer(drafter, config, plan.total_steps)
        if plan.resume:
            checkpoint.restore(Path(plan.resume), drafter, optimizer)
        optimizer.allocate()
        embed = None if producer is None else producer.target.embedding
        embed, head = load_ends(Path(config.target_model), DTYPES[config.dtype], post.device, embed=embed)
        subset = None
        if config.loss_vocab_extra >= 0:
            tokens = make_vocab_subset(post.token_ids_seen, facts.vocab_size, config.loss_vocab_extra, config.seed)
            subset = torch.from_numpy(tokens).to(post.device)
            head = head[subset].contiguous()
        norm = None
        if config.distils:
            norm = load_final_norm(Path(config.target_model), dtype=post.dtype, device=post.device)
    choice = Choice(DENSE)
    if wants_flex(config):
        with post.phases.phase("warmup", f"attention on {post.device}"):
            choice = choose(config, drafter.config, post.device, post.dtype)
    return drafter, optimizer, Ends(embed, head, subset, norm), choice


def agree_on_attention(post: Post, choice: Choice) -> Backend:
    """Return the backend that all drafters train with, and say which. Once all have loaded: until then one may leave."""
    agreed = agree(choice, lambda yes: post.world.all_drafters(yes, post.device))
    if agreed.reason:
        _say(post, "warning", f"all drafters attend with {agreed.backend.name}; flex on {post.device}: {agreed.reason}")
    elif agreed.backend is not DENSE and isinstance(post.telemetry, EventWriter):
        _say(post, "info", f"all drafters attend with {agreed.backend.name}")
    return agreed.backend


def _say(post: Post, level: str, text: str) -> None:
    post.telemetry.emit(ev.Message(time=time.time(), rank=post.world.rank, level=level, text=text))


def make_session(
    post: Post, producer: Producer | None, drafter: Drafter, optimizer: StepOptimizer, ends: Ends, choice: Choice
) -> DrafterSession:
    """Join the pieces of a drafter's work."""
    plan, rank = post.plan, post.world.rank
    reporter = Reporter(
        post.telemetry, post.layout, rank=rank, total_steps=plan.total_steps, first_step=plan.first_step
    )
    desk = None
    padding = 0.0
    if isinstance(post.telemetry, EventWriter):
        capacity = plan.slot_bytes * plan.slots_per_pair * len(post.layout.pairs)
        profiler = PipelineProfiler(post.telemetry, rank=rank, ring_capacity=capacity)
        post.telemetry.observe(profiler.observe)
        desk = Desk(post.telemetry, reporter, profiler)
        # Of the first epoch: the others' rows hold the same documents in another order.
        padding = padding_share(post.packing.rows(0), post.packing.lengths, post.config.bucket_tokens)
    buffers = device_buffers(post)
    return DrafterSession(
        plan=plan,
        config=post.config,
        world=post.world,
        device=post.device,
        schedule=post.schedule,
        held_out=post.held_out,
        index=post.index,
        drafter=drafter,
        optimizer=optimizer,
        ends=ends,
        backend=agree_on_attention(post, choice),
        receiver=make_receiver(post, producer, reporter, buffers),
        buffers=buffers,
        figures=DeferredFigures(post.copier, post.device),
        clock=post.clock,
        phases=post.phases,
        timer=post.timer,
        trace=post.trace,
        desk=desk,
        padding=padding,
    )


def _announce(post: Post) -> None:
    plan = post.plan
    post.telemetry.emit(
        ev.RunStarted(
            time=time.time(),
            run_id=plan.run_id,
            topology=post.layout.describe(),
            total_steps=plan.total_steps,
            first_step=plan.first_step,
            resumed_from=plan.resume,
        )
    )


def _finish(post: Post, outcome: TrainResult, session: DrafterSession | None) -> None:
    if not isinstance(post.telemetry, EventWriter):
        return
    post.telemetry.emit(
        ev.RunFinished(
            time=time.time(),
            result=outcome.result,
            step=outcome.step,
            checkpoint=str(outcome.checkpoint or ""),
            seconds=session.seconds if session else 0.0,
            tokens=session.trained_tokens if session else 0,
            first_loss=session.first_loss if session else 0.0,
            last_loss=session.last_loss if session else 0.0,
            not_applied=session.not_applied if session else 0,
        )
    )
