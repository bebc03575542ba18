"""Where things lie at the far end: ROOT, releases, interpreters, environments."""

from __future__ import annotations

import getpass
import os
import pwd
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from remote.agent.environment import RUN_VARIABLE, base_environment, home, run_environment, trainer_environment
from remote.agent.interpreters import Interpreter, packages_of
from remote.agent.releases import _before, switch_current
from remote.agent.roots import create_root, current_release, interpreter, require_release, resolve_root
from remote.protocol.codec import loads_object
from remote.protocol.errors import DflashError
from remote.protocol.files import write_json
from remote.protocol.layout import RootLayout

A, B, C = "aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"


@pytest.fixture
def root(tmp_path: Path) -> RootLayout:
    layout = RootLayout(tmp_path / "root")
    layout.create()
    for release in (A, B, C):
        layout.release(release).mkdir()
    return layout


class TestRoot:
    """ROOT is absolute from the first moment on."""

    def test_what_is_asked_for(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        mine = Path(pwd.getpwuid(os.geteuid()).pw_dir)
        assert resolve_root("/srv/x") == Path("/srv/x")
        assert resolve_root("~/x") == mine / "x"
        assert resolve_root("~") == mine
        assert resolve_root(f"~{getpass.getuser()}/x") == mine / "x"
        assert resolve_root("x/y") == tmp_path / "x/y"

    def test_the_home_of_the_user_who_came_by_ssh_is_not_ours(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        assert resolve_root("~/x") == Path(pwd.getpwuid(os.geteuid()).pw_dir) / "x"

    @pytest.mark.parametrize(
        ("known", "said", "expected"),
        [
            ("{tmp}", "/nowhere", "{tmp}"),
            ("/nowhere", "{tmp}", "{tmp}"),
            ("/nowhere", "relative", "/nowhere"),
            ("/nowhere", "", "/"),
            (None, "{tmp}", "{tmp}"),
            (None, "/nowhere", "/"),
            (None, "", "/"),
        ],
    )
    def test_a_home_is_there_or_is_what_the_machine_says(self, tmp_path, monkeypatch, known, said, expected):
        def entry(uid):
            if known is None:
                raise KeyError(uid)
            return SimpleNamespace(pw_dir=known.format(tmp=tmp_path))

        monkeypatch.setattr("pwd.getpwuid", entry)
        monkeypatch.setenv("HOME", said.format(tmp=tmp_path))
        assert home() == Path(expected.format(tmp=tmp_path))

    @pytest.mark.parametrize("text", ["a\0b", "\ud800", "~no-such-user-here/x"])
    def test_what_can_be_none(self, text):
        with pytest.raises(DflashError) as caught:
            resolve_root(text)
        assert caught.value.code == 2

    def test_the_default_is_one_of_three(self):
        expected = Path("/workspace/dflashctl") if Path("/workspace").is_dir() else None
        if expected is None:
            expected = Path("/opt/dflashctl") if os.geteuid() == 0 else home() / ".local/share/dflashctl"
        assert resolve_root("") == expected

    def test_a_place_that_cannot_be_made_is_told(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(DflashError) as caught:
            create_root(RootLayout(tmp_path / "file" / "root"))
        assert (caught.value.code, "--root" in caught.value.hint) == (7, True)


class TestReleases:
    """`current` and the way back."""

    def test_none_and_the_current_one(self, root):
        assert current_release(root) == ""
        with pytest.raises(DflashError, match="nothing is deployed"):
            require_release(root, "")
        assert switch_current(root, A) == ""
        assert switch_current(root, B) == A
        assert current_release(root) == B
        assert require_release(root, "") == root.release(B)
        assert require_release(root, A) == root.release(A)

    def test_a_link_to_nowhere_is_none(self, root):
        switch_current(root, A)
        root.release(A).rmdir()
        assert current_release(root) == ""
        for target in ("elsewhere", "../../etc", "/etc"):
            root.current.unlink()
            root.current.symlink_to(target)
            assert current_release(root) == ""

    def test_a_plain_file_in_the_place_of_the_link(self, root):
        root.current.write_text("?")
        assert current_release(root) == ""
        switch_current(root, A)
        assert current_release(root) == A

    def test_the_way_back_skips_what_is_gone(self, root):
        for release in (A, B, C):
            switch_current(root, release)
        assert _before(root, C) == B
        root.release(B).rmdir()
        assert _before(root, C) == A
        root.release(A).rmdir()
        assert _before(root, C) == ""

    def test_the_same_release_again_is_no_switch(self, root):
        switch_current(root, A)
        switch_current(root, A)
        assert [entry["release"] for entry in loads_object(root.history.read_bytes())["switches"]] == [A]

    @pytest.mark.parametrize(
        "history", ['{"switches": 5}', '{"switches": [1, null, {"x": 2}, {"release": "../x"}]}', "[]", "{"]
    )
    def test_any_history_is_survived(self, root, history):
        root.history.write_text(history)
        assert _before(root, A) == ""
        switch_current(root, A)
        switch_current(root, B)
        assert _before(root, B) == A

    def test_the_history_is_bounded(self, root):
        write_json(root.history, {"switches": [{"release": A, "time": float(n)} for n in range(500)]})
        switch_current(root, B)
        assert len(loads_object(root.history.read_bytes())["switches"]) == 100

    def test_switches_at_once_leave_a_whole_link(self, root):
        threads = [threading.Thread(target=switch_current, args=(root, release)) for release in (A, B, C) * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert current_release(root) in (A, B, C)
        assert current_release(root) == loads_object(root.history.read_bytes())["switches"][-1]["release"]
        assert not list(root.path.glob(".current-*"))


class TestInterpreter:
    """Which python, and what it can import."""

    def test_ours_by_default(self):
        assert interpreter("") == sys.executable
        assert interpreter(sys.executable) == sys.executable

    @pytest.mark.parametrize("path", ["python3", "/no/such/python", "/", "/etc/passwd"])
    def test_what_is_none(self, path):
        with pytest.raises(DflashError) as caught:
            interpreter(path)
        assert (caught.value.code, path in caught.value.error) == (7, True)

    def test_versions_are_read_without_importing(self):
        found = packages_of(sys.executable)
        assert found.python == ".".join(map(str, sys.version_info[:3]))
        assert found.versions["torch"].startswith("2.")
        assert "flash-linear-attention" not in found.versions

    def test_one_that_does_not_work(self, tmp_path):
        for text in ("#!/bin/sh\nexit 3\n", "#!/bin/sh\necho nonsense\n", "#!/no/such/interpreter\n"):
            path = tmp_path / "python"
            path.write_text(text)
            path.chmod(0o755)
            with pytest.raises(DflashError) as caught:
                packages_of(str(path))
            assert "--python" in caught.value.hint

    def test_the_fingerprint_changes_with_everything(self):
        base = Interpreter("/p", "3.11.2", {"torch": "2.13.0"})
        others = (
            Interpreter("/q", "3.11.2", {"torch": "2.13.0"}),
            Interpreter("/p", "3.11.3", {"torch": "2.13.0"}),
            Interpreter("/p", "3.11.2", {"torch": "2.13.1"}),
            Interpreter("/p", "3.11.2", {"torch": "2.13.0", "numpy": "2"}),
        )
        assert len({each.fingerprint for each in (base, *others)}) == 5
        assert base.fingerprint == Interpreter("/p", "3.11.2", {"torch": "2.13.0"}).fingerprint


class TestEnvironment:
    """Built from nothing."""

    def test_nothing_of_ours_gets_through(self, monkeypatch):
        monkeypatch.setenv("LD_PRELOAD", "/evil.so")
        monkeypatch.setenv("PATH", "/somewhere")
        environment = base_environment("/venv/bin/python")
        assert sorted(environment) == ["CUDA_DEVICE_ORDER", "HOME", "LANG", "PATH", "PYTHONUNBUFFERED"]
        assert environment["PATH"].split(":")[0] == "/venv/bin"
        assert "/somewhere" not in environment["PATH"]

    def test_a_folder_comes_once(self):
        folders = base_environment("/usr/bin/python3")["PATH"].split(":")
        assert len(folders) == len(set(folders))

    def test_the_supervisor_never_carries_the_runs_id(self):
        assert RUN_VARIABLE not in base_environment("/usr/bin/python3")
        assert RUN_VARIABLE not in trainer_environment("/usr/bin/python3", Path("/r"), Path("/r/releases/x"))

    def test_what_the_spec_says_comes_last(self):
        run = Path("/r/runs/20200101-000000-aaaaaa")
        environment = run_environment("/usr/bin/python3", Path("/r"), Path("/rel"), run, {"LANG": "de", "X": "1"})
        assert (environment["LANG"], environment["X"]) == ("de", "1")
        assert environment[RUN_VARIABLE] == run.name
        assert environment["DFLASH_RUN_DIR"] == str(run)
        assert (environment["PYTHONPATH"], environment["DFLASH_ROOT"]) == ("/rel", "/r")
