"""The verb stop, and what becomes of a run whose parts are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from remote.agent.processes import carriers, recorded_ranks
from remote.protocol.files import write_json
from remote.protocol.identity import ProcessIdentity, boot_id, read_pidfile, write_pidfile
from remote.protocol.layout import RootLayout
from remote.protocol.locks import LockKind, acquire, is_held
from remote.protocol.records import ExitRecord, RunSpec, RunState, read_record

NO_FILES = (
    "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); os.execv(sys.argv[1], sys.argv[1:])"
)


def ended(far) -> ExitRecord:
    """Return the exit record, after checking that nothing of the run lives."""
    run = far.run
    assert not is_held(run.run_lock)
    assert not is_held(run.sup_lock)
    assert not carriers(run.run_id)
    record = read_record(ExitRecord, run.exit)
    assert record is not None
    return record


def test_stop_writes_a_checkpoint_and_shows_its_progress(far):
    far.running("--sockets")
    sockets = far.run.sockets.read_text()
    reply = far.call("stop", by="tester")
    kinds = [event["kind"] for event in reply.events]
    assert "save_progress" in kinds
    assert reply.result["status"]["state"] == "stopped"
    record = ended(far)
    kept = f"stopped at step {record.last_step}, checkpoint {record.last_checkpoint}"
    assert reply.result["message"] == f"run {far.run.run_id} {kept}"
    assert far.ok("stop")["message"] == f"run {far.run.run_id} was not running: {kept}"
    assert (record.result, record.by, record.code) == ("stopped", "tester", 0)
    assert record.last_checkpoint
    assert not Path(sockets).exists()


def test_a_stop_whose_checkpoint_is_lost_is_an_error_that_names_the_last_good_one(far, wait_for):
    far.running("--fail-save", "--save-at", "2")
    saved = wait_for(lambda: far.ok("status")["last_checkpoint"])
    error = far.call("stop").error
    assert (error["code"], error["error"]) == (1, f"run {far.run.run_id} failed while it was stopped")
    assert "No space left on device" in error["cause"]
    assert saved in error["hint"]
    assert ended(far).result == "failed"
    assert far.ok("stop")["status"]["state"] == "failed", "a second stop finds it ended, and that is what it asked for"


def test_a_lost_checkpoint_without_an_earlier_one(far):
    far.running("--fail-save")
    assert "no checkpoint" in far.call("stop").error["hint"]


def test_a_second_stop_and_a_stop_of_nothing(far):
    assert far.call("stop").error["code"] == 3
    far.running()
    far.ok("stop")
    again = far.call("stop")
    assert again.result["status"]["state"] == "stopped"
    assert again.returncode == 0


def test_two_stops_at_once_both_succeed(far):
    far.running("--save", "0.5")
    first, second = far.begin("stop"), far.begin("stop")
    assert first.reply().result["status"]["state"] == "stopped"
    assert second.reply().result["status"]["state"] == "stopped"


def test_stop_while_starting(far):
    request = far.request("--load", "0.7")
    call = far.begin("start", **request)
    call.until(lambda frame: b"run_started" in frame.payload)
    assert far.call("stop").result["status"]["state"] == "stopped"
    status = call.reply().result["status"]
    assert (status["state"], status["step"]) == ("stopped", 0), "whoever waits for the first step can tell"


def test_checkpoint_progress_extends_the_grace(far):
    far.running("--save", "2")
    assert far.call("stop", grace=0.6).result["status"]["state"] == "stopped"
    assert ended(far).last_checkpoint, "2 s of saving outlast a grace of 0.6 s, because it progresses"


def test_a_trainer_that_ignores_the_message_and_term_is_killed(far):
    far.running("--ignore-stop", "--ignore-term", "--ranks", "3")
    reply = far.call("stop", grace=0.2)
    assert reply.result["status"]["state"] == "stopped"
    assert ended(far).signal == signal.SIGKILL
    log = far.run.supervisor_log.read_text()
    assert "sent TERM to the leader" in log
    assert "sent KILL" in log


def test_now_writes_no_checkpoint(far):
    far.running("--ignore-stop")
    far.ok("stop", now=True)
    record = ended(far)
    assert (record.result, record.last_checkpoint, record.signal) == ("stopped", "", signal.SIGTERM)


def test_a_hasty_stop_overtakes_a_patient_one(far):
    far.running("--ignore-stop")
    patient = far.begin("stop", grace=60)
    patient.until(lambda frame: b'"step"' in frame.payload)
    far.ok("stop", now=True)
    assert patient.reply().result["status"]["state"] == "stopped"


def test_a_stop_without_its_client_goes_on(far, wait_for):
    far.running("--ignore-stop")
    call = far.begin("stop", grace=0.3)
    wait_for(far.run.stop.exists)
    call.kill()
    wait_for(lambda: not is_held(far.run.sup_lock))
    assert ended(far).result == "stopped"


def test_a_full_disk_does_not_keep_a_run_from_being_stopped(far):
    far.running()
    # No file may be written at all, as on a full disk, but for root too.
    far.prefix = [sys.executable, "-c", NO_FILES]
    error = far.call("stop").error
    assert error["code"] == 9
    assert "stop --now" in error["hint"]
    assert far.ok("stop", now=True)["status"]["state"] == "failed"
    assert ended(far).signal == signal.SIGKILL


def test_a_grandchild_that_left_session_and_group_is_found(far):
    far.running("--grandchild")
    strays = [identity for identity in carriers(far.run.run_id) if identity not in known(far)]
    assert len(strays) == 1
    far.ok("stop")
    assert not strays[0].is_alive()
    ended(far)


def known(far) -> list[ProcessIdentity]:
    return [*recorded_ranks(far.run).values(), read_pidfile(far.run.trainer_pid)]


def test_a_process_with_a_similar_run_id_is_left_alone(far):
    far.running()
    other = {"DFLASH_RUN_ID": far.run.run_id + "0", "X": f"\nDFLASH_RUN_ID={far.run.run_id}"}
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=other)
    try:
        far.ok("stop", now=True)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


class TestOrphaned:
    """kill -9 of the supervisor."""

    def test_stop_still_works_and_writes_a_checkpoint(self, far):
        far.running()
        far.kill_supervisor()
        assert far.call("status").result["state"] == "orphaned"
        assert far.start().error["code"] == 4, "the devices are still in use"
        reply = far.call("stop", by="tester")
        assert reply.result["status"]["state"] == "stopped"
        record = ended(far)
        assert (record.by, bool(record.last_checkpoint)) == ("agent", True)
        assert read_record(RunState, far.run.state).state == "stopped"

    def test_stop_escalates_itself(self, far):
        far.running("--ignore-stop", "--ignore-term", "--grandchild")
        far.kill_supervisor()
        assert far.call("stop", grace=0.1).result["status"]["state"] == "stopped"
        assert ended(far).result == "stopped"

    def test_a_stop_that_stands_in_outlives_its_client(self, far, wait_for):
        far.running("--ignore-stop")
        far.kill_supervisor()
        call = far.begin("stop", grace=0.5)
        call.until(lambda frame: b"the supervisor is dead" in frame.payload)
        call.process.stdout.close()
        assert call.process.wait(20) == 0
        call.kill()
        assert ended(far).result == "stopped"

    def test_two_stops_at_once(self, far):
        far.running("--ignore-stop")
        far.kill_supervisor()
        first, second = far.begin("stop", grace=0.3), far.begin("stop", grace=0.3)
        assert first.reply().result["status"]["state"] == "stopped"
        assert second.reply().result["status"]["state"] == "stopped"

    def test_a_supervisor_killed_in_the_midst_of_a_stop(self, far, wait_for):
        far.running("--ignore-stop")
        call = far.begin("stop", grace=1.0)
        wait_for(far.run.stop.exists)
        far.kill_supervisor()
        assert call.reply().result["status"]["state"] == "stopped"
        ended(far)

    def test_what_cannot_end_in_time_is_named(self, far):
        far.running("--ignore-stop")
        far.kill_supervisor()
        lock = acquire(far.run.run_lock, LockKind.SHARED)
        try:
            error = far.call("stop", now=True, timeout=1.5).error
        finally:
            os.close(lock)
        assert error["code"] == 9
        assert "a process without a record holds run.lock" in error["cause"]
        assert far.call("stop").result["status"]["state"] == "lost"


class TestKilledParts:
    """What the supervisor makes of a rank, a leader, or everything being killed."""

    @pytest.mark.parametrize(("rank", "role"), [(0, "drafter"), (1, "target")])
    def test_a_killed_rank_ends_the_run_and_is_named(self, far, wait_for, rank, role):
        far.running()
        assert read_pidfile(far.run.rank_pid(rank)).send(signal.SIGKILL)
        wait_for(far.run.exit.exists)
        wait_for(lambda: not is_held(far.run.sup_lock))
        record = ended(far)
        assert (record.result, record.failed_rank) == ("failed", rank)
        assert f"rank {rank} ({role}) died without a word" in record.message
        status = far.call("status").result
        assert (status["state"], status["failed_rank"]) == ("failed", rank)

    def test_a_killed_leader_leaves_no_rank_and_is_no_ranks_fault(self, far, wait_for):
        far.running("--ranks", "4", "--grandchild")
        ranks = list(recorded_ranks(far.run).values())
        assert len(ranks) == 4
        read_pidfile(far.run.trainer_pid).send(signal.SIGKILL)
        wait_for(lambda: not is_held(far.run.sup_lock))
        assert not any(rank.is_alive() for rank in ranks)
        record = ended(far)
        assert (record.result, record.failed_rank, record.signal) == ("failed", None, signal.SIGKILL)
        assert far.start("--finish-early").result

    def test_no_second_run_while_a_rank_of_a_killed_leader_lives(self, far, wait_for):
        far.running("--ranks", "2")
        rank = read_pidfile(far.run.rank_pid(1))
        # A rank that cannot die at once: stopped processes take no signal but KILL, which comes two seconds later.
        holder = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys, time; from pathlib import Path; from remote.protocol.locks import *;"
                "acquire(Path(sys.argv[1]), LockKind.SHARED); print(flush=True); time.sleep(60)",
                str(far.run.run_lock),
            ],
            stdout=subprocess.PIPE,
            cwd=Path.cwd(),
        )
        try:
            holder.stdout.readline()
            read_pidfile(far.run.trainer_pid).send(signal.SIGKILL)
            wait_for(lambda: not rank.is_alive())
            assert far.start().error["code"] == 4
            assert not far.run.exit.exists()
        finally:
            holder.kill()
            holder.communicate()
        wait_for(far.run.exit.exists)

    def test_everything_killed_is_lost(self, far, wait_for):
        far.running()
        leader = read_pidfile(far.run.trainer_pid)
        far.kill_supervisor()
        leader.send(signal.SIGKILL)
        wait_for(lambda: not is_held(far.run.run_lock))
        status = far.call("status").result
        assert (status["state"], "all were killed" in status["message"]) == ("lost", True)
        assert far.call("stop").result["status"]["state"] == "lost"
        assert far.start("--finish-early").result

    def test_stop_ends_what_a_lost_run_has_left(self, far, wait_for):
        far.running("--grandchild")
        leader = read_pidfile(far.run.trainer_pid)
        far.kill_supervisor()
        leader.send(signal.SIGKILL)
        wait_for(lambda: not is_held(far.run.run_lock))
        (stray,) = carriers(far.run.run_id)
        message = far.ok("stop")["message"]
        assert f"killed what it had left: pid {stray.pid}" in message
        wait_for(lambda: not stray.is_alive())

    def test_a_deleted_run_directory_ends_the_run(self, far, wait_for):
        # Silent, so that it does not end by itself when it can write no more.
        assert far.start("--pause", "60", limit=0.3).error["code"] == 6
        run, leader, supervisor = far.run, read_pidfile(far.run.trainer_pid), read_pidfile(far.run.supervisor_pid)
        run.path.rename(far.root.path / "gone")
        wait_for(lambda: not supervisor.is_alive())
        assert not leader.is_alive()
        assert not carriers(run.run_id)

    @pytest.mark.parametrize("again", ["checkpoints", "sup.lock"])
    def test_so_does_a_deleted_one_that_the_trainer_makes_anew(self, far, wait_for, again):
        # Silent, so that it writes nothing that could tell of the loss.
        assert far.start("--pause", "60", limit=0.3).error["code"] == 6
        run, leader, supervisor = far.run, read_pidfile(far.run.trainer_pid), read_pidfile(far.run.supervisor_pid)
        # One rename: no moment without the directory, as when a checkpoint falls between two looks.
        made = far.root.path / "made"
        (made / "checkpoints").mkdir(parents=True)
        (made / again).touch()
        supervisor.send(signal.SIGSTOP)
        run.path.rename(far.root.path / "gone")
        made.rename(run.path)
        supervisor.send(signal.SIGCONT)
        wait_for(lambda: not supervisor.is_alive())
        assert not leader.is_alive()
        assert not carriers(run.run_id)
        status = far.ok("status")
        assert (status["state"], "directory was deleted" in status["message"]) == ("failed", True)
        assert far.running()["run_id"] != run.run_id


class TestStaleState:
    """Files that name living processes which are not the run's."""

    def stale(self, far, **identity) -> tuple[subprocess.Popen[bytes], RootLayout]:
        run = far.root.run("20200101-000000-aaaaaa")
        run.create()
        bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        real = ProcessIdentity.of(bystander.pid)
        claimed = ProcessIdentity(
            **{"boot_id": boot_id(), "pid": real.pid, "start_ticks": real.start_ticks, **identity}
        )
        write_json(run.spec, RunSpec(run.run_id, ("x",), {}, ("cpu",), kill_grace=0.1))
        write_json(run.state, RunState(run.run_id, "running", 0.0, boot_id=claimed.boot_id, trainer_pid=claimed.pid))
        for path in (run.supervisor_pid, run.trainer_pid, run.rank_pid(0)):
            write_pidfile(path, claimed)
        return bystander, run

    def test_without_locks_nothing_is_believed(self, far):
        bystander, run = self.stale(far)
        try:
            assert far.call("status").result["state"] == "lost"
            assert far.call("stop", now=True, run=run.run_id).result["status"]["state"] == "lost"
            assert far.start("--finish-early").result
            assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait()

    @pytest.mark.parametrize("changed", [{"start_ticks": 1}, {"boot_id": "another"}])
    def test_with_a_lock_held_a_reused_pid_is_still_not_signalled(self, far, changed):
        bystander, run = self.stale(far, **changed)
        lock = acquire(run.run_lock, LockKind.SHARED)
        try:
            error = far.call("stop", now=True, run=run.run_id, timeout=0.5).error
            assert error["code"] == 9
            assert bystander.poll() is None
        finally:
            os.close(lock)
            bystander.kill()
            bystander.wait()

    def test_another_boot_is_told(self, far):
        bystander, run = self.stale(far, boot_id="another")
        bystander.kill()
        bystander.wait()
        assert "started anew" in far.call("status", run=run.run_id).result["message"]
