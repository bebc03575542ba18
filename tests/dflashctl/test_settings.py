"""Which layer wins, where a value came from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.destinations import Destination
from dflashctl.settings import SETTINGS, find_project_file, resolve, with_destination
from remote.protocol.errors import DflashError, ExitCode

NOWHERE = Path("/nonexistent/config.toml")


@given(present=st.lists(st.booleans(), min_size=4, max_size=4))
def test_flag_beats_environment_beats_project_beats_user_beats_default(present, tmp_path_factory):
    directory = tmp_path_factory.mktemp("settings")
    flag, environment, project, user = present
    project_file, user_file = directory / "dflashctl.toml", directory / "config.toml"
    project_file.write_text('limit = "30"\n' if project else "")
    user_file.write_text("limit = 40\n" if user else "")
    settings = resolve(
        {"limit": "10" if flag else None}, {"DFLASHCTL_LIMIT": "20"} if environment else {}, project_file, user_file
    )
    layers = [("10", "--limit"), ("20", "DFLASHCTL_LIMIT"), ("30", str(project_file)), ("40", str(user_file))]
    expected = next((layer for layer, there in zip(layers, present, strict=True) if there), ("600", "default"))
    assert (settings["limit"], settings.values["limit"].origin) == expected


@pytest.mark.parametrize("key", sorted(SETTINGS))
def test_every_setting_has_a_variable_and_a_meaning(key):
    texts = {"limit": "5", "grace": "5", "ct": "200", "host": "h"}
    environment = {f"DFLASHCTL_{key.upper()}": texts.get(key, "/x")}
    if key == "ct":
        environment["DFLASHCTL_HOST"] = "h"
    settings = resolve({}, environment, None, NOWHERE)
    assert settings.values[key].origin == f"DFLASHCTL_{key.upper()}"
    assert SETTINGS[key].help


@pytest.mark.parametrize(
    ("where", "near"),
    [({"DFLASHCTL_HOTS": "x"}, "DFLASHCTL_HOST"), ({"DFLASHCTL_SSHCONFIG": "x"}, "DFLASHCTL_SSH_CONFIG")],
)
def test_an_unknown_variable_names_its_neighbour(where, near):
    with pytest.raises(DflashError) as caught:
        resolve({}, where, None, NOWHERE)
    assert (caught.value.code, near in caught.value.hint) == (ExitCode.USAGE, True)


def test_home_is_a_variable_but_no_setting():
    resolve({}, {"DFLASHCTL_HOME": "/x"}, None, NOWHERE)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('hots = "x"', "unknown key 'hots'"),
        ("limit = true", "limit = True is not possible"),
        ("limit = [1]", "limit = [1] is not possible"),
        ("limit = ", "cannot read"),
        ("limit = -3", "limit = '-3' is not possible"),
        ('limit = "soon"', "limit = 'soon' is not possible"),
        ('limit = "nan"', "limit = 'nan' is not possible"),
        ('ct = "02"', "ct = '02' is not possible"),
        ('host = "-oProxyCommand=x"', "is not possible"),
        ('python = "/usr/bin/pythön"', "is not possible"),
    ],
)
def test_a_bad_project_file_is_a_usage_error_that_names_the_file_or_value(tmp_path, text, error):
    file = tmp_path / "dflashctl.toml"
    file.write_text(text)
    with pytest.raises(DflashError) as caught:
        resolve({}, {}, file, NOWHERE)
    assert error in caught.value.error
    assert caught.value.code == ExitCode.USAGE
    assert "dflashctl.toml" in caught.value.render()


@given(st.text(max_size=12))
def test_a_container_id_is_what_proxmox_says(text):
    good = text.isascii() and text.isdigit() and 3 <= len(text) <= 9 and text[0] != "0"
    if good or text == "":
        assert resolve({"host": "h", "ct": text}, {}, None, NOWHERE)["ct"] == text
        return
    with pytest.raises(DflashError) as caught:
        resolve({"host": "h", "ct": text}, {}, None, NOWHERE)
    assert caught.value.code == ExitCode.USAGE


def test_a_container_of_this_very_machine_is_not_here():
    assert resolve({"host": "local"}, {}, None, NOWHERE).is_here
    assert not resolve({"host": "local", "ct": "200"}, {}, None, NOWHERE).is_here
    assert not resolve({"host": "10.1.2.6"}, {}, None, NOWHERE).is_here


def test_paths_in_a_file_lie_beside_it(tmp_path):
    (tmp_path / "dflashctl.toml").write_text('config = "sub/run.toml"\nroot = "relative/stays"\n')
    settings = resolve({}, {}, tmp_path / "dflashctl.toml", NOWHERE)
    assert settings.path("config") == tmp_path / "sub" / "run.toml"
    assert settings["root"] == "relative/stays"


def test_the_project_file_is_found_in_a_parent(tmp_path):
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "dflashctl.toml").write_text("")
    assert find_project_file(below) == tmp_path / "dflashctl.toml"


REMEMBERED = Destination("10.1.2.6", "200", root="/w/d", python="/opt/py", release="0" * 12)


def test_the_remembered_destination_fills_what_nobody_set():
    settings = with_destination(resolve({"python": "/my/py"}, {}, None, NOWHERE), REMEMBERED)
    assert (settings["host"], settings["ct"], settings["root"], settings["python"]) == (
        "10.1.2.6",
        "200",
        "/w/d",
        "/my/py",
    )
    assert "remembered" in settings.values["host"].origin


def test_another_host_gets_nothing_of_it():
    settings = with_destination(resolve({"host": "local"}, {}, None, NOWHERE), REMEMBERED)
    assert (settings["host"], settings["ct"], settings["root"]) == ("local", "", "")
