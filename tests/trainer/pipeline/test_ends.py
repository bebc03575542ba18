"""Issue 5, check 5: a rank that raises, hangs, is killed or frozen ends the run, which says who it was and where.

2 + 2 ranks. How it ended is judged as the supervisor does it, which watches the processes; nobody asks for the run's end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remote.agent.aftermath import remove_sockets
from remote.agent.verdict import Ending, Story, judge
from remote.agent.watch import Watch
from remote.protocol import events as ev
from remote.protocol.identity import ProcessIdentity
from remote.protocol.records import ExitRecord
from trainer.pipeline.leader import check_whole
from trainer.pipeline.watchdog import STALLED

TWO = {"target_gpus": [0, 1], "drafter_gpus": [2, 3]}
# 6 steps an epoch; few slots, so that no target runs far ahead of the checkpoints. A stall of 2 s: a loaded machine does not
# stand still for so long in one stage of a tiny model.
STEPS = 22
SHORT = {**TWO, "epochs": 4, "checkpoint_every": 4, "ring_mib": 1, "stall_timeout": 2}
TARGET, DRAFTER, WRITER = 1, 3, 2  # the writer is the first drafter: it saves, and it alone writes events

# phase: (rank, function, call). A target makes 32 calls of `states`; those of step 4 are among the first 8.
PLACES = {
    "loading, target": (TARGET, "trainer.pipeline.roles:load_target", 1),
    "loading, drafter": (DRAFTER, "trainer.pipeline.roles:fresh_drafter", 1),
    "warmup, target": (TARGET, "trainer.pipeline.warm_up:WarmUp.target", 1),
    "warmup, drafter": (DRAFTER, "trainer.pipeline.warm_up:WarmUp.drafter", 1),
    "training, target": (TARGET, "trainer.pipeline.target_side:Producer.states", 26),
    "training, drafter": (DRAFTER, "trainer.pipeline.session:build_blocks", 12),
    "training, drafter backward": (DRAFTER, "torch:Tensor.backward", 12),
    "saving, drafter": (WRITER, "trainer.checkpoint:save", 2),
    "reducing, drafter": (DRAFTER, "trainer.pipeline.world:World.sum_over_drafters", 4),
    "finishing, target": (TARGET, "trainer.pipeline.sender:Publisher.close", 1),
    "finishing, drafter": (DRAFTER, "trainer.pipeline.session:DrafterSession.close", 1),
}

Start = Callable[..., Any]


class Judged:
    """A run that was watched to its end as the supervisor watches it."""

    def __init__(self, run: Any, leader: int, finish: Callable[[Any], Any]) -> None:
        over = threading.Event()
        with Watch(run.layout, ProcessIdentity.of(leader)) as watch:

            def look() -> None:
                while not over.is_set():
                    watch.wait(0.05)

            looking = threading.Thread(target=look)
            looking.start()
            finish(run)
            over.set()
            looking.join()
        self.run = run
        self.story = Story()
        self.story.hear(run.events(ev.Event))
        ending = Ending("trainer", returncode=1, first_dead=watch.first_dead, first_dead_at=watch.first_dead_at)
        self.record: ExitRecord = judge(run.layout, self.story, ending)


@pytest.fixture
def broken(start: Start, finish: Callable[[Any], Any], warm_launcher: Any) -> Callable[..., Judged]:
    """Return broken(what, place, **keys): a run with one fault, judged."""

    def run(what: str, place: str, **changes: Any) -> Judged:
        rank, where, call = PLACES[place]
        faults = {rank: {"what": what, "where": where, "call": call}}
        return Judged(start(faults=faults, **SHORT | changes), warm_launcher.pid, finish)

    return run


def check_end(ended: Judged, what: str, place: str) -> None:
    """Who, where, why; and what can be gone on from."""
    rank, phase = PLACES[place][0], place.partition(",")[0]
    run, record = ended.run, ended.record
    role = "target" if rank == TARGET else "drafter"
    if phase == "finishing" and record.result == "finished":
        # All is trained and saved, and was said before the launcher could end the others.
        assert record.last_step == STEPS
        assert run.checkpoints[-1].name == f"step-{STEPS:08d}"
        return
    if place == "finishing, target":
        phase = "training"  # A target is in it until the drafters have said goodbye.
    assert record.result == "failed"
    assert record.failed_rank == rank, record.message
    assert all(code != 0 for code in run.codes) or place.startswith("finishing"), run.codes
    if what == "kill":
        assert record.message.startswith(f"rank {rank} ({role}) died without a word: killed from outside"), run.log
    elif what == "crash":
        assert record.message.startswith(f"rank {rank} ({role}) crashed")
        assert record.message.endswith("Bus error")
        assert "faults.py" in record.traceback
    elif what == "freeze":
        assert f"{role} 1 (rank {rank}, cpu) gives no sign of life" in record.message or rank == WRITER
        assert "stopped" in record.message
    elif what == "hang":
        assert run.codes[rank] == STALLED
        assert f"(rank {rank}, cpu) stands still in {phase}" in record.message
        assert "faults.py" in record.traceback
        assert "faults.py" in run.layout.stacks(rank).read_text()
        assert run.error(rank).phase == phase
        assert not run.error(rank).consequence
    else:
        assert (run.error(rank).phase, run.error(rank).kind) == (phase, "Injected")
        assert "on purpose" in record.traceback
    if what in ("hang", "freeze") and rank != WRITER:
        assert "stall" in {alarm.alarm for alarm in run.events(ev.AlarmRaised)}
    if phase not in ("loading", "warmup"):
        saved = Path(record.last_checkpoint)
        assert saved in run.checkpoints
        check_whole(saved)
    if what in ("kill", "crash"):
        remove_sockets(run.layout)  # Before the end of warm-up nobody else could.
    sockets = Path(run.layout.sockets.read_text().strip())
    assert not sockets.exists()


@pytest.mark.parametrize(
    ("what", "place"),
    [
        ("crash", "loading, target"),
        ("kill", "training, target"),
        ("freeze", "training, drafter"),
        ("hang", "training, target"),
        ("raise", "saving, drafter"),
    ],
)
def test_a_run_ends_and_names_rank_and_place(broken: Callable[..., Judged], what: str, place: str) -> None:
    check_end(broken(what, place), what, place)


@pytest.mark.long
def test_ranks_that_all_wait_for_each_other_end_with_everybodys_place(broken: Callable[..., Judged]) -> None:
    # Where it hangs it could as well be waiting: from outside a collective cannot be told from who does not come to it.
    ended = broken("hang", "reducing, drafter")
    assert ended.record.failed_rank is None
    assert ended.record.message.startswith("no rank gets on since")
    for name in ("target 0", "target 1", "drafter 0", "drafter 1"):
        assert f"{name} (rank " in ended.record.message
    assert "training: all_reduce, waits for the other drafters" in ended.record.message


@pytest.mark.long
@pytest.mark.parametrize("place", [place for place in PLACES if not place.startswith("reducing")])
@pytest.mark.parametrize("what", ["raise", "hang", "crash", "kill", "freeze"])
def test_wherever_it_happens(broken: Callable[..., Judged], trained: Start, what: str, place: str) -> None:
    ended = broken(what, place)
    check_end(ended, what, place)
    if ended.record.last_checkpoint and not place.startswith("finishing"):
        rest = trained(**SHORT, resume=ended.record.last_checkpoint)
        assert rest.finished.result == "finished"
