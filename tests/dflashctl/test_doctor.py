"""What doctor makes of hops, of an agent's answer and of a broken one, and how a finding looks."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest
from farend import HELLO, far_end
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.agent_client import AgentClient
from dflashctl.console import Stream
from dflashctl.doctor import Examination, as_json, exit_code, finding_lines
from dflashctl.errors import NoAnswer
from dflashctl.session import Session
from dflashctl.transport import Finding, Silence
from remote.protocol.codec import dumps
from remote.protocol.errors import ExitCode, preflight_error
from remote.protocol.frames import Kind

HOPS = (
    Finding("ssh", "ok", "root@10.1.2.6"),
    Finding("host key", "ok", "ED25519, known"),
    Finding("pct", "ok", "8.4.1"),
    Finding("container", "ok", "200 runs"),
)
AGENT = [
    {"name": "python", "state": "ok", "text": "3.11.2"},
    {"name": "GPUs", "state": "failed", "text": "GPU 1 is held", "hint": "wait", "code": 7},
    {"name": "data", "state": "warning", "text": "not read"},
]


class Place:
    """A session whose way is `hops` and whose far end answers doctor with `items`, and what was asked of it."""

    def __init__(self, tmp_path, hops=HOPS, items=None, *, host="10.1.2.6", release="0" * 12):
        self.requests = []
        self.items = [{"finding": each} for each in AGENT] if items is None else items
        home = {"DFLASHCTL_HOME": str(tmp_path), "DFLASHCTL_HOST": host, "DFLASHCTL_ROOT": "/r"}
        self.session = Session.open({}, environment=home, directory=tmp_path)
        self.transport = far_end(self._play)
        self.transport.examine = lambda: iter(hops)
        client = AgentClient(self.transport, python="p", root="/r", release=release, pyz=lambda: b"zip")
        self.session.__dict__.update(transport=self.transport, client=client)
        self.said = []

    def _play(self, verb, request, sent):
        self.requests.append((verb, request))
        yield HELLO
        if verb == "releases":
            yield (Kind.RESULT, {"current": "", "releases": []})
            return
        for item in self.items:
            yield item if isinstance(item, Exception | tuple) else (Kind.EVENT, item)
        yield (Kind.RESULT, {"findings": len(self.items)})

    def examine(self):
        talk = type("Talk", (), {"say": self.said.append, "__call__": lambda _, data: self.said.append(data)})()
        self.examination = Examination(self.session, talk, again=lambda: self.session)
        return list(self.examination)


def test_the_lines_come_hop_by_hop_and_then_from_one_call(tmp_path):
    place = Place(tmp_path)
    found = place.examine()
    assert [each.name for each in found] == [
        "ssh", "host key", "pct", "container", "python", "GPUs", "data", "round trip",
    ]  # fmt: skip
    assert [verb for verb, _ in place.requests] == ["doctor"] + ["releases"] * 4
    assert exit_code(found) == 7
    assert found[5] == Finding("GPUs", "failed", "GPU 1 is held", "wait", ExitCode.PREFLIGHT)


def test_the_configuration_that_a_start_would_use_travels_and_is_named(tmp_path):
    place = Place(tmp_path)
    place.examine()
    request = place.requests[0][1]
    assert request["config"]["target_model"] == "/dev/shm/Qwen3.6-27B"
    assert place.said[0].endswith("qwen3.6-27b-8gpu.toml (preset)")


@pytest.mark.parametrize("broken", range(4))
def test_nothing_behind_a_hop_that_failed_is_asked(tmp_path, broken):
    hops = HOPS[:broken] + (dataclasses.replace(HOPS[broken], state="failed", hint="mend it"),)
    place = Place(tmp_path, hops)
    found = place.examine()
    assert [each.name for each in found] == [hop.name for hop in hops]
    assert exit_code(found) == ExitCode.NO_ANSWER
    assert place.requests == []


def test_a_warning_of_a_hop_stops_nothing_and_costs_nothing(tmp_path):
    hops = (dataclasses.replace(HOPS[0], state="warning"), *HOPS[1:])
    found = Place(tmp_path, hops, items=[]).examine()
    assert (found[0].state, found[-1].name, exit_code(found)) == ("warning", "round trip", 0)


def test_no_hops_are_the_local_machine(tmp_path):
    found = Place(tmp_path, (), items=[], host="local").examine()
    assert (found[0].name, found[0].text) == ("machine", "the local one")
    assert "connect" not in found[-1].text


def test_the_first_failure_decides_the_code():
    seven = Finding("model", "failed", "x", code=ExitCode.PREFLIGHT)
    eight = Finding("ssh", "failed", "x")
    assert exit_code([Finding("a", "ok", ""), seven, eight]) == 7
    assert exit_code([eight, seven]) == 8
    assert exit_code([Finding("a", "warning", "", code=ExitCode.PREFLIGHT)]) == 0
    assert exit_code([]) == 0


@pytest.mark.parametrize(
    ("items", "code", "words"),
    [
        ([{"finding": AGENT[0]}, Silence()], 8, "broke off in mid-answer"),
        ([{"finding": {"name": 3}}], 8, "makes no sense"),
        ([(Kind.ERROR, preflight_error("ROOT is gone", cause="why", hint="how").to_json())], 7, "ROOT is gone: why"),
    ],
)
def test_an_answer_that_breaks_off_is_a_line(tmp_path, items, code, words):
    found = Place(tmp_path, items=items).examine()
    assert (found[-1].name, found[-1].state, found[-1].code) == ("agent", "failed", code)
    assert words in found[-1].text


def test_an_agent_that_does_not_answer_is_a_line(tmp_path):
    place = Place(tmp_path)
    place.transport._handler = lambda argv, sent: [b"bash: python3: not found\n"]
    found = place.examine()
    assert (found[-1].name, found[-1].code) == ("agent", 8)
    assert "python3: not found" in found[-1].text


def test_a_configuration_that_cannot_be_resolved_hides_nothing_else(tmp_path):
    place = Place(tmp_path)
    values = place.session.settings.values
    values["config"] = dataclasses.replace(values["config"], text="/nowhere.toml", origin="--config")
    found = place.examine()
    assert (found[0].name, found[0].state, found[0].code) == ("config", "failed", 2)
    assert [each.name for each in found][1:5] == [hop.name for hop in HOPS]
    assert place.requests[0][1]["config"] == {}
    assert exit_code(found) == 2
    assert as_json(found, place.examination.training)["configuration"] == {}


def test_a_connection_that_dies_before_the_round_trip_is_timed(tmp_path):
    place = Place(tmp_path)
    play = place.transport._handler
    place.transport._handler = lambda argv, sent: play(argv, sent) if argv[-1] == "doctor" else iter([b"gone\n"])
    found = place.examine()
    assert (found[-1].name, found[-1].state, found[-1].code) == ("round trip", "failed", 8)
    # What was known before stays known.
    assert [each.name for each in found][4:7] == ["python", "GPUs", "data"]


def test_what_else_the_agent_says_is_passed_on(tmp_path):
    place = Place(tmp_path, items=[{"kind": "message", "text": "the trainer reads"}, {"finding": AGENT[0]}])
    place.examine()
    assert {"kind": "message", "text": "the trainer reads"} in place.said


def test_a_newer_agents_words_are_not_taken_for_all_is_well(tmp_path):
    strange = {"name": "fans", "state": "smoking", "text": "x", "code": 99, "more": 1}
    found = Place(tmp_path, (), items=[{"finding": strange}]).examine()[1]
    assert (found.state, found.code) == ("warning", ExitCode.FAILED)


def test_as_json_it_is_one_object(tmp_path):
    place = Place(tmp_path)
    found = place.examine()
    said = json.loads(dumps(as_json(found, place.examination.training)))
    assert said["code"] == 7
    assert [each["name"] for each in said["findings"]] == [each.name for each in found]
    assert said["findings"][5] == AGENT[1]
    assert said["configuration"]["origin"] == "preset"


class Screen(Stream):
    """A stream that is, or is no, terminal."""

    def __init__(self, *, live: bool, encoding: str = "utf-8") -> None:
        super().__init__("stdout")
        self._live = live
        self._file = io.TextIOWrapper(io.BytesIO(), encoding)

    @property
    def file(self):
        return self._file

    @property
    def live(self):
        return self._live


PLAIN, LIVE = Screen(live=False), Screen(live=True)
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def test_plain_lines_are_aligned_under_their_text():
    lines = finding_lines(Finding("GPUs", "failed", "GPU 1 is held", "wait for it"), PLAIN, 80)
    assert lines == ["failed  GPUs        GPU 1 is held", " " * 20 + "hint: wait for it"]
    assert finding_lines(Finding("ssh", "ok", "fine", "unused"), PLAIN, 80) == ["ok      ssh         fine"]


def test_signs_and_colours_are_for_a_terminal_that_can_show_them():
    shown = {state: finding_lines(Finding("x", state, "t", "h"), LIVE, 80)[0] for state in ("ok", "warning", "failed")}
    assert [ESCAPE.sub("", line)[0] for line in shown.values()] == ["✓", "!", "✗"]
    assert "\x1b[32m" in shown["ok"]
    assert "\x1b[31;1m" in shown["failed"]
    latin = finding_lines(Finding("x", "ok", "t"), Screen(live=True, encoding="latin-1"), 80)[0]
    assert ESCAPE.sub("", latin).startswith("ok ")
    "".join(finding_lines(Finding("x", "ok", "t"), PLAIN, 80)).encode("ascii")


def test_below_sixty_columns_text_goes_below_its_name():
    text = "8 x NVIDIA H200, 140 GiB each, driver 580.95.05; all free"
    lines = finding_lines(Finding("GPUs", "warning", text, "do this"), PLAIN, 40)
    assert lines[0] == "warning GPUs"
    assert all(line.startswith("  ") for line in lines[1:])
    assert " ".join(line.strip() for line in lines[1:-1]) == text


def test_a_command_stays_whole_and_may_be_copied():
    command = "/opt/a-very-long-place/with-hyphens/bin/python-3.11 -m pip install 'torch>=2.11,<2.14'"
    lines = finding_lines(Finding("python", "failed", "x", command), PLAIN, 60)
    words = [word for line in lines[1:] for word in line.split()]
    assert words == ["hint:", *command.split()]


texts = st.text(max_size=120) | st.lists(st.text("abc-/", min_size=1, max_size=15), max_size=30).map(" ".join)


@given(
    name=st.text(max_size=12),
    state=st.sampled_from(["ok", "warning", "failed"]),
    text=texts,
    hint=texts,
    columns=st.sampled_from([40, 59, 60, 80, 120]),
    live=st.booleans(),
)
def test_lines_fit_and_do_nothing_to_a_terminal(name, state, text, hint, columns, live):
    lines = finding_lines(Finding(name, state, text, hint), LIVE if live else PLAIN, columns)
    assert lines
    for line in lines:
        seen = ESCAPE.sub("", line) if live else line
        assert not [letter for letter in seen if ord(letter) < 32 or 127 <= ord(letter) < 160]
        # Only a word that alone is longer may stand out.
        longest = max((len(word) for word in seen.split()), default=0)
        assert len(seen) <= max(columns, 8 + 12 + 3 + longest + max(len(name) * 4 - 11, 0))


def test_an_error_is_a_failed_line_with_its_code():
    from dflashctl.doctor import failed

    assert failed("ssh", NoAnswer("no answer", cause="why", hint="how")) == Finding(
        "ssh", "failed", "no answer: why", "how", ExitCode.NO_ANSWER
    )
