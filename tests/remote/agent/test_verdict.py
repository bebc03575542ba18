"""How a run ended, judged from what it left behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from remote.agent.verdict import Ending, Story, judge, rank_errors, read_stop, told_of
from remote.protocol.events import CheckpointSaved, HeldOutMeasured, Phase, RunFinished, Step
from remote.protocol.files import write_json
from remote.protocol.layout import RunLayout
from remote.protocol.records import HeldOut, RankError, StopRequest

STOP = StopRequest(deadline=1.0, by="tester")


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "20200101-000000-aaaaaa")
    layout.create()
    return layout


def step(number: int) -> Step:
    return Step(
        time=1.0, step=number, total_steps=9, epoch=0, loss=1.0, accuracy=0.0, accept_len=1.0,
        lr=0.1, grad_norm=1.0, tokens=1, tokens_per_second=1.0,
    )  # fmt: skip


def fail(run: RunLayout, rank: int, time: float, message: str = "boom") -> None:
    error = RankError(rank, "drafter", "cpu", "training", "RuntimeError", message, f"Traceback of {rank}", time)
    write_json(run.error(rank), error)


def told(*events) -> Story:
    story = Story()
    story.hear(events)
    return story


@pytest.mark.parametrize("result", ["finished", "stopped", "failed"])
def test_the_trainers_own_word_comes_first(run, result):
    write_json(run.stop, STOP)
    story = told(step(7), RunFinished(time=2.0, result=result, step=7, checkpoint="/c/step-7"))
    record = judge(run, story, Ending("trainer", returncode=1 if result == "failed" else 0))
    assert (record.result, record.last_step, record.last_checkpoint) == (result, 7, "/c/step-7")


def measured(number: int, loss: float) -> HeldOutMeasured:
    return HeldOutMeasured(time=1.0, step=number, loss=loss, accuracy=0.25, accept_len=1.5, seconds=0.1)


def saved(number: int, *, best: bool) -> CheckpointSaved:
    return CheckpointSaved(time=1.0, step=number, path=f"/c/{number}", bytes=1, seconds=0.1, best=best)


def test_the_best_is_what_the_trainer_says_and_has_its_own_figures(run):
    # Step 6 measured lower than 4 and was never saved: a full disk. It is no checkpoint to serve.
    story = told(measured(2, 3.0), saved(2, best=True), measured(4, 2.5), saved(4, best=True), measured(6, 2.0))
    record = judge(run, story, Ending("trainer", returncode=0))
    assert record.held_out == HeldOut(6, 2.0, 0.25, 1.5)
    assert record.best == HeldOut(4, 2.5, 0.25, 1.5, "/c/4")
    story.hear([saved(7, best=False), measured(8, 2.75), saved(8, best=False)])
    record = judge(run, story, Ending("trainer", returncode=0))
    assert record.held_out == HeldOut(8, 2.75, 0.25, 1.5, "/c/8")
    assert record.best == HeldOut(4, 2.5, 0.25, 1.5, "/c/4")


def test_refused_steps_are_counted_and_the_trainers_own_count_may_be_higher(run):
    refused = dataclasses.replace(step(2), applied=False)
    story = told(step(1), refused, refused)
    assert judge(run, story, Ending("trainer", returncode=0)).not_applied == 2
    # Events that a full disk swallowed.
    story.hear([RunFinished(time=2.0, result="finished", step=9, not_applied=5)])
    assert judge(run, story, Ending("trainer", returncode=0)).not_applied == 5


def test_exit_code_0_alone_never_means_finished(run):
    record = judge(run, told(step(3)), Ending("trainer", returncode=0))
    assert record.result == "failed"
    assert "without saying how" in record.message


@pytest.mark.parametrize(
    ("stop", "escalated", "returncode", "error", "expected"),
    [
        (True, True, -15, False, "stopped"),
        (True, True, 1, True, "stopped"),
        (True, False, 0, False, "stopped"),
        (True, False, 1, True, "failed"),
        (True, False, 0, True, "failed"),
        (False, False, -15, False, "failed"),
    ],
)
def test_a_stop_that_needed_signals_is_a_stop_and_a_crash_is_a_crash(run, stop, escalated, returncode, error, expected):
    if stop:
        write_json(run.stop, STOP)
    if error:
        fail(run, 0, 1.0)
    record = judge(run, told(), Ending("trainer", returncode=returncode, escalated=escalated))
    assert record.result == expected
    assert record.by == ("tester" if expected == "stopped" else "trainer")


def test_the_earliest_error_is_the_cause(run):
    for rank, time in ((0, 12.0), (1, 10.0), (2, 11.0)):
        fail(run, rank, time)
    record = judge(run, told(), Ending("trainer", returncode=1, first_dead=1))
    assert (record.failed_rank, record.traceback) == (1, "Traceback of 1")


def test_a_rank_that_died_without_a_word_is_the_cause_whatever_the_others_say(run):
    fail(run, 0, 10.0, "Connection closed by peer")
    story = told(Phase(time=1.0, rank=1, role="target", phase="loading"))
    record = judge(run, story, Ending("trainer", returncode=1, first_dead=1))
    assert record.failed_rank == 1
    assert record.message.startswith("rank 1 (target) died without a word: killed from outside")


def lose(run: RunLayout, rank: int, time: float, *, blames: int | None = None) -> None:
    write_json(
        run.error(rank),
        RankError(
            rank, "drafter", "cpu", "training", "PeerDied", "target 1", "T", time, consequence=True, blames=blames
        ),
    )


def test_the_loss_of_a_rank_is_never_the_cause_while_another_is_known(run):
    lose(run, 0, 1.0, blames=2)
    lose(run, 1, 2.0)
    fail(run, 2, 3.0)
    record = judge(run, told(), Ending("trainer", returncode=1, first_dead=0))
    assert (record.failed_rank, record.message) == (2, "RuntimeError: boom")


def test_a_killed_rank_is_named_by_its_peers_though_they_were_seen_to_end_first(run):
    lose(run, 0, 1.0, blames=2)
    story = told(Phase(time=1.0, rank=2, role="target", phase="training"))
    record = judge(run, story, Ending("trainer", returncode=1, first_dead=0, first_dead_at=2.0))
    assert record.failed_rank == 2
    assert record.message == "rank 2 (target) died without a word: killed from outside while training"


def test_a_rank_that_the_launcher_ended_after_a_failure_is_not_the_cause(run):
    fail(run, 1, 10.0)
    record = judge(run, told(), Ending("trainer", returncode=1, first_dead=0, first_dead_at=10.5))
    assert (record.failed_rank, record.traceback) == (1, "Traceback of 1")


def test_losses_alone_are_still_told(run):
    lose(run, 1, 2.0)
    lose(run, 0, 1.0)
    record = judge(run, told(), Ending("trainer", returncode=1))
    assert (record.failed_rank, record.message) == (0, "PeerDied: target 1")


def test_a_frozen_rank_is_the_failed_one_in_the_words_of_who_found_it(run):
    found = RankError(
        1, "drafter", "cpu", "training", "Stalled", "target 0 gives no sign of life", "", 5.0, cause="frozen", blames=0
    )
    write_json(run.error(1), found)
    record = judge(run, told(), Ending("trainer", returncode=1, first_dead=1, first_dead_at=5.1))
    assert (record.failed_rank, record.message) == (0, "target 0 gives no sign of life (frozen)")
    assert told_of(run, 0) == told_of(run, 1) == found
    assert told_of(run, 2) is told_of(run, None) is None


def test_a_crash_is_told_with_its_stacks(run):
    run.stacks(1).write_text("Fatal Python error: Bus error\n\nThread 0x1 (most recent call first):\n")
    story = told(Phase(time=1.0, rank=1, role="target", phase="loading"))
    record = judge(run, story, Ending("trainer", returncode=1, first_dead=1, first_dead_at=2.0))
    assert record.failed_rank == 1
    assert record.message == "rank 1 (target) crashed while loading: Fatal Python error: Bus error"
    assert record.traceback.endswith("(most recent call first):\n")


def test_where_all_wait_for_each_other_none_is_the_failed_one(run):
    found = RankError(1, "drafter", "cpu", "training", "Stalled", "no rank gets on", "", 5.0, cause="c", blames=-1)
    write_json(run.error(1), found)
    record = judge(run, told(), Ending("trainer", returncode=1, first_dead=1, first_dead_at=5.1))
    assert (record.failed_rank, record.message) == (None, "no rank gets on (c)")
    assert told_of(run, None) == found


def test_out_of_memory_is_named(run):
    record = judge(run, told(), Ending("trainer", returncode=1, first_dead=2, oom_kill=True))
    assert record.oom_kill
    assert "memory" in record.message
    assert "memory" in judge(run, told(), Ending("trainer", returncode=-9, oom_kill=True)).message


def test_a_leader_killed_by_a_signal(run):
    record = judge(run, told(CheckpointSaved(time=1.0, step=5, path="/c/5", bytes=1, seconds=1.0)), Ending("agent"))
    assert (record.by, record.code, record.signal, record.last_checkpoint) == ("agent", None, None, "/c/5")
    assert judge(run, told(), Ending("trainer", returncode=-9)).signal == 9


def test_the_ranks_of_a_killed_leader_are_not_the_cause(run):
    record = judge(run, told(), Ending("trainer", returncode=-9, first_dead=2))
    assert (record.failed_rank, record.message) == (None, "the leader was killed by signal 9")


def test_the_leaders_own_error_belongs_to_no_rank(run):
    fail(run, -1, 1.0, "no such model")
    record = judge(run, told(), Ending("trainer", returncode=7))
    assert (record.failed_rank, record.message, record.traceback) == (
        None,
        "RuntimeError: no such model",
        "Traceback of -1",
    )


def test_torn_error_records_still_name_their_rank(run):
    run.error(4).write_text('{"rank": 4, "ro')
    (run.path / "errors" / "rank-x.json").write_text("{}")
    assert list(rank_errors(run)) == [4]
    assert judge(run, told(), Ending("trainer", returncode=1)).failed_rank == 4


def test_a_torn_stop_is_a_stop(run):
    assert read_stop(run) is None
    run.stop.write_bytes(b"{")
    assert "unreadable" in read_stop(run).by
