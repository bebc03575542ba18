"""known_hosts means here what it means to OpenSSH: ssh-keygen is asked where it can be."""

from __future__ import annotations

import base64
import os
import shutil
import stat
import string
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflashctl.errors import NoAnswer
from dflashctl.transport.knownhosts import (
    Changed,
    HostKey,
    Revoked,
    Trusted,
    Unknown,
    judge,
    learn,
    preferred_algorithms,
    read_known_hosts,
    read_revoked_keys,
)

needs_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen here")


def key(number=1, kind="ssh-ed25519"):
    """Return a key of the right shape; nobody holds its other half."""
    parts = [kind.encode(), bytes([number]) * 32]
    return HostKey(kind, b"".join(len(part).to_bytes(4, "big") + part for part in parts))


def line(names, which, marker=""):
    return f"{marker} {names} {which.kind} {base64.b64encode(which.blob).decode()} a comment\n".lstrip()


@pytest.fixture
def known(tmp_path):
    """Return a function that writes known_hosts and reads it."""

    def read(*lines):
        (tmp_path / "known_hosts").write_text("".join(lines))
        return read_known_hosts([tmp_path / "known_hosts", tmp_path / "missing"])

    return read


def test_a_known_key_is_trusted_and_says_from_where(known, tmp_path):
    entries = known("# comment\n", "\n", line("other", key(2)), line("box,10.0.0.1", key(1)))
    verdict = judge(entries, "10.0.0.1", key(1))
    assert isinstance(verdict, Trusted)
    assert verdict.entry.place == f"{tmp_path}/known_hosts:4"


def test_a_key_that_nobody_knows(known):
    assert judge(known(line("other", key(1))), "box", key(1)) == Unknown()
    assert judge(known(), "box", key(1)) == Unknown()


def test_a_changed_key_names_what_was_known(known):
    verdict = judge(known(line("box", key(1)), line("box", key(3, "ssh-rsa"))), "box", key(2))
    assert isinstance(verdict, Changed)
    assert [entry.line for entry in verdict.entries] == [1, 2]


def test_any_of_several_keys_will_do(known):
    entries = known(line("box", key(1)), line("box", key(2)))
    assert isinstance(judge(entries, "box", key(2)), Trusted)


def test_a_key_of_another_type_is_no_proof(known):
    assert isinstance(judge(known(line("box", key(1, "ssh-rsa"))), "box", key(1)), Changed)


def test_a_revoked_key_is_refused_even_if_it_is_trusted_elsewhere(known, tmp_path):
    entries = known(line("box", key(1)), line("*", key(1), "@revoked"))
    assert judge(entries, "box", key(1)) == Revoked(f"{tmp_path}/known_hosts:2")


def test_a_certificate_authority_is_no_host_key(known):
    entries = known(line("*.lab", key(1), "@cert-authority"))
    verdict = judge(entries, "box.lab", key(1))
    assert isinstance(verdict, Unknown)
    assert verdict.authority == entries[0]


def test_a_marker_that_nobody_knows_trusts_nothing(known):
    assert known(line("box", key(1), "@trusted")) == []


def test_a_port_needs_an_entry_of_its_own_or_the_same_key(known):
    entries = known(line("box", key(1)))
    assert isinstance(judge(entries, "[box]:2222", key(1)), Trusted)
    # Another machine behind the same address, as with forwarded ports: unknown, not changed.
    assert judge(entries, "[box]:2222", key(2)) == Unknown()
    assert judge(known(line("[box]:2222", key(1))), "box", key(1)) == Unknown()


@pytest.mark.parametrize(
    "text",
    [
        "box\n",
        "box ssh-ed25519\n",
        "box ssh-ed25519 !!!\n",
        "@revoked\n",
        "\x00\xff",
        "box ssh-ed25519 AAAA=A\n",
        "|1|x ssh-rsa AAAA\n",
    ],
)
def test_lines_without_sense_are_skipped(tmp_path, text):
    (tmp_path / "known_hosts").write_bytes(text.encode("latin-1") + b"\n" + line("box", key(1)).encode())
    entries = read_known_hosts([tmp_path / "known_hosts"])
    assert isinstance(judge(entries, "box", key(1)), Trusted)


def test_a_file_that_cannot_be_read_is_an_error_not_an_empty_one(tmp_path):
    with pytest.raises(NoAnswer) as caught:
        read_known_hosts([tmp_path])
    assert str(tmp_path) in caught.value.error


def test_known_types_are_asked_for_first(known):
    entries = known(line("box", key(1, "ssh-rsa")), line("[box]:22", key(2)), line("box", key(2), "@revoked"))
    assert preferred_algorithms(entries, "box") == ["rsa-sha2-512", "rsa-sha2-256"]
    assert preferred_algorithms(entries, "[box]:22") == ["ssh-ed25519", "rsa-sha2-512", "rsa-sha2-256"]
    assert preferred_algorithms(known(line("box", key(1, "ssh-dss"))), "box") == []


def test_revoked_host_keys(tmp_path):
    path = tmp_path / "revoked"
    path.write_text(f"# lost\n{line('', key(1)).strip()}\n")
    assert read_revoked_keys([path], key(1)) == Revoked(f"{path}:2")
    assert read_revoked_keys([path], key(2)) is None
    assert read_revoked_keys([], key(1)) is None


@pytest.mark.parametrize("content", [b"SSHKRL\n\x00", None])
def test_a_list_of_revoked_keys_that_cannot_be_read_lets_nothing_through(tmp_path, content):
    if content is not None:
        (tmp_path / "revoked").write_bytes(content)
    with pytest.raises(NoAnswer) as caught:
        read_revoked_keys([tmp_path / "revoked"], key(1))
    assert "RevokedHostKeys" in caught.value.hint


# What a name in known_hosts is made of, and the pattern characters of OpenSSH beside those of a shell.
NAMES = st.text(string.ascii_lowercase + "01.-[]:", min_size=1, max_size=6).filter(lambda text: text[0] not in "-")
PATTERNS = st.text(string.ascii_letters + "01.-[]:*?", min_size=1, max_size=6).filter(
    lambda text: text[0] not in "-@#|!"
)


@needs_keygen
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), PATTERNS), min_size=1, max_size=3), NAMES)
def test_patterns_match_as_ssh_keygen_says(tmp_path, patterns, name):
    path = tmp_path / "known_hosts"
    names = ",".join(("!" if negated else "") + pattern for negated, pattern in patterns)
    path.write_text(line(names, HostKey("ssh-ed25519", key(1).blob)))
    found = subprocess.run(["ssh-keygen", "-F", name, "-f", path], capture_output=True, check=False).stdout
    assert isinstance(judge(read_known_hosts([path]), name, key(1)), Trusted) == bool(found)


@needs_keygen
def test_names_that_ssh_keygen_hashed(tmp_path):
    path = tmp_path / "known_hosts"
    path.write_text(line("box", key(1)) + line("[box]:2222", key(2)))
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", path], check=True, capture_output=True)
    assert "box" not in path.read_text().replace("a comment", "")
    entries = read_known_hosts([path])
    assert isinstance(judge(entries, "box", key(1)), Trusted)
    assert isinstance(judge(entries, "[box]:2222", key(2)), Trusted)
    assert judge(entries, "boxes", key(1)) == Unknown()


@needs_keygen
@pytest.mark.parametrize("hashed", [True, False])
def test_ssh_keygen_finds_what_was_learnt(tmp_path, hashed):
    path = tmp_path / "known_hosts"
    learn(path, "[box]:2222", key(1), hashed=hashed, replace=False)
    found = subprocess.run(
        ["ssh-keygen", "-l", "-F", "[box]:2222", "-f", path], capture_output=True, text=True, check=True
    )
    assert key(1).fingerprint in found.stdout
    assert ("box" in path.read_text()) != hashed


def test_a_new_file_is_for_its_owner_alone(tmp_path):
    path = tmp_path / "ssh" / "known_hosts"
    old = os.umask(0)
    try:
        learn(path, "box", key(1), hashed=False, replace=False)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["known_hosts"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_learning_keeps_every_byte_that_was_there(tmp_path, before):
    path = tmp_path / "known_hosts"
    path.write_bytes(before)
    path.chmod(0o644)
    learn(path, "box", key(1), hashed=False, replace=False)
    after = path.read_bytes()
    assert after.startswith(before)
    assert after[len(before) :] in (
        line("box", key(1)).replace(" a comment", "").encode(),
        b"\n" + line("box", key(1)).replace(" a comment", "").encode(),
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert isinstance(judge(read_known_hosts([path]), "box", key(1)), Trusted)


def test_replacing_takes_the_old_key_out_of_its_lines_only(tmp_path):
    path = tmp_path / "known_hosts"
    others = [
        line("other", key(1)),
        "# box\n",
        line("box", key(4), "@revoked"),
        "garbage box\r\n",
        line("[box]:2222", key(1)),
    ]
    path.write_text(
        "".join([others[0], line("box", key(1)), *others[1:], line("a,BOX,b", key(5)), line("box", key(6))]), newline=""
    )
    learn(path, "box", key(2), hashed=False, replace=True)
    expected = "".join([*others, line("a,b", key(5)), line("box", key(2)).replace(" a comment", "")])
    assert path.read_bytes().decode() == expected
    assert isinstance(judge(read_known_hosts([path]), "box", key(2)), Trusted)
    assert isinstance(judge(read_known_hosts([path]), "box", key(1)), Changed)


def test_a_hashed_old_key_is_replaced_too(tmp_path):
    path = tmp_path / "known_hosts"
    learn(path, "box", key(1), hashed=True, replace=False)
    learn(path, "box", key(2), hashed=True, replace=True)
    assert len(path.read_text().splitlines()) == 1
    assert isinstance(judge(read_known_hosts([path]), "box", key(2)), Trusted)


def test_an_old_key_for_many_machines_is_not_touched(tmp_path):
    path = tmp_path / "known_hosts"
    path.write_text(line("*.lab,box", key(1)))
    with pytest.raises(NoAnswer) as caught:
        learn(path, "a.lab", key(2), hashed=False, replace=True)
    assert f"{path}:1" in caught.value.error
    assert path.read_text() == line("*.lab,box", key(1))


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "dotfiles").mkdir()
    (tmp_path / "known_hosts").symlink_to(tmp_path / "dotfiles" / "known_hosts")
    learn(tmp_path / "known_hosts", "box", key(1), hashed=False, replace=False)
    assert (tmp_path / "known_hosts").is_symlink()
    assert (tmp_path / "dotfiles" / "known_hosts").is_file()


@pytest.mark.parametrize("path", [Path("/dev/null"), Path("/proc/known_hosts")])
def test_where_nothing_can_be_kept(path):
    with pytest.raises(NoAnswer) as caught:
        learn(path, "box", key(1), hashed=False, replace=False)
    assert str(path) in caught.value.error
    assert not Path("/dev/null").is_file()


def test_a_key_is_shown_as_ssh_keygen_shows_it():
    assert str(key(1)).startswith("ED25519 SHA256:")
    assert str(HostKey("sk-new", b"")).startswith("sk-new SHA256:")
