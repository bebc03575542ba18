"""Files that survive a kill, names that stay inside, manifests and errors."""

from __future__ import annotations

import hashlib
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.protocol.codec import dumps, loads_object
from remote.protocol.errors import DflashError, ExitCode, preflight_error, together, usage_error
from remote.protocol.files import read_json, write_durably, write_json
from remote.protocol.layout import RootLayout, is_release_id, is_run_id, new_run_id
from remote.protocol.manifest import check_path, manifest_text, release_id
from remote.protocol.records import RunState, read_record

DIGEST = "a" * 64


def test_json_comes_back_and_a_missing_file_is_none(tmp_path):
    write_json(tmp_path / "x.json", {"a": [1, "ü"]})
    assert read_json(tmp_path / "x.json") == {"a": [1, "ü"]}
    assert read_json(tmp_path / "y.json") is None
    assert read_record(RunState, tmp_path / "y.json") is None
    with pytest.raises(ValueError):
        read_record(RunState, tmp_path / "x.json")


def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path):
    path = tmp_path / "state.json"
    write_durably(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, hard))
    try:
        with pytest.raises(OSError):
            write_durably(path, b"newer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    path = tmp_path / "state.json"
    program = (
        "import sys, itertools; from pathlib import Path; from remote.protocol.files import write_json\n"
        "for n in itertools.count(): write_json(Path(sys.argv[1]), {'n': n, 'fill': str(n) * 5000})"
    )
    for pause in (0.12, 0.2, 0.31):
        with subprocess.Popen([sys.executable, "-c", program, str(path)]) as process:
            time.sleep(pause)
            process.kill()
        data = read_json(path)
        assert data is None or data["fill"] == str(data["n"]) * 5000


class TestNames:
    """Run ids, release ids and paths cannot leave their directories."""

    def test_run_ids(self):
        first, second = new_run_id(), new_run_id()
        assert is_run_id(first)
        assert first != second
        assert first[:15] <= second[:15]

    @given(st.text(max_size=30))
    def test_no_other_text_is_one(self, text):
        root = RootLayout(Path("/root"))
        if not is_run_id(text):
            with pytest.raises(ValueError):
                root.run(text)
        if not is_release_id(text):
            with pytest.raises(ValueError):
                root.release(text)

    @pytest.mark.parametrize(
        "text", ["20200101-000000-aaaaaa\n", "../20200101-000000-aaaaaa", "２0200101-000000-aaaaaa"]
    )
    def test_near_misses(self, text):
        assert not is_run_id(text)

    def test_layout(self, tmp_path):
        root = RootLayout(tmp_path / "root")
        root.create()
        root.create()
        run = root.run(new_run_id())
        run.create()
        assert run.error(3).parent.is_dir()
        assert run.rank_pid(3).parent.is_dir()
        assert run.checkpoints.parent == run.path
        assert run.run_id == run.path.name


class TestManifest:
    """The content address of a release."""

    @given(
        st.dictionaries(st.from_regex(r"[a-z]{1,8}(/[a-z.]{1,8}x){0,2}", fullmatch=True), st.just(DIGEST), max_size=6)
    )
    def test_the_id_depends_on_content_and_not_on_order(self, manifest):
        backwards = dict(reversed(manifest.items()))
        assert release_id(manifest) == release_id(backwards)
        assert is_release_id(release_id(manifest))
        text = manifest_text(manifest)
        assert hashlib.sha256(text.encode()).hexdigest().startswith(release_id(manifest))
        assert dict(line.split("  ")[::-1] for line in text.splitlines()) == manifest
        for path in manifest:
            assert release_id({**manifest, path: "b" * 64}) != release_id(manifest)

    @pytest.mark.parametrize(
        "path",
        ["", ".", "..", "/etc/passwd", "../x", "a/../x", "a//b", "./a", "a/", "a\nb", "a\0b", "MANIFEST", "a/./b"],
    )
    def test_paths_that_could_leave_or_be_two(self, path):
        with pytest.raises(ValueError):
            check_path(path)
        with pytest.raises(ValueError):
            manifest_text({path: DIGEST})

    @pytest.mark.parametrize("digest", ["", "A" * 64, "a" * 63, "a" * 64 + "\n"])
    def test_digests(self, digest):
        with pytest.raises(ValueError):
            manifest_text({"a": digest})


class TestErrors:
    """error, cause, hint: to a person and over the wire."""

    @given(st.text(), st.text(), st.text(), st.sampled_from(ExitCode), st.text())
    def test_over_the_wire(self, error, cause, hint, code, detail):
        sent = DflashError(error, cause=cause, hint=hint, code=code, detail=detail)
        got = DflashError.from_json(sent.to_json())
        assert vars(got) == vars(sent)

    @given(st.lists(st.tuples(st.text(), st.text(), st.sampled_from(ExitCode), st.text()), min_size=1, max_size=4))
    def test_several_at_once_are_one_and_come_back_as_several(self, said):
        errors = [DflashError(error, cause=cause, code=code, detail=detail) for error, cause, code, detail in said]
        joined = together([together(errors[:2]), *errors[2:]])
        got = DflashError.from_json(loads_object(dumps(joined.to_json())))
        assert got.to_json() == joined.to_json()
        if len(errors) == 1:
            assert joined is errors[0]
            return
        assert [vars(problem) for problem in got.problems] == [vars(error) for error in errors]
        assert f"{len(errors)} things" in got.error
        assert all(error.error in got.cause and error.render() in got.detail for error in errors)
        assert got.code == (ExitCode.PREFLIGHT if ExitCode.PREFLIGHT in [e.code for e in errors] else errors[0].code)

    @pytest.mark.parametrize("problems", [3, None, ["x", 5, None], {"error": "e"}])
    def test_problems_that_are_none_are_left_out(self, problems):
        assert DflashError.from_json({"error": "e", "problems": problems}).problems == ()

    def test_nested_problems_of_a_hostile_far_end_are_cut_at_the_first_level(self):
        data: dict[str, object] = {"error": "deepest"}
        for _ in range(5000):
            data = {"error": "e", "problems": [data]}
        (problem,) = DflashError.from_json(data).problems
        assert problem.problems == ()

    @pytest.mark.parametrize("data", [{}, {"code": 99}, {"code": "7"}, {"error": 5, "cause": None}, {"code": True}])
    def test_what_a_newer_far_end_says_is_still_an_error(self, data):
        error = DflashError.from_json(data)
        assert error.code in (ExitCode.FAILED, ExitCode.OK + 1)
        assert error.render().startswith("error: ")

    def test_lines(self):
        assert usage_error("a", cause="b", hint="c").render() == "error: a\n  cause: b\n  hint: c"
        assert preflight_error("a").render() == "error: a"
        assert (usage_error("a").code, preflight_error("a").code) == (2, 7)


def test_umask_and_mode(tmp_path):
    write_durably(tmp_path / "secret", b"x", mode=0o600)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
