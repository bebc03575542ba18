"""Modules of ours that come when they are first used."""

from __future__ import annotations

import subprocess
import sys

import pytest
from farend import HELLO, far_end

from dflashctl.agent_client import AgentClient
from dflashctl.lazy import lazily
from remote.protocol.codec import plain
from remote.protocol.frames import Kind
from remote.protocol.records import RunStatus

SCRIPT = """
import sys
from dflashctl.lazy import lazily
results = lazily("dflashctl.results")
print("remote.protocol.records" in sys.modules)
import dflashctl.agent_client
print("remote.protocol.records" in sys.modules, "tarfile" in sys.modules)
from dflashctl.results import Runs
print("remote.protocol.records" in sys.modules, results.Runs is Runs, results is sys.modules["dflashctl.results"])
"""


def test_a_client_of_the_agent_executes_the_answers_module_at_its_first_use():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False", "True", "True", "True"]


def test_what_is_imported_already_is_taken():
    import dflashctl.views as views

    assert lazily("dflashctl.views") is views


def test_a_module_that_is_not_there():
    with pytest.raises(ModuleNotFoundError):
        lazily("dflashctl.no_such_module")


def test_meanwhile_comes_once_the_request_is_out_and_before_a_word_is_read():
    order = []

    def play(verb, request, sent):
        order.append("read")
        yield from (HELLO, (Kind.RESULT, plain(RunStatus("", "none"))))

    memory = far_end(play)

    def meanwhile():
        order.append("meanwhile")
        assert b" end " in bytes(memory.channels[0].sent)

    client = AgentClient(memory, python="p", root="/r", release="0" * 12, pyz=bytes, meanwhile=meanwhile)
    assert client.status().state == "none"
    assert order == ["meanwhile", "read"]
