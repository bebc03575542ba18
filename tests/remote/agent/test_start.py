"""The verb start against real processes: one run per device, the first step, every way it can fail."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest

from remote.protocol.codec import loads_object
from remote.protocol.frames import Kind
from remote.protocol.identity import read_pidfile
from remote.protocol.layout import new_run_id
from remote.protocol.locks import LockKind, acquire, is_held, name_holder
from remote.protocol.records import ExitRecord, RunSpec, read_record


def test_start_returns_on_the_first_step_and_streams_what_came_before(far):
    reply = far.start("--load", "0.3")
    assert [event["kind"] for event in reply.events][-1] == "step"
    assert "run_started" in [event["kind"] for event in reply.events]
    status = reply.result["status"]
    assert (status["state"], status["by"]) == ("running", "tester@laptop")
    assert status["step"] >= 1
    assert reply.returncode == 0


def test_the_run_depends_on_nothing_of_the_shell_that_started_it(far):
    far.environment = {"CUDA_VISIBLE_DEVICES": "7", "SSL_CERT_FILE": "/host/only", "PYTHONPATH": "/nowhere"}
    far.running(spec={"environment": {"EXTRA": "a b\n$(c)", "OMP_NUM_THREADS": "1"}})
    leader = read_pidfile(far.run.trainer_pid)
    content = Path(f"/proc/{leader.pid}/environ").read_bytes()
    variables = dict(item.split(b"=", 1) for item in content.split(b"\0") if item)
    assert b"CUDA_VISIBLE_DEVICES" not in variables
    assert b"SSL_CERT_FILE" not in variables
    assert variables[b"EXTRA"] == b"a b\n$(c)"
    assert variables[b"PYTHONPATH"] == str(far.root.release(far.release)).encode()
    assert b"/usr/local/bin" in variables[b"PATH"]
    assert variables[b"DFLASH_RUN_ID"] == far.run.run_id.encode()


def test_the_supervisor_is_detached_and_the_trainer_holds_none_of_its_locks(far, wait_for):
    far.running()
    supervisor, leader = read_pidfile(far.run.supervisor_pid), read_pidfile(far.run.trainer_pid)
    sessions = {
        pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3] for pid in (supervisor.pid, leader.pid)
    }
    assert sessions[supervisor.pid] != str(supervisor.pid), "not a session leader: it can never get a terminal"
    assert sessions[leader.pid] == str(leader.pid)
    assert is_held(far.run.sup_lock)
    supervisor.send(signal.SIGKILL)
    wait_for(lambda: not supervisor.is_alive())
    assert leader.is_alive()
    assert not is_held(far.run.sup_lock), "a leaked descriptor would keep a dead supervisor's lock"


def test_a_second_start_is_refused_and_told_by_whom(far):
    far.running()
    first = far.run.run_id
    error = far.start().error
    assert error["code"] == 4
    assert first in error["cause"]
    assert "tester@laptop" in error["cause"]
    assert [path.name for path in far.root.runs.iterdir()] == [first], "a refused start leaves nothing"


def test_a_run_on_other_devices_is_no_obstacle(far):
    far.running(spec={"devices": ["cpu"]})
    # Not a CUDA index, so no GPU is asked for; a device of its own all the same.
    assert far.start(spec={"devices": ["other"]}).result["status"]["step"] >= 1


def test_twelve_concurrent_starts_give_exactly_one_run(far):
    replies = []
    threads = [threading.Thread(target=lambda: replies.append(far.start())) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = sorted(frame.json().get("code", 0) for reply in replies for frame in reply.frames[-1:])
    assert codes == [0] + [4] * 11
    assert len(list(far.root.runs.iterdir())) == 1


def test_the_same_run_id_is_a_query(far):
    run_id = new_run_id()
    far.running(run_id=run_id)
    leader = read_pidfile(far.run.trainer_pid)
    again = far.start(run_id=run_id).result
    assert again["status"]["run_id"] == run_id
    assert read_pidfile(far.run.trainer_pid) == leader
    far.ok("stop")
    assert far.start(run_id=run_id).result["status"]["state"] == "stopped", "an ended run is not launched again"


def test_a_client_that_goes_away_in_silence_leaves_no_agent_behind(far):
    call = far.begin("start", **far.request("--silent", limit=60))
    call.until(lambda frame: frame.kind is Kind.HEARTBEAT)
    call.process.stdout.close()
    assert call.process.wait(10) == 1
    call.kill()
    assert is_held(far.run.sup_lock)


@pytest.mark.parametrize("when", ["hello", "run_started"])
def test_a_client_killed_in_mid_start_and_retried_has_one_run(far, wait_for, when):
    request = far.request("--load", "1")
    call = far.begin("start", **request)
    call.until(lambda frame: frame.kind is Kind.HELLO if when == "hello" else frame.kind is Kind.EVENT)
    call.kill()
    assert far.call("start", **request).result["status"]["step"] == 1
    assert len(list(far.root.runs.iterdir())) == 1
    assert is_held(far.run.sup_lock)


def test_what_a_start_killed_before_its_launch_left_is_removed(far):
    dead = far.root.run("20200101-000000-aaaaaa")
    dead.create()
    dead.config.write_text("{}")
    far.running()
    assert not dead.path.exists()


def test_a_crash_before_the_first_step_gives_the_traceback(far):
    error = far.start("--crash").error
    assert error["code"] == 5
    assert error["cause"] == "RuntimeError: model.safetensors is torn"
    assert error["hint"] == "mend the model"
    assert "Traceback (most recent call last)" in error["detail"]
    record = read_record(ExitRecord, far.run.exit)
    assert (record.result, record.failed_rank) == ("failed", 0)


def test_a_leader_that_dies_at_once_gives_the_end_of_its_log(far):
    error = far.start("--fail-leader").error
    assert error["code"] == 5
    assert "NameError: name 'bucket_ids' is not defined" in error["detail"]


def test_silence_gives_the_last_lines_and_the_run_goes_on(far):
    error = far.start("--silent", limit=0.5).error
    assert error["code"] == 6
    assert far.call("status").result["state"] == "starting"


def test_a_long_load_that_talks_is_not_silence(far):
    argv = [sys.executable, "-c", "import time\nfor _ in range(20): print('.', flush=True); time.sleep(0.1)"]
    assert far.start(argv=argv, limit=1.0).error["code"] == 5, "it ended, after more than its limit in all"


def test_a_run_that_ends_well_before_its_first_step_is_no_failure(far):
    status = far.start("--finish-early").result["status"]
    assert (status["state"], status["step"]) == ("finished", 0)


def test_an_interpreter_that_is_none_is_refused_before_anything(far):
    assert far.start(python="/no/such/python").error["code"] == 7
    assert not list(far.root.runs.iterdir())


def test_an_argv_that_cannot_be_executed_fails_as_a_run(far):
    error = far.start(argv=["/no/such/program"]).error
    assert error["code"] == 5
    assert "No such file" in error["cause"]


def test_without_a_release_there_is_a_hint(bare):
    error = bare.start().error
    assert error["code"] == 7
    assert "dflashctl deploy" in error["hint"]


@pytest.mark.parametrize("run_id", ["", "../../etc", "20200101-000000-AAAAAA", "x" * 300])
def test_a_run_id_that_is_none_is_refused(far, run_id):
    request = far.request()
    request["spec"]["run_id"] = run_id
    assert far.call("start", **request).error["code"] == 2


def test_the_spec_is_complete(far):
    far.running(spec={"config": {"seed": 3}, "note": "ünïcode", "name": "first"})
    spec = read_record(RunSpec, far.run.spec)
    assert spec.argv[0] == sys.executable
    assert spec.release == far.release
    assert spec.environment["DFLASH_RUN_DIR"] == str(far.run.path)
    assert (spec.note, spec.config) == ("ünïcode", {"seed": 3})
    assert loads_object(far.run.config.read_bytes()) == {"seed": 3}


@pytest.mark.parametrize(
    "fields",
    [{"spec": {"environment": {"A=B": "x"}}}, {"spec": {"environment": {"A": "\0"}}}, {"spec": {"environment": {"": ""}}},
     {"argv": ["a\0b"]}, {"limit": "x"}, {"spec": {"devices": "cpu"}}, {"spec": {"stop_grace": "soon"}}],
)  # fmt: skip
def test_what_cannot_be_launched_is_refused_before_anything_is_written(far, fields):
    assert far.start(**fields).error["code"] == 2
    assert not list(far.root.runs.iterdir())


def test_a_start_that_waits_too_long_for_another_names_it(far, monkeypatch):
    descriptor = acquire(far.root.start_lock, LockKind.EXCLUSIVE)
    name_holder(descriptor, "start of run X by somebody")
    # The wait is ten seconds; the module under test runs in this process to shorten it.
    from remote.agent import start as module
    from remote.protocol.errors import DflashError

    monkeypatch.setattr(module, "LOCK_SECONDS", 0.1)
    spec = RunSpec("r", (), {}, ("cpu",))
    with pytest.raises(DflashError) as caught, module._start_lock(far.root, spec):
        pass
    assert caught.value.code == 4
    assert "start of run X by somebody" in caught.value.cause


class TestPreflight:
    """The trainer of the release judges before anything is launched."""

    @staticmethod
    def deploy(far, program: str) -> None:
        assert far.deploy(far.files(__main__=program)).result

    def test_what_it_reports_is_the_answer(self, far):
        self.deploy(
            far,
            "import sys\nprint('a library talks')\n"
            'print(\'{"error": "no model", "cause": "x", "hint": "make demo", "code": 7}\')\nsys.exit(7)\n',
        )
        error = far.start(preflight=True).error
        assert (error["code"], error["error"], error["hint"]) == (7, "no model", "make demo")
        assert not list(far.root.runs.iterdir())

    def test_one_that_breaks_is_a_preflight_error_with_its_output(self, far):
        self.deploy(far, "raise ImportError('no torch here')\n")
        error = far.start(preflight=True).error
        assert error["code"] == 7
        assert "no torch here" in error["detail"]

    def test_it_sees_the_configuration_and_the_release(self, far):
        self.deploy(
            far,
            "import sys, json\nassert sys.argv[1:3] == ['preflight', '--config-json']\n"
            "assert json.load(open(sys.argv[3])) == {'seed': 4}\nimport remote.protocol\n",
        )
        far.running(preflight=True, spec={"config": {"seed": 4}})


class TestResume:
    """RUN and RUN@STEP become the directory of a checkpoint of that run, and of no other."""

    def test_the_last_and_a_named_step(self, far):
        far.running()
        far.ok("stop")
        old = far.run.run_id
        saved = far.call("status", run=old).result["last_checkpoint"]
        other = far.root.run(old).checkpoints / "step-000001"
        other.mkdir()
        (far.root.run(old).checkpoints / ".step-000099.tmp").mkdir()
        for resume, expected in ((old, saved), ("last", saved), (f"{old}@1", str(other))):
            status = far.start("--steps", "1", run_id=new_run_id(), resume=resume).result["status"]
            assert status["resumed_from"] == expected
            assert loads_object((far.root.run(status["run_id"]).config).read_bytes())["resume"] == expected
            far.call("stop", run=status["run_id"])

    def test_what_is_not_there_is_told(self, far):
        far.running("--finish-early")
        assert far.start(resume="20200101-000000-aaaaaa").error["code"] == 3
        error = far.start(resume=far.run.run_id).error
        assert error["code"] == 7
        assert "no checkpoint" in error["error"]
        assert far.start(resume="last").error["code"] == 3
