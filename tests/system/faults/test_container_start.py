"""A container that was stopped and started: its run is lost and said to be, no reused pid is signalled, the next start works."""

from __future__ import annotations

import json

import pytest
from system.faults.laptop import REPOSITORY, Laptop, wait_for

from remote.protocol.errors import ExitCode
from remote.protocol.identity import ProcessIdentity, write_pidfile
from remote.protocol.layout import RunLayout

MODEL = "/dev/shm/target"
ANEW = "the machine or container was started anew since"


@pytest.fixture
def training(laptop, real_proxmox, tree):
    """A laptop whose container trains."""
    laptop.deploy(tree)
    return laptop, laptop.start()


def run_of(laptop: Laptop, run: str) -> RunLayout:
    return RunLayout(laptop.bed[laptop.ct].path(f"{laptop.root}/runs/{run}"))


def boot_id(laptop: Laptop) -> str:
    return laptop.bed[laptop.ct].run("cat", "/proc/sys/kernel/random/boot_id").stdout.strip()


@pytest.mark.parametrize("ct", [pytest.param("200", marks=pytest.mark.long), "201"])
def test_stopped_and_started_the_run_is_lost(laptop, real_proxmox, tree, ct):
    laptop.ct = ct
    laptop.deploy(tree)
    run = laptop.start()
    recorded = json.loads(run_of(laptop, run).state.read_text())["boot_id"]
    assert recorded == boot_id(laptop)
    real_proxmox[ct].restart()
    assert recorded != boot_id(laptop)
    status = laptop.answer("status")
    assert (status["run_id"], status["state"], status["message"]) == (run, "lost", ANEW)
    assert status["step"] >= 1
    # A stop has nothing to do, and says what there is.
    stopped = laptop("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert f"run {run} was not running: lost at step" in stopped.stdout
    # logs still works, and following ends at once with the reason.
    assert "run_started" in laptop("logs").stdout
    followed = laptop("logs", "--follow")
    assert followed.returncode == ExitCode.FAILED
    assert "the run is lost" in followed.stderr
    again = laptop.start()
    assert again != run
    assert {each["run_id"]: each["state"] for each in laptop.answer("runs")["runs"]} == {run: "lost", again: "running"}
    assert laptop.answer("stop")["status"]["state"] == "stopped"


def test_while_it_is_stopped_every_verb_says_so_and_the_release_is_still_there(training, real_proxmox, tree):
    laptop, run = training
    real_proxmox["200"].stop()
    for words in (["status"], ["stop"], ["start"], ["deploy", "--source", str(tree)], ["logs"], ["restart"]):
        done = laptop(*words)
        assert done.returncode == ExitCode.NO_ANSWER, words
        assert "container 200 on 10.1.2.6 is stopped" in done.stderr
    real_proxmox["200"].start()
    assert "nothing sent" in laptop("deploy", "--source", str(tree)).stdout
    assert laptop.answer("status", "--run", run)["state"] == "lost"


def test_a_follower_is_told_why_its_log_ended(training, real_proxmox):
    laptop, _ = training
    following = laptop.begin("logs", "--follow")
    following.stdout.readline()
    real_proxmox["200"].stop()
    wait_for(lambda: "reconnecting" in following.stderr.readline())
    real_proxmox["200"].start()
    _, err = following.communicate(timeout=60)
    assert following.returncode == ExitCode.FAILED
    assert "the run is lost" in err
    assert ANEW in err


def test_shut_down_in_order_the_run_ends_without_a_checkpoint_and_is_not_running(training, real_proxmox):
    laptop, run = training
    # SIGTERM to everybody: a rank ends at once, the supervisor has a moment for its last word.
    assert real_proxmox.pct("shutdown", "200").returncode == 0
    real_proxmox["200"].start()
    status = laptop.answer("status")
    assert status["run_id"] == run
    assert status["state"] in ("failed", "lost")
    assert status["last_checkpoint"] == ""
    assert laptop.start() != run


def test_a_reused_pid_is_left_alone(training, real_proxmox):
    laptop, run = training
    layout = run_of(laptop, run)
    real_proxmox["200"].restart()
    # Pids begin at 1 again: somebody else has each of those that the run had, the same start ticks even.
    bystander = "sleep 300 </dev/null >/dev/null 2>&1 & echo $!"
    pid = int(real_proxmox["200"].run("sh", "-c", bystander).stdout)
    stat = real_proxmox["200"].run("cat", f"/proc/{pid}/stat").stdout
    ticks = int(stat[stat.rindex(")") + 1 :].split()[19])
    recorded = json.loads(layout.state.read_text())["boot_id"]
    for path in (layout.supervisor_pid, layout.trainer_pid, layout.rank_pid(0), layout.rank_pid(1)):
        write_pidfile(path, ProcessIdentity(recorded, pid, ticks))
    for words in (["stop"], ["stop", "--now"]):
        assert laptop(*words).returncode == 0
    assert laptop.answer("status")["state"] == "lost"
    again = laptop.start()
    assert laptop.answer("stop", "--now")["status"]["run_id"] == again
    assert real_proxmox["200"].run("cat", f"/proc/{pid}/comm").stdout == "sleep\n"


def test_a_model_in_shared_memory_that_is_gone_is_missed_before_anything_starts(laptop, real_proxmox, tmp_path):
    # The real trainer: it is its preflight that looks.
    laptop.python = real_proxmox["200"].python
    laptop.deploy(REPOSITORY, "--no-selfcheck")
    config = tmp_path / "own.toml"
    config.write_text(f'device = "cpu"\ntarget_model = "{MODEL}"\ndata_dir = "/workspace/none"\n')
    real_proxmox["200"].run("mkdir", MODEL)
    real_proxmox["200"].restart()
    done = laptop("start", "--config", str(config))
    assert done.returncode == ExitCode.PREFLIGHT, done.stderr
    assert MODEL in done.stderr
    assert "a container start empties /dev/shm" in done.stderr
    assert laptop.answer("runs")["runs"] == []
