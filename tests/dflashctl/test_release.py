"""A release is its content: same tree, same bytes; anything else does not count."""

from __future__ import annotations

import compileall
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest

from dflashctl.release import Release, build_pyz, build_release
from dflashctl.source import find_source, is_source
from remote.protocol.errors import DflashError, ExitCode
from remote.protocol.manifest import manifest_text


def test_two_copies_give_the_same_bytes(make_tree):
    one, two = make_tree("one"), make_tree("two")
    for path in two.rglob("*"):
        os.utime(path, (1e9, 1e9))
    (two / "remote" / "agent" / "main.py").chmod(0o700)
    first, second = build_release(one), build_release(two)
    assert first.id == second.id
    assert first.archive() == second.archive()
    assert first.pyz == second.pyz == build_pyz(one)


def test_what_is_no_source_is_left_out(make_tree):
    tree = make_tree()
    before = build_release(tree).id
    (tree / "trainer" / "__pycache__").mkdir()
    (tree / "trainer" / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"x")
    (tree / "trainer" / ".hidden").mkdir()
    (tree / "trainer" / ".hidden" / "x.py").write_text("x")
    for name in (".env", "old.pyc", "train.py~"):
        (tree / "trainer" / name).write_text("x")
    (tree / "README.md").write_text("x")
    assert build_release(tree).id == before


@pytest.mark.parametrize("path", ["trainer/__main__.py", "templates/demo.toml", "remote/agent/main.py"])
def test_one_changed_byte_is_another_release(make_tree, path):
    tree = make_tree()
    before = build_release(tree)
    with (tree / path).open("ab") as file:
        file.write(b"\n")
    after = build_release(tree)
    assert after.id != before.id
    assert (after.pyz != before.pyz) == path.startswith("remote/")


def test_the_id_is_the_hash_of_the_manifest_and_the_archive_holds_it(make_tree):
    release = build_release(make_tree())
    assert release.id == hashlib.sha256(manifest_text(release.manifest).encode()).hexdigest()[:12]
    with tarfile.open(fileobj=io.BytesIO(release.archive())) as tar:
        hashes = {m.name: hashlib.sha256(tar.extractfile(m).read()).hexdigest() for m in tar.getmembers()}
    assert hashes == release.manifest


def test_the_agent_runs_from_its_zip_alone(make_tree, tmp_path):
    pyz = tmp_path / "agent.pyz"
    pyz.write_bytes(build_pyz(make_tree()))
    with zipfile.ZipFile(pyz) as archive:
        assert archive.namelist()[0] == "__main__.py"
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
    answer = subprocess.run(
        [sys.executable, "-I", pyz, "status"], input=b"", capture_output=True, cwd="/", timeout=20, check=False
    )
    assert b"no request" in answer.stderr


def test_an_unreadable_file_is_a_usage_error(make_tree):
    tree = make_tree()
    (tree / "trainer" / "loop.py").symlink_to("loop.py")
    # A dangling link is no file and is left out; a directory that cannot be read as a file is impossible: use a FIFO.
    os.mkfifo(tree / "trainer" / "fifo.py")
    assert not [path for path in build_release(tree).files if "fifo" in path or "loop" in path]


def test_a_directory_without_the_three_folders_is_named(tmp_path):
    with pytest.raises(DflashError, match="no source tree") as caught:
        find_source(tmp_path, tmp_path)
    assert caught.value.code == ExitCode.USAGE
    assert "no trainer" in caught.value.cause


def test_the_source_is_the_flag_else_the_nearest_parent_else_the_package(make_tree, tmp_path):
    tree, other = make_tree(), make_tree("other")
    deep = tree / "trainer"
    assert find_source(other, deep).origin == "--source"
    assert find_source(None, deep).directory == tree
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = find_source(None, elsewhere, installed=other)
    assert (found.directory, found.origin) == (other, "installed package")
    assert not is_source(elsewhere)


def git(tree, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=tree, check=True, capture_output=True)


def test_provenance_tells_revision_and_change(make_tree):
    tree = make_tree()
    source = find_source(tree, tree)
    assert source.provenance()["revision"] == ""
    git(tree, "init", "-q")
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "x")
    clean = source.provenance()
    assert (len(clean["revision"]), clean["dirty"]) == (40, "")
    (tree / "trainer" / "new.py").write_text("x = 1\n")
    untracked = source.provenance()["dirty"]
    with (tree / "trainer" / "__main__.py").open("a") as file:
        file.write("# changed\n")
    both = source.provenance()["dirty"]
    assert len({"", untracked, both}) == 3


def test_an_empty_release_has_an_id():
    assert len(Release({}).id) == 12


def compiled(pyz):
    """Run an agent; return the modules of remote/ that Python took compiled."""
    command = [sys.executable, "-I", "-v", pyz, "status"]
    answer = subprocess.run(command, input=b"", capture_output=True, cwd="/", timeout=20, check=False)
    assert b"no request" in answer.stderr
    return set(re.findall(rb"# code object from '?\S*/(remote/\S+)/__pycache__/", answer.stderr.replace(b"'", b"")))


def test_an_agent_in_its_release_runs_from_compiled_files_and_writes_none(make_tree, tmp_path):
    for path, content in build_release(make_tree()).files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    assert compiled(tmp_path / "agent.pyz") == set()
    assert not list(tmp_path.rglob("*.pyc"))
    assert compileall.compile_dir(tmp_path / "remote", quiet=2)
    assert compiled(tmp_path / "agent.pyz") == {b"remote/agent", b"remote/protocol"}
    # Compiled files of another tree, or of one that was edited since, are none.
    (tmp_path / "remote" / "agent" / "main.py").write_text("raise SystemExit('no request: edited')")
    assert compiled(tmp_path / "agent.pyz") <= {b"remote/agent"}
