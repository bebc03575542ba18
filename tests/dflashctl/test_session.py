"""What a command knows before it contacts anybody."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dflashctl.destinations import Destination, DestinationStore
from dflashctl.session import SYSTEM_PYTHON, Session, default_python, operator
from dflashctl.transport.local import Local
from dflashctl.transport.pct import Pct
from remote.protocol.records import RunStatus


@pytest.fixture
def world(tmp_path):
    """Return a function that opens a session in a directory and a home of their own."""
    directory = tmp_path / "cwd"
    directory.mkdir()

    def session(verbose=False, environment=None, **flags):
        home = {"DFLASHCTL_HOME": str(tmp_path / "home")}
        return Session.open(flags, environment=home | (environment or {}), directory=directory, verbose=verbose)

    session.directory = directory
    session.store = DestinationStore(tmp_path / "home")
    return session


DEPLOYED = Destination("local", "", root="/w/d", python="/opt/py", release="0" * 12, revision="r", dirty="d")


def test_without_any_deploy_it_is_this_machine(world):
    session = world()
    assert (session.settings["host"], session.label, session.release) == ("local", "local", "")
    assert session.python == sys.executable
    assert isinstance(session.transport, Local)
    assert session.client.calls == 0


def test_after_a_deploy_nothing_needs_to_be_said(world):
    world.store.remember(DEPLOYED, make_current=True)
    session = world()
    assert (session.settings["root"], session.python, session.release) == ("/w/d", "/opt/py", "0" * 12)
    assert session.destination() == DEPLOYED
    assert session.client.root == "/w/d"


def test_another_root_does_not_use_the_release_of_the_first(world):
    world.store.remember(DEPLOYED, make_current=True)
    session = world(root="/elsewhere")
    assert (session.settings["root"], session.release, session.provenance()) == ("/elsewhere", "", {})


def test_an_explicit_host_beats_the_current_destination_and_finds_its_own(world):
    world.store.remember(DEPLOYED, make_current=False)
    world.store.remember(Destination("10.1.2.6", "200", root="/ws"), make_current=True)
    assert world().label == "container 200 on 10.1.2.6"
    session = world(host="local")
    assert (session.label, session.settings["root"], session.release) == ("local", "/w/d", "0" * 12)


def test_a_container_alone_goes_with_no_remembered_host(world):
    world.store.remember(Destination("10.1.2.6", "200", root="/ws"), make_current=True)
    session = world(environment={"DFLASHCTL_HOST": "10.1.2.6"}, ct="201")
    assert (session.label, session.settings["root"], session.remembered) == ("container 201 on 10.1.2.6", "", None)


def test_a_container_is_reached_through_its_host(world):
    session = world(host="local", ct="200")
    assert (type(session.transport), session.transport.name) == (Pct, "container 200 on local")
    assert session.python == SYSTEM_PYTHON


def test_the_interpreter_of_another_machine_is_the_systems(monkeypatch):
    assert default_python(is_here=False) == SYSTEM_PYTHON
    assert default_python(is_here=True) == sys.executable
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert default_python(is_here=True) == SYSTEM_PYTHON


def test_presets_come_from_what_was_deployed_as_long_as_it_is_there(world, make_tree):
    tree, other = make_tree(), make_tree("other")
    known = Destination("local", root="/w/d", release="0" * 12, source=str(tree), revision="abc", dirty="")
    world.store.remember(known, make_current=True)
    session = world(source=str(other))
    assert (session.source.directory, session.deployed_source.directory) == (other, tree)
    assert session.provenance() == {"directory": str(tree), "revision": "abc", "dirty": ""}
    tree.rename(tree.with_name("moved"))
    assert world(source=str(other)).deployed_source.directory == other


def test_an_agent_to_take_along_is_made_from_the_source(world, make_tree, capsys):
    session = world(source=str(make_tree()), verbose=True, root=str(Path("/nonexistent-root")))
    assert session.client.status("").state == "none"
    assert session.client.calls == 1
    assert capsys.readouterr().err.startswith(f"> local: {sys.executable} -I -c LOADER status")


def test_a_status_bears_the_name_the_operator_uses(world):
    world.store.remember(Destination("10.1.2.6", "200", root="/ws"), make_current=True)
    status = world().here(RunStatus("r", "running"))
    assert (status.host, status.ct) == ("10.1.2.6", "200")
    assert "@" in operator()
