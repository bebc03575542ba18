"""Finding and ending the processes of a run, and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from remote.agent import aftermath
from remote.agent.escalation import Escalation, Stage, kill_all
from remote.agent.processes import carriers, recorded, recorded_ranks, remains
from remote.protocol.identity import ProcessIdentity, write_pidfile
from remote.protocol.layout import RunLayout
from remote.protocol.locks import LockKind, acquire

RUN_ID = "20200101-000000-aaaaaa"
SLEEP = [sys.executable, "-S", "-c", "print(flush=True); input()"]


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / RUN_ID)
    layout.create()
    return layout


@pytest.fixture
def spawn():
    """Return a function that starts a sleeping process with the given environment."""
    made: list[subprocess.Popen[bytes]] = []

    def begin(**environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            SLEEP, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        # Only after exec does /proc show the new environment.
        process.stdout.readline()
        made.append(process)
        return process

    yield begin
    for process in made:
        process.kill()
        process.communicate()


@pytest.fixture
def lock(run):
    descriptor = acquire(run.run_lock, LockKind.SHARED)
    yield
    os.close(descriptor)


def test_pidfiles_are_believed_only_with_the_lock(run, spawn):
    process = spawn()
    write_pidfile(run.trainer_pid, ProcessIdentity.of(process.pid))
    write_pidfile(run.rank_pid(3), ProcessIdentity.of(process.pid))
    assert recorded(run) == {}
    descriptor = acquire(run.run_lock, LockKind.SHARED)
    assert sorted(recorded(run)) == ["leader", "rank 3"]
    os.close(descriptor)
    assert recorded(run) == {}
    assert sorted(recorded_ranks(run)) == [3]


@pytest.mark.usefixtures("lock")
def test_dead_and_foreign_pidfiles_are_left_out(run, spawn):
    process = spawn()
    write_pidfile(run.rank_pid(0), ProcessIdentity.of(process.pid))
    process.kill()
    process.wait()
    run.rank_pid(1).write_text("1\n")
    run.rank_pid(2).write_text("garbage")
    (run.path / "ranks" / "rank-x.pid").write_text("1\nb\n2\n")
    (run.path / "ranks" / ".rank-5.pid.99.tmp").write_text("1\nb\n2\n")
    assert recorded(run) == {}
    assert list(recorded_ranks(run)) == [0]


@pytest.mark.parametrize(
    "environment",
    [
        {"DFLASH_RUN_ID": RUN_ID + "0"},
        {"DFLASH_RUN_ID": RUN_ID[:-1]},
        {"XDFLASH_RUN_ID": RUN_ID},
        {"OTHER": f"\nDFLASH_RUN_ID={RUN_ID}\n"},
        {"OTHER": f"DFLASH_RUN_ID={RUN_ID}"},
        {},
    ],
)
def test_only_the_exact_variable_counts(spawn, environment):
    stranger = spawn(**environment)
    assert stranger.pid not in {identity.pid for identity in carriers(RUN_ID)}


def test_a_carrier_is_found_and_killed_and_a_stranger_lives(run, spawn):
    ours, stranger = spawn(DFLASH_RUN_ID=RUN_ID, A="b"), spawn(DFLASH_RUN_ID=RUN_ID + "x")
    assert [identity.pid for identity in remains(run).processes] == [ours.pid]
    assert kill_all(run) == [ours.pid]
    ours.wait()
    assert not remains(run)
    assert stranger.poll() is None


def test_we_are_never_among_them(monkeypatch):
    program = (
        "import os; from remote.agent.processes import carriers\n"
        f"assert [each.pid for each in carriers({RUN_ID!r})] == [], carriers({RUN_ID!r})"
    )
    root = str(Path(__file__).parents[3])
    subprocess.run([sys.executable, "-c", program], env={"DFLASH_RUN_ID": RUN_ID, "PYTHONPATH": root}, check=True)


@pytest.mark.usefixtures("lock")
def test_what_remains_is_described(run, spawn):
    assert remains(run).describe() == "a process without a record holds run.lock"
    process = spawn(DFLASH_RUN_ID=RUN_ID)
    left = remains(run)
    assert f"pid {process.pid} (state S)" in left.describe()
    process.kill()
    process.wait()
    assert "(state gone)" in left.describe()


class TestClearRemains:
    """After the leader's end."""

    def test_nothing_left_takes_no_time_and_kills_nobody(self, run):
        assert aftermath.clear_remains(run, lambda *_: pytest.fail("no alarm")) == []

    def test_stragglers_are_killed_after_the_grace(self, run, spawn, monkeypatch):
        monkeypatch.setattr(aftermath, "GRACE_SECONDS", 0.1)
        process = spawn(DFLASH_RUN_ID=RUN_ID)
        # Reaped at once, as init would do it: a zombie is no process of the run.
        assert aftermath.clear_remains(run, lambda *_: None) == [process.pid]

    def test_what_cannot_be_killed_is_an_alarm_and_waited_for(self, run, monkeypatch):
        monkeypatch.setattr(aftermath, "GRACE_SECONDS", 0.0)
        monkeypatch.setattr(aftermath, "_ALARM_SECONDS", 0.0)
        descriptor = acquire(run.run_lock, LockKind.SHARED)
        alarms = []

        def alarm(kind: str, message: str) -> None:
            alarms.append((kind, message))
            if len(alarms) == 2:
                os.close(descriptor)

        aftermath.clear_remains(run, alarm)
        assert alarms[0] == ("cannot_end", "still alive after KILL: a process without a record holds run.lock")


class TestSignals:
    """Whom an escalation reaches."""

    @pytest.mark.usefixtures("lock")
    def test_term_goes_to_the_leader_alone(self, run, spawn):
        leader, rank = spawn(), spawn()
        write_pidfile(run.trainer_pid, ProcessIdentity.of(leader.pid))
        write_pidfile(run.rank_pid(0), ProcessIdentity.of(rank.pid))
        assert f"pid {leader.pid}" in Escalation(run, 0.0, 60.0).tick()
        assert leader.wait() == -15
        assert rank.poll() is None

    @pytest.mark.usefixtures("lock")
    def test_with_a_dead_leader_it_goes_to_the_ranks(self, run, spawn):
        ranks = [spawn(), spawn()]
        for number, rank in enumerate(ranks):
            write_pidfile(run.rank_pid(number), ProcessIdentity.of(rank.pid))
        assert "rank 0, rank 1" in Escalation(run, 0.0, 60.0).tick()
        assert [rank.wait() for rank in ranks] == [-15, -15]

    @pytest.mark.usefixtures("lock")
    def test_kill_reaches_every_session(self, run, spawn):
        leader, rank, stray = spawn(), spawn(), spawn(DFLASH_RUN_ID=RUN_ID)
        write_pidfile(run.trainer_pid, ProcessIdentity.of(leader.pid))
        write_pidfile(run.rank_pid(0), ProcessIdentity.of(rank.pid))
        escalation = Escalation(run, 0.0, 0.0)
        escalation.tick()
        assert "sent KILL" in escalation.tick()
        assert escalation.stage is Stage.KILL
        assert rank.wait() == stray.wait() == -9
        assert leader.wait() in (-9, -15)

    def test_without_the_lock_nobody_recorded_is_touched(self, run, spawn):
        stranger = spawn()
        write_pidfile(run.trainer_pid, ProcessIdentity.of(stranger.pid))
        write_pidfile(run.rank_pid(0), ProcessIdentity.of(stranger.pid))
        escalation = Escalation(run, 0.0, 0.0)
        assert "nobody" in escalation.tick()
        assert escalation.tick() == ""
        assert stranger.poll() is None
