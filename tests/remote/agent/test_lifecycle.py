"""The state of a run from its locks and files: every row of the table in docs/architecture.md, and the damaged ones."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote.agent.lifecycle import choose_run, lifecycle_of, lives, run_ids, status_of
from remote.protocol.errors import DflashError
from remote.protocol.events import CheckpointSaved, HeldOutMeasured, Phase, RunFinished, RunStarted, Step, encode
from remote.protocol.files import write_json
from remote.protocol.identity import boot_id
from remote.protocol.layout import RootLayout, RunLayout
from remote.protocol.locks import LockKind, acquire
from remote.protocol.records import Alarm, ExitRecord, HeldOut, Lifecycle, RankError, RunSpec, RunState, StopRequest

RUN_ID = "20200101-000000-aaaaaa"


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / RUN_ID)
    layout.create()
    return layout


def a_step(number: int = 7, loss: float = 2.5) -> Step:
    return Step(
        time=100.0 + number,
        step=number,
        total_steps=20,
        epoch=0,
        loss=loss,
        accuracy=0.1,
        accept_len=1.2,
        lr=1e-4,
        grad_norm=1.0,
        tokens=512,
        tokens_per_second=1234.5,
    )


def a_finish(result: str) -> RunFinished:
    return RunFinished(time=200.0, result=result, step=7)


def write_events(run: RunLayout, *events) -> None:
    run.events.write_text("".join(encode(event) + "\n" for event in events))


@contextlib.contextmanager
def held(*paths: Path) -> Iterator[None]:
    """Hold locks shared; an open file of our own is as good as another process's."""
    descriptors = [acquire(path, LockKind.SHARED) for path in paths]
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class TestTable:
    """sup.lock and run.lock are the truth; files say which of the states that fit."""

    @pytest.mark.parametrize("state", ["starting", "running", "stopping"])
    @pytest.mark.parametrize("occupied", [True, False])
    def test_supervised(self, run, state, occupied):
        write_json(run.state, RunState(RUN_ID, state, 1.0))
        if state == "stopping":
            write_json(run.stop, StopRequest(1.0, "x"))
        with held(run.sup_lock, *([run.run_lock] if occupied else [])):
            assert lifecycle_of(run) == state
            assert lives(run)

    def test_a_step_that_the_supervisor_has_not_read_yet(self, run):
        write_json(run.state, RunState(RUN_ID, "starting", 1.0))
        write_events(run, a_step())
        with held(run.sup_lock):
            assert lifecycle_of(run) is Lifecycle.RUNNING

    @pytest.mark.parametrize("state", ["running", "stopped", "nonsense", None])
    @pytest.mark.parametrize("ended", [True, False])
    def test_orphaned_whatever_the_files_say(self, run, state, ended):
        if state:
            write_json(run.state, RunState(RUN_ID, state, 1.0))
        if ended:
            write_json(run.exit, ExitRecord(RUN_ID, "finished", 1.0, "trainer"))
        with held(run.run_lock):
            assert lifecycle_of(run) is Lifecycle.ORPHANED

    @pytest.mark.parametrize("result", ["finished", "stopped", "failed"])
    @pytest.mark.parametrize("where", ["exit.json", "the last event"])
    def test_ended(self, run, result, where):
        if where == "exit.json":
            write_json(run.exit, ExitRecord(RUN_ID, result, 1.0, "trainer"))
            write_events(run, a_finish("finished"))
        else:
            write_events(run, a_step(), a_finish(result))
        write_json(run.state, RunState(RUN_ID, "running", 1.0))
        assert lifecycle_of(run) == result
        assert not lives(run)

    @pytest.mark.parametrize(
        "exit_text", [None, "", "{", "[]", '{"run_id": "x"}', '{"run_id":"x","result":"?","ended":1,"by":"x"}']
    )
    @pytest.mark.parametrize("state", ["starting", "running", "stopping", None])
    def test_lost(self, run, exit_text, state):
        if exit_text is not None:
            run.exit.write_text(exit_text)
        if state:
            write_json(run.state, RunState(RUN_ID, state, 1.0))
        write_events(run, a_step())
        assert lifecycle_of(run) is Lifecycle.LOST

    @pytest.mark.parametrize("garbage", ["", "{", '{"state": 5}', '{"run_id":"x","state":"finished","since":1}'])
    def test_supervised_with_a_useless_state_file(self, run, garbage):
        run.state.write_text(garbage)
        with held(run.sup_lock):
            assert lifecycle_of(run) is Lifecycle.STARTING
            write_events(run, a_step())
            assert lifecycle_of(run) is Lifecycle.RUNNING
            run.stop.write_text("{")
            assert lifecycle_of(run) is Lifecycle.STOPPING

    def test_every_combination_gives_a_state_that_fits_its_locks(self, run):
        files = {run.state: RunState(RUN_ID, "running", 1.0), run.exit: ExitRecord(RUN_ID, "failed", 1.0, "x"),
                 run.stop: StopRequest(1.0, "x")}  # fmt: skip
        for present in itertools.product([True, False], repeat=3):
            for path in files:
                path.unlink(missing_ok=True)
            for (path, record), there in zip(files.items(), present, strict=True):
                if there:
                    write_json(path, record)
            for locks in ((), (run.sup_lock,), (run.run_lock,), (run.sup_lock, run.run_lock)):
                with held(*locks):
                    assert lifecycle_of(run).alive == bool(locks)


class TestStatus:
    """What status puts together from the files."""

    def test_everything_in_its_place(self, run):
        write_json(
            run.spec,
            RunSpec(RUN_ID, ("x",), {}, ("0",), name="first", note="n", host="h", ct="200", by="me", created=5.0),
        )
        write_json(run.state, RunState(RUN_ID, "running", 1.0, alarms=(Alarm("stall", "m", 2.0, 3),)))
        write_events(
            run,
            RunStarted(
                time=1.0, run_id=RUN_ID, topology="5 targets / 3 drafters on cuda", total_steps=20, first_step=1
            ),
            a_step(6),
            CheckpointSaved(time=2.0, step=6, path="/c/6", bytes=1, seconds=1.0),
            Phase(time=3.0, role="drafter", phase="training"),
            a_step(7),
        )
        with held(run.sup_lock):
            status = status_of(run)
        assert (status.state, status.step, status.total_steps, status.loss) == ("running", 7, 20, 2.5)
        assert (status.tokens_per_second, status.phase, status.last_checkpoint) == (1234.5, "training", "/c/6")
        assert (status.host, status.ct, status.name, status.note, status.by) == ("h", "200", "first", "n", "me")
        assert status.topology == "5 targets / 3 drafters on cuda"
        assert status.alarms == (Alarm("stall", "m", 2.0, 3),)
        assert status.last_event == 107.0

    def test_what_the_supervisor_noted_and_what_it_has_not_written_yet(self, run):
        noted = HeldOut(6, 3.0, 0.25, 1.5, "/c/6")
        state = RunState(RUN_ID, "running", 1.0, last_checkpoint="/c/6", held_out=noted, best=noted, not_applied=2)
        write_json(run.state, state)
        write_events(run, a_step(7))
        status = status_of(run)
        assert (status.held_out, status.best, status.not_applied) == (noted, noted, 2)
        assert status.last_checkpoint == "/c/6"
        newer = HeldOutMeasured(time=3.0, step=8, loss=2.5, accuracy=0.25, accept_len=1.5, seconds=0.1)
        write_events(run, newer, a_step(8))
        assert status_of(run).held_out == HeldOut(8, 2.5, 0.25, 1.5)
        # The end has the last word.
        last = dataclasses.replace(noted, step=8, checkpoint="/c/8")
        write_json(run.exit, ExitRecord(RUN_ID, "finished", 9.0, "trainer", held_out=last, best=last, not_applied=3))
        status = status_of(run)
        assert (status.held_out, status.best, status.not_applied) == (last, last, 3)

    def test_an_empty_directory_is_a_lost_run(self, run):
        status = status_of(run)
        assert (status.run_id, status.state, status.step, status.loss) == (RUN_ID, "lost", 0, None)

    def test_a_failure_brings_its_traceback(self, run):
        write_json(
            run.exit,
            ExitRecord(RUN_ID, "failed", 9.0, "trainer", last_step=4, failed_rank=1, message="boom", traceback="T"),
        )
        status = status_of(run)
        assert (status.state, status.step, status.failed_rank) == ("failed", 4, 1)
        assert (status.message, status.traceback, status.hint) == ("boom", "T", "")
        record = RankError(1, "drafter", "cuda:1", "training", "OutOfMemory", "boom", "T", 8.0, hint="lower this")
        write_json(run.error(1), record)
        assert status_of(run).hint == "lower this"

    def test_a_non_finite_loss_is_kept(self, run):
        write_events(run, a_step(loss=float("nan")))
        assert str(status_of(run).loss) == "nan"

    @pytest.mark.parametrize("name", ["spec.json", "state.json", "exit.json"])
    def test_an_unreadable_file_is_named(self, run, name):
        (run.path / name).write_text("{")
        assert f"{name} is unreadable" in status_of(run).message

    @pytest.mark.parametrize(("boot", "said"), [("another", "started anew"), (None, "all were killed")])
    def test_why_it_is_lost(self, run, boot, said):
        write_json(run.state, RunState(RUN_ID, "running", 1.0, boot_id=boot or boot_id()))
        assert said in status_of(run).message


class TestChoice:
    """Which run is meant."""

    @pytest.fixture
    def root(self, tmp_path):
        root = RootLayout(tmp_path / "root")
        root.create()
        for day in ("01", "02", "03"):
            root.run(f"202001{day}-000000-aaaaaa").create()
        return root

    def test_the_newest_the_living_the_named(self, root):
        newest, middle = root.run("20200103-000000-aaaaaa"), root.run("20200102-000000-aaaaaa")
        assert choose_run(root, "") == newest
        with held(middle.run_lock):
            assert choose_run(root, "") == middle
            assert choose_run(root, newest.run_id) == newest
        assert run_ids(root) == [f"202001{day}-000000-aaaaaa" for day in ("03", "02", "01")]

    def test_none_and_wrong_ones(self, root, tmp_path):
        assert choose_run(RootLayout(tmp_path / "nowhere"), "") is None
        for wrong in ("20200104-000000-aaaaaa", "x", "../20200103-000000-aaaaaa", "\0"):
            with pytest.raises(DflashError) as caught:
                choose_run(root, wrong)
            assert caught.value.code == 3
