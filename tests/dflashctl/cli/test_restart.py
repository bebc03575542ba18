"""`restart`, `start --deploy` and the notice of a changed source, against the real agent and the stand-in trainer."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflashctl.agent_client import AgentClient
from remote.protocol.errors import ExitCode
from remote.protocol.layout import RootLayout
from remote.protocol.locks import is_held


def deploy(cli, tree, *extra):
    where = ("--host", "local", "--root", str(cli.root), "--python", sys.executable)
    done = cli("deploy", *where, "--source", str(tree), "--json", *extra)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["release"]


def start(cli, *arguments):
    done = cli("start", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["run_id"]


def restart(cli, *arguments, **environment):
    done = cli("restart", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done


def config(cli, run):
    return json.loads(RootLayout(cli.root).run(run).config.read_text())


def living(cli):
    root = RootLayout(cli.root)
    return [path.name for path in root.runs.iterdir() if is_held(root.run(path.name).sup_lock)]


@pytest.fixture
def calls(monkeypatch):
    """The verbs asked for, one entry a remote call."""
    made = []
    opened = AgentClient._open

    def counted(self, verb, *arguments, **options):
        made.append(verb)
        return opened(self, verb, *arguments, **options)

    monkeypatch.setattr(AgentClient, "_open", counted)
    return made


def test_restart_stops_the_run_and_starts_with_its_configuration_and_what_is_changed(cli, standin_tree, calls):
    deploy(cli, standin_tree())
    old = start(cli, "--lr", "0.25", "--seed", "5", "--set", "max_steps=40", "--name", "trial")
    calls.clear()
    done = restart(cli, "--seed", "6", "--note", "another seed")
    assert calls == ["spec", "restart"]
    said = done.stderr.splitlines()
    assert said[0] == f"restarting run {old} (running), fresh"
    assert said[1].startswith(f"configuration: run {old} (the run that is restarted)")
    assert any("seed=6*" in line for line in said)
    assert re.fullmatch(
        r"step 1, loss 10, 1 target / 1 drafter; restarted in \S+ s: preflight \S+ s, stop \S+ s, first step \S+ s",
        done.stdout.strip(),
    )
    status = json.loads(cli("status", "--json").stdout)
    new = status["run_id"]
    assert living(cli) == [new]
    assert (status["restarted_from"], status["name"], status["note"]) == (old, "trial", "another seed")
    assert status["resumed_from"] == ""
    changed = config(cli, new)
    assert (changed["lr"], changed["seed"], changed["max_steps"]) == (0.25, 6, 40)
    assert json.loads(cli("status", "--run", old, "--json").stdout)["last_checkpoint"]
    assert f"restart of  {old}" in cli("status").stdout
    listed = json.loads(cli("runs", "--json").stdout)["runs"]
    assert [entry["restarted_from"] for entry in listed] == [old, ""]
    table = cli("runs").stdout.splitlines()
    assert "restart of" in table[0]
    assert table[1].count(old) == 1


def test_the_parts_of_the_time_are_in_the_json(cli, standin_tree):
    deploy(cli, standin_tree("--load", "0.3", "--save", "0.4"))
    old = start(cli)
    answer = json.loads(restart(cli, "--json").stdout)
    assert answer["restarted_from"] == old
    print(restart(cli).stderr)
    assert list(answer["seconds"]) == ["preflight", "stop", "first step"]
    assert answer["seconds"]["stop"] >= 0.4
    assert answer["seconds"]["first step"] >= 0.3


def test_without_a_living_run_there_is_nothing_to_stop_and_it_says_so(cli, standin_tree):
    deploy(cli, standin_tree())
    old = start(cli, "--lr", "0.25")
    assert cli("stop").returncode == 0
    done = restart(cli)
    assert done.stderr.splitlines()[0].startswith(f"run {old} does not live (stopped), nothing of it has to stop")
    assert "stop " not in done.stdout
    assert config(cli, cli.run_layout().run_id)["lr"] == 0.25


def test_without_any_run_there_is_nothing_to_restart(cli, standin_tree):
    deploy(cli, standin_tree())
    done = cli("restart", "--json")
    assert done.returncode == ExitCode.NO_RUN
    assert json.loads(done.stdout)["error"] == "no run yet"
    assert "hint: `dflashctl start` begins one" in done.stderr
    assert cli("restart", "--run", "20200101-000000-000000").returncode == ExitCode.NO_RUN


def test_resume_goes_on_from_the_checkpoint_of_the_stop(cli, standin_tree):
    deploy(cli, standin_tree())
    old = start(cli)
    done = restart(cli, "--resume")
    assert done.stderr.splitlines()[0] == f"restarting run {old} (running), from the checkpoint that its stop writes"
    saved = json.loads(cli("status", "--run", old, "--json").stdout)["last_checkpoint"]
    assert saved
    status = json.loads(cli("status", "--json").stdout)
    assert status["resumed_from"] == saved
    # By name, of a run that ended, while another one lives.
    named = restart(cli, "--resume", f"{old}@{int(saved.rpartition('-')[2])}")
    assert f"from the checkpoint {old}@" in named.stderr.splitlines()[0]
    again = json.loads(cli("status", "--json").stdout)
    assert (again["resumed_from"], again["restarted_from"]) == (saved, status["run_id"])
    # A fresh restart of a resumed run is fresh.
    restart(cli)
    assert json.loads(cli("status", "--json").stdout)["resumed_from"] == ""
    assert len(living(cli)) == 1


def test_another_runs_configuration_takes_the_place_of_the_one_that_lives(cli, standin_tree):
    deploy(cli, standin_tree())
    first = start(cli, "--lr", "0.25")
    second = json.loads(restart(cli, "--lr", "0.5", "--json").stdout)["run_id"]
    third = json.loads(restart(cli, "--run", first, "--now", "--json").stdout)
    assert (third["restarted_from"], living(cli)) == (first, [third["run_id"]])
    assert config(cli, third["run_id"])["lr"] == 0.25
    stop = json.loads(RootLayout(cli.root).run(second).stop.read_text())
    assert (stop["checkpoint"], stop["grace"]) == (False, 0)


def test_a_named_configuration_is_the_base_and_is_remembered(cli, standin_tree):
    deploy(cli, standin_tree())
    start(cli, "--lr", "0.25")
    (cli.directory / "mine.toml").write_text('device = "cpu"\nseed = 9\n')
    new = json.loads(restart(cli, "--config", "mine.toml", "--json").stdout)["run_id"]
    assert (config(cli, new)["seed"], config(cli, new)["lr"]) == (9, 6e-4)
    assert cli("stop", "--now").returncode == 0
    assert "mine.toml (the last `start --config`" in cli("start").stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--epochs", "0"), ExitCode.USAGE, "at least 1"),
        (("--target-gpus", "0,1", "--drafter-gpus", "1,2"), ExitCode.USAGE, "disjoint"),
        (("--config", "/none.toml"), ExitCode.USAGE, "no configuration /none.toml"),
        (("--device", "cuda", "--target-gpus", "40", "--drafter-gpus", "41"), ExitCode.PREFLIGHT, "GPU"),
        (("--resume", "20200101-000000-000000"), ExitCode.NO_RUN, "no such run"),
    ],
)
def test_what_cannot_be_leaves_the_old_run_alone(cli, standin_tree, arguments, code, words):
    deploy(cli, standin_tree())
    old = start(cli)
    done = cli("restart", "--json", *arguments)
    assert (done.returncode, json.loads(done.stdout)["code"]) == (code, code)
    assert words in done.stderr
    assert ("refused before anything was stopped" in done.stderr) is (code != ExitCode.USAGE)
    assert living(cli) == [old]
    assert json.loads(cli("status", "--json").stdout)["state"] == "running"


class TestDeploy:
    """--deploy ships first: all of deploy, and a refused release ends before anything is touched."""

    @pytest.mark.parametrize("verb", ["start", "restart"])
    def test_the_new_release_is_what_runs(self, cli, standin_tree, verb, calls):
        tree = standin_tree()
        first = deploy(cli, tree)
        if verb == "restart":
            start(cli)
        (tree / "trainer" / "added.py").write_text("NEW = 1\n")
        calls.clear()
        done = cli(verb, "--deploy", "--json")
        assert done.returncode == 0, done.stderr
        assert calls == (["deploy", "start"] if verb == "start" else ["spec", "deploy", "restart"])
        release = json.loads(done.stdout)["release"]
        assert release != first
        assert (cli.root / "current").readlink().name == release
        assert "selfcheck" in done.stderr
        assert json.loads(cli("status", "--json").stdout)["release"] == release
        # Shipped, so the source here is what is deployed.
        assert "differs from the deployed" not in cli("restart").stderr

    @pytest.mark.parametrize("verb", ["start", "restart"])
    def test_a_refused_release_ends_before_anything_is_touched(self, cli, standin_tree, verb):
        tree = standin_tree()
        first = deploy(cli, tree)
        old = start(cli)
        (tree / "trainer" / "selfcheck.json").write_text('{"error": "undefined name", "cause": "bucket_ids"}')
        done = cli(verb, "--deploy")
        assert (done.returncode, "bucket_ids" in done.stderr) == (ExitCode.PREFLIGHT, True)
        assert ((cli.root / "current").readlink().name, living(cli)) == (first, [old])
        assert json.loads(cli("status", "--json").stdout)["state"] == "running"

    def test_a_release_that_skipped_its_check_is_checked_before_the_old_run_ends(self, cli, standin_tree):
        deploy(cli, standin_tree())
        old = start(cli)
        bad = standin_tree(name="bad", selfcheck='{"error": "undefined name", "cause": "bucket_ids in train.py"}')
        deploy(cli, bad, "--no-selfcheck")
        for _ in range(2):
            done = cli("restart")
            assert (done.returncode, "bucket_ids in train.py" in done.stderr) == (ExitCode.PREFLIGHT, True)
            assert living(cli) == [old]
        # What failed is known now: a start does not try it either.
        assert cli("stop").returncode == 0
        assert cli("start").returncode == ExitCode.PREFLIGHT
        deploy(cli, bad, "--no-selfcheck")
        started = cli("start")
        assert started.returncode == 0
        assert "was not checked with" in started.stderr

    def test_a_failed_preflight_of_the_new_release_leaves_the_old_run_alone(self, cli, standin_tree):
        tree = standin_tree()
        deploy(cli, tree)
        old = start(cli)
        said = json.dumps(
            {"error": "no model at /m", "cause": "no such directory", "hint": "run `make demo`", "code": 7}
        )
        (tree / "trainer" / "preflight.json").write_text(said)
        done = cli("restart", "--deploy")
        assert (done.returncode, "no model at /m" in done.stderr) == (ExitCode.PREFLIGHT, True)
        assert living(cli) == [old]
        assert cli("stop").returncode == 0, "the agent of the new release ends a run of the old one"


class TestNotice:
    """One line on stderr when the source here is not what is deployed; no remote call, nothing where there is none."""

    def test_it_names_the_directory_the_release_and_the_files(self, cli, standin_tree, calls):
        tree = standin_tree("--finish-early")
        release = deploy(cli, tree)
        assert "differs from the deployed" not in cli("start").stderr
        (tree / "trainer" / "train.py").write_text("x = 1\n")
        (tree / "templates" / "demo.toml").write_text('device = "cpu"\n')
        (tree / "remote" / "agent" / "wire.py").touch()
        calls.clear()
        (line,) = [line for line in cli("start").stderr.splitlines() if "differs from the deployed" in line]
        assert line == (
            f"the source in {tree} differs from the deployed release {release} "
            "(2 files: templates/demo.toml, trainer/train.py): `--deploy` ships it first"
        )
        assert calls == ["start"]
        # The tree near the shell comes first, as for deploy.
        other = standin_tree("--finish-early", name="other")
        for index in range(5):
            (other / "trainer" / f"new{index}.py").write_text("")
        near = subprocess.run(
            cli.command("start"),
            cwd=other / "trainer",
            env=cli.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"the source in {other} differs" in near.stderr
        assert "(5 files: trainer/new0.py, trainer/new1.py, trainer/new2.py, ...)" in near.stderr

    def test_without_a_memory_of_the_release_no_files_are_named(self, cli, standin_tree):
        tree = standin_tree("--finish-early")
        release = deploy(cli, tree)
        (tree / "trainer" / "train.py").write_text("x = 1\n")
        for file in (cli.home / "manifests").iterdir():
            file.write_text("{")
        assert f"differs from the deployed release {release}: `--deploy`" in cli("start").stderr
        assert f"differs from the deployed release {release}: `--deploy`" in cli("restart").stderr

    def test_where_the_deployed_tree_is_gone_nothing_is_said(self, cli, standin_tree, monkeypatch, tmp_path):
        tree = standin_tree("--finish-early")
        deploy(cli, tree)
        # The tree that this program came with is another one than was deployed, and nobody's project.
        tree.rename(tmp_path / "moved")
        done = cli("start", "--device", "cpu", "--target-model", "/m", "--data-dir", "/d")
        assert done.returncode == 0, done.stderr
        assert "differs from the deployed" not in done.stderr

    def test_before_the_first_deploy_there_is_nothing_to_compare(self, cli, standin_tree):
        tree = standin_tree()
        done = cli("start", "--root", str(cli.root), DFLASHCTL_SOURCE=str(tree))
        assert (done.returncode, "differs from the deployed" in done.stderr) == (ExitCode.PREFLIGHT, False)


class TestSomebodyElseSwitched:
    """Two laptops: what one makes current, by a rollback or a deploy, the other launches, and is told."""

    def test_a_rollback_from_elsewhere_reaches_everybody(self, cli, standin_tree):
        good = deploy(cli, standin_tree(name="good"))
        mine = standin_tree("--load", "0", name="mine")
        bad = deploy(cli, mine)
        # The other laptop: its own state directory.
        elsewhere = cli("rollback", "--host", "local", "--root", str(cli.root), DFLASHCTL_HOME=str(cli.directory / "b"))
        assert elsewhere.returncode == 0, elsewhere.stderr
        first = cli("start", "--json")
        assert first.returncode == 0, first.stderr
        begun = json.loads(first.stdout)
        assert begun["release"] == good
        assert f"release {good} is current there and is launched, not {bad}" in first.stderr
        # What it was made of is not known here: the source of the other release would be a lie.
        spec = json.loads(RootLayout(cli.root).run(begun["run_id"]).spec.read_text())
        assert spec["source"] == {}
        again = restart(cli, "--json", "--now")
        assert json.loads(again.stdout)["release"] == good
        shipped = restart(cli, "--json", "--now", "--deploy", DFLASHCTL_SOURCE=str(mine))
        assert json.loads(shipped.stdout)["release"] == bad
        assert "is current there" not in shipped.stderr

    def test_where_nothing_is_current_any_more_nothing_is_launched(self, cli, standin_tree):
        deploy(cli, standin_tree())
        (cli.root / "current").unlink()
        done = cli("start")
        assert (done.returncode, "run `dflashctl deploy` first" in done.stderr) == (ExitCode.PREFLIGHT, True)


class TestInterrupted:
    """Ctrl-C and a dead client: before the stop nothing happened, after it the far end goes on to the launch."""

    @staticmethod
    def run(cli, *arguments):
        return subprocess.Popen(
            cli.command("restart", *arguments),
            cwd=cli.directory,
            env=cli.environment(),
            stderr=subprocess.PIPE,
            text=True,
        )

    @staticmethod
    def read_to(process, words):
        while words not in (line := process.stderr.readline()):
            assert line, process.returncode

    @staticmethod
    def until_replaced(cli, old):
        deadline = time.monotonic() + 20
        while not living(cli) or old in living(cli):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
    def test_once_the_stop_was_asked_for_the_new_run_comes(self, cli, standin_tree, how):
        # Longer than the 2.5 s after which a client on this machine kills an agent that does not end.
        deploy(cli, standin_tree("--save", "3"))
        old = start(cli)
        process = self.run(cli)
        self.read_to(process, "stopping")
        process.send_signal(how)
        _, errors = process.communicate(timeout=20)
        if how == signal.SIGINT:
            assert process.returncode == ExitCode.INTERRUPTED
            assert f"detached; the restart goes on over there: run {old} is stopped" in errors
        self.until_replaced(cli, old)
        status = json.loads(cli("status", "--json").stdout)
        assert (status["restarted_from"], len(living(cli))) == (old, 1)

    def test_in_the_preflight_nothing_was_touched(self, cli, standin_tree):
        tree = standin_tree()
        main = tree / "trainer" / "__main__.py"
        slow = 'if sys.argv[1] == "preflight":\n    import time\n\n    time.sleep(2)\n'
        main.write_text(main.read_text().replace("verb = sys.argv[1]\n", f"{slow}verb = sys.argv[1]\n"))
        deploy(cli, tree)
        old = start(cli)
        process = self.run(cli)
        self.read_to(process, "preflight")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, "no run was stopped" in errors) == (ExitCode.INTERRUPTED, True)
        assert living(cli) == [old]
        assert not Path(RootLayout(cli.root).run(old).stop).exists()
