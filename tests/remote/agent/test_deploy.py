"""The verbs deploy, releases and rollback: what arrives damaged never becomes current."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import threading
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote.agent.interpreters import packages_of
from remote.agent.upload import receive
from remote.protocol.codec import loads_object
from remote.protocol.errors import DflashError
from remote.protocol.frames import FrameError, Kind
from remote.protocol.layout import RootLayout
from remote.protocol.locks import LockKind, acquire
from remote.protocol.manifest import manifest_text, release_id
from tests.remote.conftest import manifest_of, tar_of

FILES = {"agent.pyz": b"zip", "trainer/a.py": b"x = 1\n", "templates/demo.toml": b"\n"}


def test_a_release_is_in_place_read_only_and_current(far):
    directory = far.root.current.resolve()
    assert directory.name == far.release
    assert loads_object(far.root.history.read_bytes())["switches"][-1]["release"] == far.release
    modes = {path.stat().st_mode & 0o777 for path in directory.rglob("*")}
    assert modes == {0o444, 0o555}
    text = (directory / "MANIFEST").read_text()
    assert release_id(dict(reversed(line.split("  ")) for line in text.splitlines())) == far.release


def test_an_unchanged_tree_sends_nothing(far):
    again = far.deploy(upload=b"never sent")
    assert again.events[0] == {"need": False}
    assert again.result["changed"] is False
    assert again.result["sent"] is False


def test_compressed_uploads_are_welcome(bare):
    assert bare.deploy(FILES, upload=gzip.compress(tar_of(FILES))).result["changed"]


def test_umask_does_not_matter(bare):
    before = os.umask(0o077)
    try:
        release = bare.deploy(FILES).result["release"]
    finally:
        os.umask(before)
    assert (bare.root.release(release) / "agent.pyz").stat().st_mode & 0o777 == 0o444


def test_the_agent_of_a_release_knows_which_it_is(far):
    far.pyz = far.root.release(far.release) / "agent.pyz"
    assert far.call("status").hello["agent"] == far.release


def test_a_damaged_release_is_sent_again(far):
    victim = far.root.release(far.release) / "remote" / "__init__.py"
    victim.chmod(0o644)
    victim.write_text("damaged")
    assert far.deploy().result["sent"] is True
    assert victim.read_text() == ""
    assert [path.name for path in far.root.releases.iterdir() if path.name.startswith(".tmp")] == []


def corrupted() -> dict[str, bytes]:
    good = tar_of(FILES)
    flipped = bytearray(good)
    flipped[good.index(b"x = 1")] ^= 1
    return {
        "a flipped bit": bytes(flipped),
        "a truncated tar": good[: good.index(b"x = 1")],
        "nothing": b"",
        "no tar": b"\x00garbage" * 1000,
        "a file too few": tar_of({"agent.pyz": b"zip"}),
        "a file too many": tar_of({**FILES, "extra.py": b""}),
        "a file twice": tar_of(FILES, ("agent.pyz", b"zip")),
        "an absolute path": tar_of({**FILES, "/tmp/evil": b""}),
        "a path that leaves": tar_of({**FILES, "../evil": b""}),
        "a link": special_tar(tarfile.SYMTYPE),
        "a hard link": special_tar(tarfile.LNKTYPE),
        "a device": special_tar(tarfile.CHRTYPE),
    }


def special_tar(kind: bytes) -> bytes:
    """Return a tar whose first member has the name of a file of the release, but is none."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("agent.pyz")
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    return buffer.getvalue()


def bare_python() -> str:
    """Return the system's Python, which has no torch; the tests run in a venv."""
    if "torch" in packages_of("/usr/bin/python3").versions:
        pytest.skip("the system's Python has torch here")
    return "/usr/bin/python3"


def frames_of(upload: bytes):
    yield upload


@pytest.mark.parametrize("what", corrupted())
def test_what_is_not_the_release_is_refused_and_nothing_stays(tmp_path: Path, what):
    root = RootLayout(tmp_path)
    root.create()
    manifest = manifest_of(FILES)
    with pytest.raises(DflashError) as caught:
        receive(root, release_id(manifest), manifest, frames_of(corrupted()[what]))
    assert caught.value.code == 1
    assert list(root.releases.iterdir()) == []
    assert [path.name for path in root.start_lock.parent.iterdir()] == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, len(tar_of(FILES)) - 1025), chunk=st.integers(1, 5000))
def test_no_cut_of_an_upload_is_accepted(tmp_path: Path, cut, chunk):
    root = RootLayout(tmp_path)
    root.create()
    upload = tar_of(FILES)[:cut]

    def frames():
        for at in range(0, len(upload), chunk):
            yield upload[at : at + chunk]
        raise FrameError("the upload ended early")

    with pytest.raises(DflashError):
        receive(root, release_id(manifest_of(FILES)), manifest_of(FILES), frames())
    assert list(root.releases.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncated", "client killed"])
def test_over_the_wire_current_stays(far, wait_for, damage):
    files = {**FILES, "new.py": os.urandom(300_000)}
    manifest = manifest_of(files)
    call = far.begin("deploy", release=release_id(manifest), manifest=manifest, selfcheck=False)
    assert call.until(lambda frame: frame.kind is Kind.EVENT).json() == {"need": True}
    call.send(tar_of(files)[:100_000], end=False)
    if damage == "truncated":
        error = call.reply().error
        assert error["code"] == 1
        assert "ended early" in error["cause"]
    else:
        call.kill()
        # The next deploy clears away what the dead one left.
        assert far.deploy().result["sent"] is False
        assert far.deploy(files).result["sent"] is True
        return
    assert far.root.current.resolve().name == far.release
    assert {path.name for path in far.root.releases.iterdir()} == {far.release, ".history.json"}


def test_a_living_deploys_directory_is_left_alone(tmp_path: Path):
    root = RootLayout(tmp_path)
    root.create()
    dead, living = root.releases / ".tmp-aaaaaaaaaaaa-1", root.releases / ".tmp-aaaaaaaaaaaa-2"
    dead.mkdir()
    living.mkdir()
    lock = acquire(root.start_lock.with_name(living.name), LockKind.EXCLUSIVE)
    try:
        receive(root, release_id(manifest_of(FILES)), manifest_of(FILES), frames_of(tar_of(FILES)))
    finally:
        os.close(lock)
    assert not dead.exists()
    assert living.exists()


def test_two_deploys_at_once(bare):
    replies = []
    threads = [threading.Thread(target=lambda: replies.append(bare.deploy(FILES))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {reply.result["release"] for reply in replies} == {bare.root.current.resolve().name}
    assert (bare.root.current / "trainer/a.py").read_bytes() == b"x = 1\n"


@pytest.mark.parametrize(
    "request_fields",
    [
        {"release": "aaaaaaaaaaaa", "manifest": manifest_of(FILES)},
        {"release": release_id({}), "manifest": {}},
        {"release": "aaaaaaaaaaaa", "manifest": {"../x": "0" * 64}},
        {"release": "../../x", "manifest": {"a": "not a digest"}},
        {"release": "aaaaaaaaaaaa", "manifest": 5},
    ],
)
def test_a_release_that_is_not_its_manifest_is_refused(far, request_fields):
    assert far.call("deploy", **request_fields).error["code"] == 2
    assert far.root.current.resolve().name == far.release


def test_a_root_that_cannot_be_made(bare):
    bare.root.path.write_text("a file")
    error = bare.deploy(FILES).error
    assert error["code"] == 7
    assert "--root" in error["hint"]


class TestSelfcheck:
    """The new release checks itself before it becomes current."""

    PASSING = (
        "import sys, pathlib\nassert sys.argv[1:] == ['selfcheck', '--json']\n"
        'print(\'{"kind": "phase", "time": 1.0, "role": "selfcheck", "phase": "compile"}\', flush=True)\n'
        "print('{\"modules\": 3}')\n"
    )

    def test_it_passes_is_told_and_kept(self, far):
        files = far.files(__main__=self.PASSING)
        first = far.deploy(files, selfcheck=True)
        assert first.result["selfcheck"]["result"] == {"modules": 3}
        assert {"compile", "selfcheck"} <= {event.get("phase") for event in first.events}
        again = far.deploy(files, selfcheck=True)
        assert again.result["selfcheck"] == first.result["selfcheck"]
        assert "compile" not in {event.get("phase") for event in again.events}, "not run again"

    def test_a_failure_leaves_current_and_is_not_kept(self, far):
        files = far.files(__main__="import trainer.broken", broken="bucket_ids += 1\n")
        for _ in range(2):
            error = far.deploy(files, selfcheck=True).error
            assert error["code"] == 7
            assert "NameError: name 'bucket_ids' is not defined" in error["detail"]
            assert far.root.current.resolve().name == far.release
        assert far.deploy(files, selfcheck=False).result["changed"] is True

    def test_what_the_check_reports_is_shown_as_text_without_its_events(self, far):
        report = {"error": "the toy did not train", "cause": "boom", "hint": "mend it", "detail": "line one\nline two"}
        program = (
            'print(\'{"kind": "phase", "time": 1.0, "role": "leader", "phase": "selfcheck"}\')\n'
            f"print({json.dumps(report)!r})\nprint('noise of a library')\nraise SystemExit(7)\n"
        )
        error = far.deploy(far.files(__main__=program), selfcheck=True).error
        assert (error["cause"], error["hint"], error["detail"]) == ("boom", "mend it", "line one\nline two")
        silent = program.replace("line one\\\\nline two", "")
        assert silent != program
        assert far.deploy(far.files(__main__=silent), selfcheck=True).error["detail"] == "noise of a library"

    def test_a_failure_of_a_python_without_torch_is_that_of_the_python(self, far):
        files = far.files(__main__="import no_such_package_here\n")
        manifest = manifest_of(files)
        call = far.begin("deploy", release=release_id(manifest), manifest=manifest, python=bare_python())
        call.until(lambda frame: frame.kind is Kind.EVENT)
        call.send(tar_of(files))
        error = call.reply().error
        assert error["code"] == 7
        assert error["error"].startswith(f"{bare_python()} lacks torch, transformers")
        assert "pip install" in error["hint"]
        assert far.root.current.resolve().name == far.release


class TestRollback:
    """Going back along the releases that were current."""

    def test_back_and_forth(self, far):
        first = far.release
        second = far.deploy(FILES).result["release"]
        listed = far.ok("releases")
        assert {entry["release"] for entry in listed["releases"]} == {first, second}
        assert [entry["release"] for entry in listed["releases"] if entry["current"]] == [second]
        assert far.ok("rollback") == {"release": first, "previous": second}
        assert far.ok("rollback") == {"release": second, "previous": first}
        assert far.ok("rollback", to=first)["release"] == first

    def test_nowhere_to_go(self, far):
        error = far.call("rollback").error
        assert error["code"] == 7
        assert error["cause"] == f"release {far.release} is the only one that was deployed there"
        assert far.call("rollback", to="aaaaaaaaaaaa").error["code"] == 7
        assert far.call("rollback", to="../../etc").error["code"] == 2
        assert far.root.current.resolve().name == far.release

    def test_where_nothing_was_deployed_it_says_so_and_makes_nothing(self, bare):
        error = bare.call("rollback").error
        assert (error["code"], error["error"]) == (7, "nothing is deployed there")
        assert "dflashctl deploy" in error["hint"]
        assert not bare.root.path.exists()

    def test_a_torn_history_is_no_obstacle(self, far):
        far.root.history.write_text('{"switches": [{"rel')
        second = far.deploy(FILES).result
        assert second["previous"] == far.release
        assert far.ok("rollback", to=far.release)["release"] == far.release


def test_the_manifest_text_is_what_sha256sum_checks(far):
    directory = far.root.release(far.release)
    manifest = {
        str(path.relative_to(directory)): path
        for path in directory.rglob("*")
        if path.is_file() and path.name != "MANIFEST" and path.suffix != ".pyc"
    }
    digests = manifest_of({name: path.read_bytes() for name, path in manifest.items()})
    assert (directory / "MANIFEST").read_text() == manifest_text(digests)


def test_the_agent_of_a_release_lies_there_compiled(far):
    directory = far.root.release(far.release)
    sources = set((directory / "remote").rglob("*.py"))
    assert sources
    assert {cache_from_source(str(path)) for path in sources} == {str(path) for path in directory.rglob("*.pyc")}
    # A traceback names the file as it lies, not where it was unpacked.
    code = (directory / "remote/protocol/__pycache__").joinpath(Path(cache_from_source("codec.py")).name).read_bytes()
    assert f"/releases/{far.release}/remote/protocol/codec.py".encode() in code
