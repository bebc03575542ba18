"""Whatever a client sends, each verb gives one answer, and no bug of ours is what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote.agent.main import VERBS, _run
from remote.agent.wire import Answer, Request
from remote.protocol.errors import DflashError
from remote.protocol.layout import RootLayout

scalars = st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=8)
texts = st.text(max_size=8) | st.sampled_from(
    ["\0", "../..", "/", "/proc/self", "last", "20200101-000000-aaaaaa", "@", "a" * 5000]
)
values = scalars | texts | st.lists(texts, max_size=2) | st.dictionaries(texts, scalars, max_size=2)
FIELDS = {
    "doctor": ["python", "release", "config"],
    "deploy": ["release", "manifest", "selfcheck", "python"],
    "releases": [],
    "rollback": ["to"],
    "start": ["spec", "python", "argv", "resume", "preflight", "limit", "wait_gpus", "current"],
    "stop": ["run", "now", "grace", "timeout", "by"],
    "restart": [
        "spec",
        "python",
        "argv",
        "resume",
        "preflight",
        "limit",
        "wait_gpus",
        "current",
        "run",
        "now",
        "grace",
        "by",
    ],
    "status": ["run"],
    "runs": ["limit"],
    "spec": ["run", "resume"],
    "logs": ["run", "file", "offset", "tail", "device", "inode"],
}


class Recorder(Answer):
    """An answer that keeps its end instead of sending it."""

    def __init__(self) -> None:
        super().__init__("0" * 16, -1)
        self.ends: list[Any] = []

    def _write(self, frame) -> None:
        pass

    def result(self, value: dict[str, Any]) -> None:
        self.ends.append(value)

    def error(self, error: DflashError, *, debug: str = "") -> None:
        assert not debug, debug
        self.ends.append(error)


def test_every_verb_is_covered():
    assert FIELDS.keys() == VERBS.keys()


@pytest.mark.parametrize("verb", FIELDS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_answer_and_no_bug(tmp_path: Path, verb, data):
    body = {key: data.draw(values, label=key) for key in FIELDS[verb] if data.draw(st.booleans())}
    RootLayout(tmp_path / "root").create()
    answer = Recorder()
    _run(verb, Request("0" * 16, {**body, "root": str(tmp_path / "root")}, iter(())), answer)
    assert len(answer.ends) == 1
    assert list((tmp_path / "root" / "runs").iterdir()) == []


@settings(max_examples=40, deadline=None)
@given(root=values | st.text(st.characters(), max_size=5) | st.sampled_from(["~nobody-here/x", "\ud800", "~"]))
def test_any_root(root):
    answer = Recorder()
    _run("status", Request("0" * 16, {"root": root}, iter(())), answer)
    assert len(answer.ends) == 1
