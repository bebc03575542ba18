"""The verb restart against real processes: one call, and nothing that happens to the client leaves half of it."""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path

import pytest

from remote.agent.lifecycle import status_of
from remote.agent.restart import ring_bytes
from remote.protocol.files import write_durably, write_json
from remote.protocol.frames import Frame, Kind
from remote.protocol.identity import ProcessIdentity, write_pidfile
from remote.protocol.layout import RunLayout, new_run_id
from remote.protocol.locks import LockKind, acquire, is_held
from remote.protocol.records import RunSpec, read_record


def restart(far, *switches, **request):
    """Restart the newest run with the stand-in."""
    return far.call("restart", **far.request(*switches, **{"run": far.run.run_id, **request}))


def phase(name: str):
    """Return the condition for a frame that is this phase of the verb."""

    def holds(frame: Frame) -> bool:
        return frame.kind is Kind.EVENT and frame.json().get("phase") == name

    return holds


def phases(reply) -> list[str]:
    return [event["phase"] for event in reply.events if event.get("role") == "agent"]


def names(far) -> list[str]:
    return sorted(path.name for path in far.root.runs.iterdir())


def living(far) -> list[str]:
    return [name for name in names(far) if is_held(far.root.run(name).sup_lock)]


def test_the_old_run_is_stopped_with_its_checkpoint_and_the_new_one_trains(far):
    far.running()
    old = far.run
    reply = restart(far, spec={"restarted_from": old.run_id})
    status = reply.result["status"]
    assert (status["state"], status["restarted_from"]) == ("running", old.run_id)
    assert phases(reply) == ["stopping", "stopped", "launched"]
    ended = status_of(old)
    assert (ended.state, bool(ended.last_checkpoint)) == ("stopped", True)
    assert any(f"run {old.run_id} stopped at step" in event.get("text", "") for event in reply.events)
    assert living(far) == [status["run_id"]]


def test_without_a_living_run_it_is_a_start(far):
    far.running()
    far.ok("stop")
    reply = restart(far)
    assert reply.result["status"]["step"] >= 1
    assert phases(reply) == ["launched"]


def test_now_writes_no_checkpoint(far):
    far.running("--ignore-stop")
    old = far.run
    assert restart(far, now=True).result["status"]["step"] >= 1
    assert status_of(old).last_checkpoint == ""


class TestRefused:
    """Whatever is wrong with the new run leaves the old one as it is."""

    @staticmethod
    def untouched(far, reply, code: int) -> None:
        assert reply.error["code"] == code
        (name,) = living(far)
        assert status_of(far.root.run(name)).state == "running"
        assert not far.root.run(name).stop.exists()

    def test_a_preflight_that_fails(self, far):
        far.running()
        main = 'import sys\nprint(\'{"error": "no model", "code": 7}\')\nsys.exit(7)\n'
        release = far.deploy(far.files(__main__=main)).result["release"]
        reply = restart(far, preflight=True, spec={"release": release})
        self.untouched(far, reply, 7)
        assert "no model" in reply.error["error"]
        assert names(far) == living(far)

    def test_a_release_that_is_not_there(self, far):
        far.running()
        self.untouched(far, restart(far, spec={"release": "0" * 12}), 7)

    def test_gpus_that_are_not_there(self, far):
        far.running()
        self.untouched(far, restart(far, spec={"devices": ["cpu", "7"]}), 7)

    def test_a_checkpoint_that_is_not_there(self, far):
        far.running()
        self.untouched(far, restart(far, resume=f"{far.run.run_id}@99"), 7)
        self.untouched(far, restart(far, resume="20200101-000000-aaaaaa"), 3)
        self.untouched(far, restart(far, resume=far.run.run_id, now=True), 7)

    def test_a_run_that_is_not_there(self, far):
        far.running()
        self.untouched(far, restart(far, run="20200101-000000-aaaaaa"), 3)

    def test_two_runs_in_the_way(self, far):
        far.running()
        far.running(spec={"devices": ["other"]})
        reply = restart(far, spec={"devices": ["cpu"]})
        assert reply.error["code"] == 4
        assert all(name in reply.error["cause"] for name in names(far))
        assert len(living(far)) == 2


def test_a_run_on_other_devices_goes_on(far):
    far.running(spec={"devices": ["other"]})
    neighbour = far.run.run_id
    far.running()
    status = restart(far).result["status"]
    assert living(far) == sorted([neighbour, status["run_id"]])


def test_a_living_run_makes_room_for_one_that_ended(far):
    far.running("--finish-early")
    first = far.run.run_id
    far.running()
    status = restart(far, run=first).result["status"]
    assert living(far) == [status["run_id"]]


class TestResume:
    """A bare --resume goes on from the checkpoint that the stop wrote; the client sends the run's id."""

    def test_it_is_the_checkpoint_of_the_stop(self, far):
        far.running()
        old = far.run
        status = restart(far, resume=old.run_id).result["status"]
        assert status["resumed_from"] == status_of(old).last_checkpoint
        assert json.loads(far.root.run(status["run_id"]).config.read_text())["resume"] == status["resumed_from"]

    def test_before_the_first_checkpoint_the_trainer_judges_by_the_runs_plan(self, far):
        far.running()
        plan = far.run.path / "plan.json"
        plan.write_text("{}")
        main = "import sys\nsys.exit(f'asked {sys.argv[5:]}' if '--continues' in sys.argv else 0)\n"
        release = far.deploy(far.files(__main__=main)).result["release"]
        request = {"resume": far.run.run_id, "preflight": True, "spec": {"release": release}}
        error = restart(far, **request).error
        assert (error["code"], living(far)) == (7, [far.run.run_id])
        assert f"asked ['--continues', '{plan}']" in error["detail"]
        plan.unlink()
        assert restart(far, **request).result["status"]["resumed_from"]

    def test_of_a_run_that_trained_no_step_there_is_nothing_to_resume(self, far):
        call = far.begin("start", **far.request("--load", "5"))
        call.until(phase("loading"))
        call.kill()
        reply = restart(far, resume=far.run.run_id, now=False, grace=0.5)
        assert reply.result["status"]["resumed_from"] == ""
        assert any("starts fresh" in event.get("text", "") for event in reply.events)


def test_a_run_that_fails_while_it_is_stopped_does_not_keep_the_new_one_from_starting(far):
    far.running("--fail-save")
    old = far.run
    reply = restart(far)
    assert reply.result["status"]["step"] >= 1
    assert status_of(old).state == "failed"
    assert any(f"run {old.run_id} failed while it was stopped" in event.get("text", "") for event in reply.events)


def test_a_run_that_does_not_end_is_told_and_nothing_is_launched(far):
    far.running()
    # Somebody else holds the lock, as a run in state D would.
    old = far.run
    held = acquire(old.run_lock, LockKind.SHARED)
    try:
        error = restart(far, now=True, timeout=0.5).error
    finally:
        os.close(held)
    assert (error["code"], names(far)) == (9, [old.run_id])


class TestGpus:
    """What the old run holds is no obstacle; what others hold is one before the stop. nvidia-smi is a script here."""

    @pytest.fixture
    def holds(self, far, tmp_path):
        """Return a function that sets the MiB in use on each GPU."""
        folder, text = tmp_path / "bin", tmp_path / "smi.txt"
        folder.mkdir()
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat {text}\n")
        (folder / "nvidia-smi").chmod(0o755)
        far.environment["PATH"] = f"{folder}:{os.environ['PATH']}"

        def set_used(*used: int) -> None:
            lines = [f"{index}, NVIDIA H200, {mib}, 143771" for index, mib in enumerate(used)]
            write_durably(text, "\n".join(lines).encode())

        set_used(5, 5)
        return set_used

    def test_memory_of_the_old_run_is_waited_for(self, far, holds, wait_for):
        far.running(spec={"devices": ["0"]})
        old = far.run
        holds(90000, 5)
        call = far.begin("restart", **far.request(run=old.run_id, spec={"devices": ["0"]}))
        wait_for(old.exit.exists)
        assert len(names(far)) == 1
        holds(5, 5)
        reply = call.reply()
        assert reply.result["status"]["step"] >= 1
        assert any("GPU memory free on 1/1" in event.get("text", "") for event in reply.events)

    def test_memory_of_others_refuses_before_the_stop(self, far, holds):
        far.running(spec={"devices": ["0"]})
        old = far.run.run_id
        holds(90000, 2000)
        error = restart(far, spec={"devices": ["0", "1"]}).error
        assert (error["code"], error["error"], living(far)) == (7, "GPU 1 is held", [old])

    def test_or_is_waited_for_before_the_stop(self, far, holds):
        far.running(spec={"devices": ["0"]})
        old = far.run
        holds(900, 2000)
        call = far.begin("restart", **far.request(run=old.run_id, spec={"devices": ["0", "1"]}, wait_gpus=True))
        call.until(lambda frame: b"waiting for GPU 1" in frame.payload)
        assert (living(far), old.stop.exists()) == ([old.run_id], False)
        holds(5, 5)
        assert call.reply().result["status"]["step"] >= 1


class TestLostClient:
    """The client dies in each phase and asks again with the same run id: one run, and the old one gone."""

    @pytest.mark.parametrize("when", ["stopping", "stopped", "launched"])
    def test_from_the_stop_on_it_is_launched_although_nobody_reads(self, far, wait_for, when):
        far.running("--save", "0.8")
        request = far.request(run=far.run.run_id)
        call = far.begin("restart", **request)
        call.until(phase(when))
        # The process that answers, and its pipes: as a client on this machine ends it, or a host its `pct exec`.
        call.kill()
        wait_for(lambda: living(far) == [request["spec"]["run_id"]])
        assert far.call("restart", **request).result["status"]["run_id"] == request["spec"]["run_id"]
        assert len(names(far)) == 2

    def test_asked_again_while_the_first_call_still_stops(self, far):
        far.running("--save", "1")
        request = far.request(run=far.run.run_id)
        call = far.begin("restart", **request)
        call.until(phase("stopping"))
        call.kill()
        assert far.call("restart", **request).result["status"]["step"] >= 1
        assert (len(names(far)), living(far)) == (2, [request["spec"]["run_id"]])

    def test_a_preflight_that_its_own_run_makes_fail_is_no_failure(self, far):
        """Asked again, the preflight runs while the first call launches; then the new run's ring fills /dev/shm."""
        asked = far.root.path / "asked"
        main = (
            f"import sys, time, pathlib\nasked = pathlib.Path({str(asked)!r})\nif not asked.exists():\n"
            "    asked.touch()\n    sys.exit(0)\n"
            "while len(list(asked.parent.glob('runs/*/supervisor.pid'))) < 2:\n    time.sleep(0.05)\n"
            "sys.exit('no space left for the ring')\n"
        )
        release = far.deploy(far.files(__main__=main)).result["release"]
        far.running("--save", "0.5", spec={"release": far.release})
        request = far.request(run=far.run.run_id, preflight=True, spec={"release": release})
        call = far.begin("restart", **request)
        call.until(phase("stopping"))
        call.kill()
        assert far.ok("restart", **request)["status"]["run_id"] == request["spec"]["run_id"]
        assert living(far) == [request["spec"]["run_id"]]

    def test_in_the_preflight_nothing_was_touched(self, far, wait_for):
        begun = far.root.path / "begun"
        main = f"import sys, time\nopen({str(begun)!r}, 'w')\ntime.sleep(30 if sys.argv[1] == 'preflight' else 0)\n"
        release = far.deploy(far.files(__main__=main)).result["release"]
        far.running(spec={"release": far.release})
        old = far.run.run_id
        call = far.begin("restart", **far.request(run=old, preflight=True, spec={"release": release}))
        wait_for(begun.exists)
        call.kill()
        assert (living(far), far.root.run(old).stop.exists()) == ([old], False)

    def test_a_frozen_client_holds_nothing_up(self, far, wait_for):
        far.running()
        old, request = far.run.run_id, far.request(run=far.run.run_id)
        call = far.begin("restart", **request)
        # It neither reads nor closes.
        wait_for(lambda: living(far) == [request["spec"]["run_id"]], 20)
        call.kill()
        assert status_of(far.root.run(old)).state == "stopped"


def test_the_same_run_id_is_a_query_after_the_end_too(far):
    far.running()
    request = far.request(run=far.run.run_id)
    far.ok("restart", **request)
    far.ok("stop")
    assert far.ok("restart", **request)["status"]["state"] == "stopped"
    assert len(names(far)) == 2


def test_two_restarts_at_once_end_with_one_run_and_an_answer_each(far):
    far.running("--save", "0.5")
    calls = [far.begin("restart", **far.request(run=far.run.run_id)) for _ in range(2)]
    codes = sorted(call.reply().frames[-1].json().get("code", 0) for call in calls)
    assert codes == [0, 4]
    assert len(living(far)) == 1


class TestRelease:
    """The check that deploy ran is read before anything is stopped."""

    @staticmethod
    def shipped(far, selfcheck: bool, check: str) -> str:
        main = (
            f"import sys\nif sys.argv[1] == 'selfcheck':\n    {check}\n"
            "elif sys.argv[1] == 'preflight':\n    print('{}')\nelse:\n    from trainer.standin import main\n"
            "    sys.argv = ['standin']\n    sys.exit(main())\n"
        )
        standin = Path(__file__).parents[1].joinpath("standin.py").read_text()
        files = far.files(__main__=main, standin=standin)
        return far.deploy(files, selfcheck=selfcheck).frames[-1].json().get("release", "")

    @staticmethod
    def asked(far, verb: str, release: str):
        """Return the reply to a request for the release's own trainer, not the stand-in's argv."""
        request = far.request(preflight=True, spec={"release": release}) | {"argv": [], "python": sys.executable}
        return far.call(verb, **request)

    def test_one_that_was_never_checked_is_checked_before_the_stop(self, far):
        far.running()
        old = far.run.run_id
        release = self.shipped(far, False, "sys.exit('NameError: bucket_ids')")
        error = self.asked(far, "restart", release).error
        assert (error["code"], living(far)) == (7, [old])
        assert "bucket_ids" in error["detail"]
        # Kept: the next one does not take the 20 s of the check to say the same.
        again = self.asked(far, "restart", release)
        assert (again.error["code"], phases(again)) == (7, [])
        assert "--no-selfcheck" in again.error["hint"]

    def test_start_says_that_it_was_not_checked_and_refuses_what_failed(self, far):
        release = self.shipped(far, False, "sys.exit(7)")
        unchecked = self.asked(far, "start", release)
        assert unchecked.result["status"]["step"] >= 1
        assert any("was not checked" in event.get("text", "") for event in unchecked.events)
        far.ok("stop")
        assert self.shipped(far, True, "sys.exit(7)") == "", "deploy refuses it"
        assert self.asked(far, "start", release).error["code"] == 7
        # The way out for somebody who knows better.
        assert self.shipped(far, False, "sys.exit(7)") == release
        assert self.asked(far, "start", release).result["status"]["step"] >= 1

    def test_one_that_passed_is_not_checked_again(self, far):
        far.running()
        release = self.shipped(far, True, "pass")
        assert phases(self.asked(far, "restart", release)) == [
            "preflight",
            "preflight",
            "stopping",
            "stopped",
            "launched",
        ]


def test_everything_that_is_missing_is_told_at_once(far):
    main = (
        "import sys, json\nassert '--skip-devices' in sys.argv\n"
        "parts = [{'error': name, 'cause': 'c', 'hint': 'h', 'code': 7} for name in ('no model', 'no data')]\n"
        "print(json.dumps({'error': '2 things', 'code': 7, 'problems': parts}))\nsys.exit(7)\n"
    )
    release = far.deploy(far.files(__main__=main)).result["release"]
    error = far.start(preflight=True, spec={"release": release, "devices": ["0", "1"]}).error
    assert (error["code"], error["error"]) == (7, "3 things are in the way of this run")
    assert error["cause"] == "no GPU on the far end; no model; no data"
    assert [problem["error"] for problem in error["problems"]] == ["no GPU on the far end", "no model", "no data"]
    assert "3. error: no data" in error["detail"]


def test_the_ring_that_the_old_run_gives_back_is_measured_by_what_its_ranks_map(tmp_path):
    run = RunLayout(tmp_path / new_run_id())
    run.create()
    lock = acquire(run.run_lock, LockKind.SHARED)
    write_pidfile(run.rank_pid(0), ProcessIdentity.of())
    # A test runner's workers map semaphores that have no name either.
    before = ring_bytes(run)
    path = Path(f"/dev/shm/dflash-test-{os.getpid()}")
    with path.open("w+b") as file:
        file.truncate(1 << 20)
        with mmap.mmap(file.fileno(), 1 << 20):
            # As long as it has a name, it does not go with the processes that map it.
            assert ring_bytes(run) == before
            path.unlink()
            assert ring_bytes(run) == before + (1 << 20)
    os.close(lock)
    assert ring_bytes(run) == 0


def test_a_spec_from_before_restarts_still_opens(tmp_path):
    spec = RunSpec("20260101-000000-abcdef", ("x",), {}, ("cpu",), restarted_from="20260101-000000-000000")
    write_json(tmp_path / "spec.json", spec)
    assert read_record(RunSpec, tmp_path / "spec.json") == spec
    data = json.loads((tmp_path / "spec.json").read_text())
    del data["restarted_from"]
    (tmp_path / "spec.json").write_text(json.dumps(data))
    assert read_record(RunSpec, tmp_path / "spec.json").restarted_from == ""
