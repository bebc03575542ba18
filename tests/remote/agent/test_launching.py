"""What lies between a request and a running trainer: plan, preflight, selfcheck, launch."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from remote.agent import main
from remote.agent.preflight import _reported, content_of, json_lines
from remote.agent.selfcheck import _kept, _Relay
from remote.agent.startplan import find_checkpoint
from remote.protocol.errors import DflashError
from remote.protocol.files import write_json
from remote.protocol.layout import RootLayout
from remote.protocol.locks import LockKind, acquire, is_held
from remote.protocol.records import ExitRecord, RunSpec


class TestLaunch:
    """A supervisor that does not come to life leaves nothing behind."""

    @pytest.mark.parametrize("agent", [b"", b"no zip", b"import sys; sys.exit(3)\n"])
    def test_a_broken_agent_in_the_release(self, far, agent):
        files = {**far.files(), "agent.pyz": agent}
        assert far.deploy(files).result
        error = far.start().error
        assert error["error"] == "the supervisor did not start"
        assert not list(far.root.runs.iterdir())
        assert not is_held(far.root.start_lock)

    def test_a_supervisor_that_dies_after_its_fork(self, far):
        program = b"import os, sys\nif os.fork(): os._exit(0)\nprint('boom', flush=True); sys.exit(1)\n"
        assert far.deploy({**far.files(), "agent.pyz": program}).result
        call = far.begin("start", **far.request())
        error = call.reply().error
        assert error["error"] == "the supervisor did not start"
        assert "boom" in error["detail"]
        assert not list(far.root.runs.iterdir())

    def test_the_launcher_leaves_no_zombie_and_no_descriptor(self, far):
        call = far.begin("start", **far.request("--load", "1"))
        call.until(lambda frame: b"run_started" in frame.payload)
        children = Path(f"/proc/{call.process.pid}/task/{call.process.pid}/children").read_text().split()
        assert children == [], "the supervisor is nobody's child"
        call.reply()

    def test_a_run_without_a_spec_ends_its_supervisor(self, far, tmp_path):
        run = far.root.run("20200101-000000-aaaaaa")
        run.create()
        descriptor = acquire(run.sup_lock, LockKind.EXCLUSIVE)
        command = [sys.executable, "-I", str(far.pyz), "supervise", str(run.path), str(descriptor)]
        done = subprocess.run(command, pass_fds=[descriptor], capture_output=True, timeout=30, check=True)
        assert b"no spec" in done.stderr


class TestMain:
    """The table of verbs."""

    @pytest.mark.parametrize("verb", main.VERBS)
    def test_each_verb_has_its_function(self, verb):
        module = importlib.import_module(f"remote.agent.{main.VERBS[verb]}")
        assert callable(getattr(module, verb))
        assert getattr(module, verb).__doc__

    def test_no_release_without_its_name(self, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["/usr/bin/something"])
        assert main.own_release() == ""
        monkeypatch.setattr(sys, "argv", ["/r/releases/0123456789ab/agent.pyz"])
        assert main.own_release() == "0123456789ab"


class TestCheckpoints:
    """RUN, RUN@STEP and `last`, as directories."""

    @pytest.fixture
    def root(self, tmp_path):
        root = RootLayout(tmp_path)
        root.create()
        return root

    def make(self, root, run_id: str, *names: str, output_dir: str = "", last: str = "") -> Path:
        run = root.run(run_id)
        run.create()
        config = {"output_dir": output_dir} if output_dir else {}
        write_json(run.spec, RunSpec(run_id, ("x",), {}, ("cpu",), config=config))
        place = Path(output_dir) / run_id if output_dir else run.checkpoints
        for name in names:
            (place / name).mkdir(parents=True)
        if last:
            write_json(run.exit, ExitRecord(run_id, "stopped", 1.0, "x", last_checkpoint=str(place / last)))
        return place

    OLD, NEW = "20200101-000000-aaaaaa", "20200102-000000-bbbbbb"

    def test_the_latest_of_a_run(self, root):
        place = self.make(root, self.OLD, "step-00000009", "step-00000010", ".step-00000011", "best", "notes")
        assert find_checkpoint(root, self.OLD).path == place / "step-00000010"
        assert find_checkpoint(root, f"{self.OLD}@9").path == place / "step-00000009"

    def test_under_an_output_directory(self, root, tmp_path):
        place = self.make(root, self.OLD, "step-00000003", output_dir=str(tmp_path / "out"))
        assert find_checkpoint(root, self.OLD).path == place / "step-00000003"

    def test_where_the_run_itself_said(self, root, tmp_path):
        place = self.make(root, self.OLD, "step-00000003", output_dir=str(tmp_path / "out"), last="step-00000003")
        assert find_checkpoint(root, self.OLD).path == place / "step-00000003"

    def test_last_passes_over_runs_without_one(self, root):
        place = self.make(root, self.OLD, "step-00000003")
        self.make(root, self.NEW)
        assert find_checkpoint(root, "last").path == place / "step-00000003"

    @pytest.mark.parametrize(
        ("resume", "code"),
        [(NEW, 7), (f"{OLD}@4", 7), (f"{OLD}@x", 7), (f"{OLD}@-3", 7), ("20210101-000000-cccccc", 3), ("x", 3)],
    )
    def test_what_is_not_there(self, root, resume, code):
        self.make(root, self.OLD, "step-00000003")
        self.make(root, self.NEW)
        with pytest.raises(DflashError) as caught:
            find_checkpoint(root, resume)
        assert caught.value.code == code

    def test_no_run_at_all(self, root):
        for resume in ("last", ""):
            with pytest.raises(DflashError):
                find_checkpoint(root, resume)


class TestReports:
    """What the trainer's short verbs say, among whatever else is printed."""

    def test_json_lines(self):
        text = 'Loading: 100%\n{"error": "a"}\n[1]\n{"torn": \nnull\n{"kind": "phase"}\n\x1b[0m'
        assert json_lines(text) == [{"error": "a"}, {"kind": "phase"}]

    def test_the_last_error_counts_and_the_exit_code_is_its_code(self):
        said = '{"error": "first"}\n{"error": "second", "cause": "c", "hint": "h"}\n{"other": 1}\n'
        error = _reported(2, said, "noise")
        assert (error.error, error.cause, error.hint, error.code) == ("second", "c", "h", 2)
        assert _reported(7, '{"error": "x", "code": 2}', "").code == 2

    def test_without_one_the_end_of_the_output_is_shown(self):
        error = _reported(-9, "out\n" * 50, "err\n" * 5)
        assert (error.code, "-9" in error.cause) == (7, True)
        assert error.detail.splitlines() == ["out"] * 25 + ["err"] * 5

    def test_bytes_that_are_no_text(self):
        with tempfile.TemporaryFile() as file:
            file.write(b"a\xffb")
            assert content_of(file) == "a\N{REPLACEMENT CHARACTER}b"

    @pytest.mark.parametrize("text", [None, "", "{", "[]"])
    def test_a_torn_stored_selfcheck_is_none(self, tmp_path, text):
        path = tmp_path / "x.json"
        if text is not None:
            path.write_text(text)
        assert _kept(path) == {}

    def test_the_relay_passes_each_event_once_and_whole(self):
        noted = []

        class Answer:
            note = staticmethod(noted.append)

        with tempfile.TemporaryFile() as file:
            relay = _Relay(file, Answer)
            for piece in (b'{"kind": "a"}\n{"ki', b'nd": "b"}\nnoise\n', b'{"result": 1}\n{"kind": "c"}\n'):
                file.write(piece)
                file.flush()
                relay.poll()
                relay.poll()
        assert [event["kind"] for event in noted] == ["a", "b", "c"]
