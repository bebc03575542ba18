"""Flex is taken where it works and agrees, by all drafters or by none; what stands against it is said."""

from __future__ import annotations

import inspect
import os
import traceback
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from torch._inductor.exc import InductorError

from remote.protocol.errors import DflashError
from trainer.config import TrainConfig
from trainer.drafter import attention, flex
from trainer.drafter.attention import DenseAttention
from trainer.drafter.attention_choice import (
    DENSE,
    FLEX,
    Backend,
    Choice,
    agree,
    choose,
    flex_failures,
    made_up_blocks,
    trouble,
    wants_flex,
)
from trainer.pipeline import roles
from trainer.pipeline.world import World

CPU = torch.device("cpu")
TYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(scope="module")
def shape(config):
    return config(layer_types="mixed", sliding_window=6, block_size=10)


@pytest.fixture(scope="module")
def working(written_flex):
    return Backend("flex", written_flex, 8)


def broken(blocks):
    raise RuntimeError("no kernel image\n  is available for this device")


BROKEN = Backend("flex", broken, 8)


# ---- one rank


@pytest.mark.parametrize("dtype", TYPES)
def test_an_attention_that_agrees_is_no_trouble(shape, working, dtype):
    assert trouble(working, made_up_blocks(shape), shape, dtype) == ""


def other(change):
    """Return a backend whose attention is dense but for what `change` does to its arguments."""
    return Backend("flex", lambda blocks: lambda *given: DenseAttention(blocks)(*change(*given)), 8)


WRONG = {
    "another window": other(lambda q, c, b, window: (q, c, b, window and window - 1)),
    "no window": other(lambda q, c, b, window: (q, c, b, None)),
    "another scale": other(lambda q, c, b, window: (q * 1.1, c, b, window)),
    "no gradient for the context": other(
        lambda q, c, b, window: (q, attention.KeysValues(c.keys.detach() + 0 * c.keys, c.values), b, window)
    ),
    "not finite": other(lambda q, c, b, window: (q * float("nan"), c, b, window)),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", WRONG)
def test_one_that_differs_is(shape, name, dtype):
    said = trouble(WRONG[name], made_up_blocks(shape), shape, dtype)
    assert "away from dense" in said


@pytest.mark.parametrize(
    ("text", "instead"),
    [("< query.anchor", "<= query.anchor"), (" & (key.document == query.document)", ""), ("(distance >= 0) & ", "")],
)
def test_so_is_one_whose_mask_is_wrong_in_a_key(shape, written_flex, text, instead):
    """The bound of bfloat16 is narrow enough for the mistakes that others made."""
    source = inspect.getsource(attention.visible)
    assert source.count(text) == 1
    scope = vars(attention).copy()
    exec("from __future__ import annotations\n" + source.replace(text, instead), scope)
    wrong = Backend("flex", written_flex, 8)
    right, flex.visible = flex.visible, scope["visible"]
    try:
        assert "away from dense" in trouble(wrong, made_up_blocks(shape), shape, torch.bfloat16)
    finally:
        flex.visible = right


def test_the_made_up_row_has_every_kind_of_row(config):
    for window in (6, 2048):
        blocks = made_up_blocks(config(layer_types="mixed", sliding_window=window, block_size=10))
        assert len(blocks.runs) == 3
        assert len(blocks.positions) > blocks.count
        assert blocks.positions.numel() % 128
        assert (blocks.context_documents < 0).any()
        full, sliding = (attention.dense_mask(blocks, each) for each in (None, window))
        # The window ends inside a document: else nothing would be known of it.
        assert sliding.sum() < 0.9 * full.sum()


def test_auto_falls_back_and_says_why(shape, working):
    config = TrainConfig(attention_backend="auto")
    assert choose(config, shape, CPU, torch.float32, working) == Choice(working)
    choice = choose(config, shape, CPU, torch.float32, BROKEN)
    assert choice == Choice(DENSE, "RuntimeError: no kernel image is available for this device")


def test_flex_that_was_asked_for_is_an_error_where_it_fails(shape):
    with pytest.raises(DflashError, match="flex attention fails on cpu") as caught:
        choose(TrainConfig(attention_backend="flex"), shape, CPU, torch.float32, BROKEN)
    assert "no kernel image" in caught.value.cause
    assert "--attention-backend dense" in caught.value.hint


def test_flex_is_tried_on_cuda_alone_and_never_beside_dense():
    tried = [
        (device, backend)
        for device in ("cuda", "cpu")
        for backend in ("auto", "dense", "flex")
        if wants_flex(TrainConfig(device=device, attention_backend=backend))
    ]
    assert tried == [("cuda", "auto"), ("cuda", "flex")]


@pytest.mark.parametrize("row_anchors", [1, 7, 24, 512, 513])
def test_a_run_meets_few_numbers_of_block_rows(row_anchors):
    bucket = FLEX.bucket(row_anchors)
    sizes = {max(1, -(-count // bucket)) * bucket for count in range(row_anchors + 1)}
    assert len(sizes) <= 8
    assert max(sizes) < row_anchors + bucket
    assert DENSE.bucket(row_anchors) == 0


# ---- all ranks


def start_rank(rank, ranks, place, work):
    """Fork a drafter rank that saves what `work(world)` returns; returns its pid."""
    if pid := os.fork():
        return pid
    try:
        distributed.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=ranks)
        world = World(
            rank=rank, local_rank=rank, machine=0, machines=1, drafters=distributed.group.WORLD, drafter_count=ranks
        )
        torch.save(work(world), place / f"rank-{rank}.pt")
        distributed.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.mark.parametrize("failing", [(), (1,), (0, 1)])
def test_all_drafters_take_the_same(shape, working, failing, tmp_path):
    def work(world):
        events = []
        post = SimpleNamespace(world=world, device=CPU, telemetry=SimpleNamespace(emit=events.append))
        mine = BROKEN if world.rank in failing else working
        choice = choose(TrainConfig(), shape, CPU, torch.float32, mine)
        backend = roles.agree_on_attention(post, choice)
        return backend.name, [(each.level, each.rank, each.text) for each in events]

    pids = [start_rank(rank, 2, tmp_path, work) for rank in range(2)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    said = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2)]
    if not failing:
        assert [name for name, _ in said] == ["flex", "flex"]
        return
    assert [name for name, _ in said] == ["dense", "dense"]
    for rank, (_, events) in enumerate(said):
        [(level, by, text)] = events
        assert (level, by) == ("warning", rank)
        assert text.startswith("all drafters attend with dense; flex on cpu: ")
        assert ("no kernel image is available" in text) == (rank in failing)


def test_one_drafter_agrees_with_itself(working):
    alone = World(rank=0, local_rank=0, machine=0, machines=1, drafters=None, drafter_count=1)
    for choice in (Choice(working), Choice(DENSE, "broken"), Choice(DENSE)):
        assert agree(choice, lambda yes: alone.all_drafters(yes, CPU)) == choice


# ---- in mid-run


def refused_by_dynamo():
    """Raise what a compiled kernel raises that meets one shape too many."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, dynamic=False, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (1, 2):
            compiled(torch.ones(size))


def lowered_wrongly():
    raise InductorError(RuntimeError("out of resource: shared memory\nrequired: 131072"), None)


@pytest.mark.parametrize("fails", [refused_by_dynamo, lowered_wrongly])
def test_a_compilers_failure_names_the_setting(fails):
    with pytest.raises(DflashError, match="flex attention failed") as caught, flex_failures():
        fails()
    assert "--attention-backend dense" in caught.value.hint
    assert caught.value.cause
    assert "\n" not in caught.value.cause
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("error", [ValueError("x"), torch.OutOfMemoryError("x"), DflashError("x"), KeyboardInterrupt()])
def test_other_failures_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, flex_failures():
        raise error
    assert caught.value is error
