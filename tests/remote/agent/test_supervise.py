"""What the supervisor notices while the run goes on, and what it survives."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from remote.agent.aftermath import remove_sockets, write_exit
from remote.agent.escalation import Escalation, Stage
from remote.agent.lifecycle import status_of
from remote.agent.statefile import StateFile
from remote.agent.watch import Watch
from remote.protocol.events import SaveProgress
from remote.protocol.identity import ProcessIdentity, write_pidfile
from remote.protocol.layout import RunLayout
from remote.protocol.locks import is_held
from remote.protocol.records import ExitRecord, HeldOut, RunState, read_record

RUN_ID = "20200101-000000-aaaaaa"


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / RUN_ID)
    layout.create()
    return layout


def test_an_alarm_reaches_state_and_status(far, wait_for):
    far.running("--alarm")
    alarms = wait_for(lambda: far.ok("status")["alarms"])
    assert [(alarm["kind"], alarm["step"]) for alarm in alarms] == [("loss_not_positive", 2)]
    far.ok("stop", now=True)
    assert far.ok("status")["alarms"] == alarms, "alarms outlive the run"


def test_what_was_measured_saved_and_refused_is_known_however_far_behind(far, wait_for):
    """`status` reads the end of the events alone; the supervisor heard them all."""
    far.running("--save-at", "2", "--refuse", "3", "--pause", "0.001", "--steps", "2000")
    # Far more than the 16 KiB in which status finds a step and looks no further.
    wait_for(lambda: far.run.events.stat().st_size > 1 << 17)
    status = wait_for(lambda: (found := far.ok("status"))["not_applied"] and found)
    checkpoint = str(far.run.checkpoints / "step-000002")
    measured = {"step": 2, "loss": 2.5, "accuracy": 0.25, "accept_len": 1.5, "checkpoint": checkpoint}
    assert (status["held_out"], status["best"]) == (measured, measured)
    assert (status["not_applied"], status["last_checkpoint"]) == (1, checkpoint)
    far.ok("stop", now=True)
    status = far.ok("status")
    assert (status["held_out"], status["best"], status["not_applied"]) == (measured, measured, 1)
    record = read_record(ExitRecord, far.run.exit)
    assert (record.best.step, record.held_out.loss, record.not_applied) == (2, 2.5, 1)


def test_a_stall_is_an_alarm_and_ends_nothing(far, wait_for):
    call = far.begin("start", **far.request("--pause", "1", spec={"stall_timeout": 0.3}))
    assert call.reply().result["status"]["step"] == 1
    alarms = wait_for(lambda: far.ok("status")["alarms"])
    assert alarms[0]["kind"] == "stall"
    assert "after step 1" in alarms[0]["message"]
    assert far.ok("status")["state"] == "running"


def test_garbage_in_state_json_is_told_and_outlived(far, wait_for):
    far.running()
    wait_for(lambda: read_record(RunState, far.run.state).state == "running")
    for garbage in (b"", b"{", b"[]", b'{"run_id": 5}', b"\xff\x00"):
        far.run.state.write_bytes(garbage)
        status = status_of(far.run)
        assert status.state == "running", "the locks and the events know"
        assert "state.json is unreadable" in status.message
    assert far.ok("stop", now=True)["status"]["state"] == "stopped"
    assert read_record(RunState, far.run.state).state == "stopped"


def test_a_newer_state_json_is_read(far):
    far.running()
    far.ok("stop", now=True)
    text = far.run.exit.read_text().replace('"schema": 1', '"schema": 2, "novelty": {"a": [1]}')
    far.run.exit.write_text(text)
    assert far.ok("status")["state"] == "stopped"


@pytest.mark.parametrize("result", ["paused", "lost", "", "x" * 10_000])
def test_a_result_that_is_unknown_is_lost_and_says_why(run, result):
    assert write_exit(run, ExitRecord(RUN_ID, result, 1.0, "a newer agent", message="waits for a GPU"))
    status = status_of(run)
    assert status.state == "lost"
    assert f"does not know, {result[:40]!r}: waits for a GPU" in status.message
    assert len(status.message) < 200


def test_an_unreadable_stop_json_is_a_stop(far, wait_for):
    far.running()
    far.run.stop.write_bytes(b"\x00garbage")
    wait_for(lambda: not is_held(far.run.sup_lock))
    assert far.ok("status")["state"] == "stopped"


def test_exit_json_lost_still_leaves_the_last_event(far):
    far.running("--steps", "2")
    far.call("logs", follow=True)
    far.run.exit.unlink()
    assert far.ok("status")["state"] == "finished"
    far.run.events.write_text("")
    assert far.ok("status")["state"] == "lost"


class TestStateFile:
    """A disk that cannot be written must not end the supervisor."""

    def test_the_old_state_stays_and_the_new_one_comes_later(self, run, monkeypatch):
        file = StateFile(run, RunState(RUN_ID, "starting", 1.0))
        # A real failure of the real write, as root too: no file may grow beyond zero bytes.
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            file.enter("running")
            file.alarm("non_finite", "loss is NaN", 3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert read_record(RunState, run.state).state == "starting"
        assert [path.name for path in run.path.iterdir() if path.name.endswith(".tmp")] == []
        file.flush(now=True)
        kept = read_record(RunState, run.state)
        assert kept.state == "running"
        assert {alarm.kind for alarm in kept.alarms} == {"state_unwritten", "non_finite"}

    def test_alarms_are_one_a_kind_and_a_later_kind_is_never_dropped(self, run):
        file = StateFile(run, RunState(RUN_ID, "running", 1.0))
        for step in range(1, 201):
            for _ in range(2):
                file.alarm("accuracy_one", f"accuracy 1.0 at step {step}", step)
        file.alarm("stall", "no step for 300 s after step 200", 200)
        often, stall = read_record(RunState, run.state).alarms
        assert (often.kind, often.count, often.step) == ("accuracy_one", 200, 1)
        assert often.message == "accuracy 1.0 at step 200"
        assert (stall.kind, stall.count, stall.step) == ("stall", 1, 200)

    def test_the_number_of_kinds_is_bounded(self, run):
        file = StateFile(run, RunState(RUN_ID, "running", 1.0))
        for number in range(105):
            file.alarm(f"kind {number}", "x")
        assert len(read_record(RunState, run.state).alarms) == 100

    def test_a_further_alarm_of_a_kind_does_not_wait_for_the_disk_but_gets_there(self, run):
        file = StateFile(run, RunState(RUN_ID, "running", 1.0))
        for step in range(1, 6):
            file.alarm("accuracy_one", "accuracy 1.0", step)
        assert read_record(RunState, run.state).alarms[0].count == 1
        file.flush()
        file.change(stop_by="tester")
        assert read_record(RunState, run.state).alarms[0].count == 5

    def test_what_may_change_at_every_step_does_not_wait_for_the_disk_but_gets_there(self, run):
        file = StateFile(run, RunState(RUN_ID, "running", 1.0))
        for count in range(1, 6):
            file.note(not_applied=count, held_out=HeldOut(count, math.nan, 0.0, 1.0))
        assert read_record(RunState, run.state).not_applied == 0
        file.change(stop_by="tester")
        kept = read_record(RunState, run.state)
        assert (kept.not_applied, kept.held_out.step) == (5, 5)
        assert math.isnan(kept.held_out.loss)

    def test_an_alarm_of_before_there_was_a_count_is_one(self, run):
        run.state.write_text(
            '{"run_id": "r", "state": "failed", "since": 1.0,'
            ' "alarms": [{"kind": "stall", "message": "x", "time": 1.0, "step": 2}]}'
        )
        assert [alarm.count for alarm in read_record(RunState, run.state).alarms] == [1]


class TestEscalation:
    """Message, TERM, KILL, each after its own wait."""

    def test_stages_and_progress(self, run, wait_for):
        escalation = Escalation(run, 0.2, 0.1)
        began = time.monotonic()
        while time.monotonic() - began < 0.4:
            escalation.progress([SaveProgress(time=0.0, step=1, written=1, total=2)])
            assert escalation.tick() == ""
        assert escalation.stage is Stage.MESSAGE
        assert "nobody" in wait_for(escalation.tick)
        assert escalation.stage is Stage.TERM
        escalation.progress([SaveProgress(time=0.0, step=1, written=2, total=2)])
        wait_for(lambda: escalation.tick() or escalation.stage is Stage.KILL)

    def test_hasten_only_shortens(self, run):
        escalation = Escalation(run, 100.0, 100.0)
        escalation.hasten(200.0)
        assert escalation.tick() == ""
        escalation.hasten(0.0)
        assert escalation.tick()
        assert escalation.stage is Stage.TERM


class TestWatch:
    """Which rank vanished first."""

    @pytest.fixture
    def processes(self, run):
        made = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
        for rank, process in enumerate(made[1:]):
            write_pidfile(run.rank_pid(rank), ProcessIdentity.of(process.pid))
        yield made
        for process in made:
            process.kill()
            process.communicate()

    def test_the_first_of_two(self, run, processes):
        with Watch(run, ProcessIdentity.of(processes[0].pid)) as watch:
            assert watch.wait(0.0) is False
            processes[2].kill()
            assert watch.wait(5.0) is False
            processes[1].kill()
            assert watch.wait(5.0) is False
            assert watch.first_dead == 1

    def test_of_two_at_once_the_one_that_filed_nothing(self, run, processes):
        run.error(0).write_text("{}")
        with Watch(run, ProcessIdentity.of(processes[0].pid)) as watch:
            assert watch.wait(0.0) is False
            for process in processes[1:]:
                process.kill()
                process.wait()
            assert watch.wait(5.0) is False
            assert watch.first_dead == 1
            assert watch.first_dead_at == pytest.approx(time.time(), abs=60)

    def test_the_leaders_end(self, run, processes):
        with Watch(run, ProcessIdentity.of(processes[0].pid)) as watch:
            processes[0].kill()
            assert watch.wait(5.0) is True
            assert watch.first_dead is None

    def test_a_rank_that_ended_well_has_removed_its_pidfile(self, run, processes):
        with Watch(run, ProcessIdentity.of(processes[0].pid)) as watch:
            watch.wait(0.0)
            run.rank_pid(0).unlink()
            processes[1].kill()
            assert watch.wait(5.0) is False
            assert watch.first_dead is None

    def test_a_rank_dead_before_it_was_seen(self, run, processes):
        processes[1].kill()
        processes[1].wait()
        with Watch(run, ProcessIdentity.of(processes[0].pid)) as watch:
            watch.wait(0.0)
            assert watch.first_dead == 0

    def test_no_descriptor_is_left(self, run, processes):
        before = len(list(Path("/proc/self/fd").iterdir()))
        with Watch(run, ProcessIdentity.of(processes[0].pid)) as watch:
            watch.wait(0.0)
        assert len(list(Path("/proc/self/fd").iterdir())) == before


class TestAftermath:
    """What is cleared away, and what is not."""

    def test_sockets_and_ring_are_removed(self, run, tmp_path):
        folder = Path(tempfile.mkdtemp(prefix="dflash-", dir=tmp_path))
        (folder / "events.sock").touch()
        ring = Path("/dev/shm") / folder.name
        ring.write_bytes(b"slots")
        run.sockets.write_text(f"{folder}\n")
        remove_sockets(run)
        assert not folder.exists()
        assert not ring.exists()

    @pytest.mark.parametrize("named", ["/", "/tmp", "relative/dflash-x", "{tmp}/precious", "{tmp}/dflash-link", "\0"])
    def test_nothing_else_is(self, run, tmp_path, named):
        precious = tmp_path / "precious"
        precious.mkdir()
        (precious / "file").touch()
        (tmp_path / "dflash-link").symlink_to(precious)
        run.sockets.write_text(named.format(tmp=tmp_path))
        remove_sockets(run)
        assert (precious / "file").exists()

    def test_exit_json_is_written_once(self, run):
        assert write_exit(run, ExitRecord(RUN_ID, "stopped", 1.0, "trainer"))
        assert write_exit(run, ExitRecord(RUN_ID, "failed", 2.0, "agent"))
        assert read_record(ExitRecord, run.exit).result == "stopped"

    def test_a_directory_that_is_gone_gives_up_at_once(self, run):
        run.path.rename(run.path.with_name("gone"))
        assert write_exit(run, ExitRecord(RUN_ID, "stopped", 1.0, "trainer")) is False
