"""Whatever bytes come back, a client ends with an error for people: never a traceback, never a hang."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import islice

import pytest
from farend import HELLO, far_end
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.agent_client import AgentClient, StartRequest
from dflashctl.console import OUT
from dflashctl.follow import Follower, LogRequest
from dflashctl.logview import JsonView, PlainView
from dflashctl.release import Release
from dflashctl.talk import Talk
from dflashctl.transport.memory import Memory
from dflashctl.views import runs_lines, status_lines
from remote.protocol.errors import DflashError
from remote.protocol.frames import FrameParser, Kind
from remote.protocol.layout import new_run_id
from remote.protocol.records import RunSpec

RELEASE = Release({"agent.pyz": b"z"})
SPEC = RunSpec(new_run_id(), (), {}, ("cpu",))

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
# Keys the client looks at, so that wrong types reach the places which read them.
objects = st.dictionaries(
    st.sampled_from(["status", "runs", "run_id", "state", "kind", "need", "offset", "device", "inode", "notice", "text",
                     "error", "code", "message", "protocol", "alarms", "loss", "detail", "debug", "spec", "step"]),
    json_values,
    max_size=5,
)  # fmt: skip
KINDS = [Kind.EVENT, Kind.DATA, Kind.RESULT, Kind.ERROR, Kind.HEARTBEAT]
frames = st.lists(
    st.sampled_from(KINDS).flatmap(
        lambda kind: st.tuples(st.just(kind), st.binary(max_size=20) if kind is Kind.DATA else objects)
    ),
    max_size=5,
)


def client_of(memory):
    return AgentClient(memory, python="p", root="/r", release="0" * 12, pyz=lambda: b"")


def ask_everything(memory):
    """Run every verb; whatever is raised beside DflashError is a bug."""
    client = client_of(memory)
    asks = [
        lambda: status_lines(client.status(), "local", OUT),
        lambda: client.spec("last").name,
        lambda: runs_lines(client.runs(3), OUT),
        lambda: client.stop("", now=False, grace=1.0, by="me", on_event=Talk()),
        lambda: client.start(StartRequest(SPEC, 1.0), Talk()),
        lambda: client.deploy(RELEASE, selfcheck=True, on_event=Talk()),
        # A far end that sends data before each break makes progress each time: followed for as long as one cares to.
        lambda: list(islice(Follower(client, LogRequest(follow=True), sleep=lambda pause: None), 30)),
    ]
    for ask in asks:
        with suppress(DflashError):
            ask()


@given(st.binary(max_size=300))
def test_bytes_from_anywhere(data):
    ask_everything(Memory(lambda argv, sent: [data]))


@given(frames)
def test_well_formed_frames_with_any_content(answer):
    ask_everything(far_end(lambda verb, request, sent: [HELLO, *answer]))


@given(st.binary(max_size=60).filter(lambda payload: not payload.startswith(b"{")), st.sampled_from(KINDS))
def test_frames_of_ours_whose_payload_is_no_json(payload, kind):
    def handler(argv, sent):
        (request, *_) = FrameParser().feed(sent)
        hello = json.dumps({"protocol": 1}).encode()
        yield f"{request.nonce} hello {len(hello)}\n".encode() + hello
        yield f"{request.nonce} {kind} {len(payload)}\n".encode() + payload

    ask_everything(Memory(handler))


@given(objects)
def test_a_hello_of_any_content(hello):
    ask_everything(far_end(lambda verb, request, sent: [(Kind.HELLO, hello)]))


@pytest.mark.parametrize("view_class", [PlainView, JsonView])
@given(data=st.binary(max_size=300))
def test_any_log_is_shown(view_class, data):
    # Shown for nobody: what counts is that nothing is raised and that lines are whole.
    view = view_class()
    shown = []
    view.show = shown.extend
    view.feed(data)
    view.finish()
    assert b"\n".join(shown) == data.removesuffix(b"\n")
