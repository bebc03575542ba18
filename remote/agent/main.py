"""Entry of agent.pyz: find the verb, read its request, answer with frames."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from remote.agent.roots import resolve_root
from remote.agent.wire import Answer, ClientGone, Request
from remote.protocol.errors import DflashError
from remote.protocol.frames import FrameError
from remote.protocol.layout import is_release_id

# Verb -> module; each has a function of the verb's name. Imported when asked for: status takes 60 ms of CPU with what it
# needs, 89 ms where nothing is compiled (a zip), and has to answer within 100 ms.
VERBS = {
    "doctor": "doctor",
    "deploy": "deploy",
    "releases": "releases",
    "rollback": "releases",
    "start": "start",
    "stop": "stop",
    "restart": "restart",
    "spec": "spec",
    "status": "status",
    "runs": "status",
    "logs": "logs",
}

Verb = Callable[[Request, Answer], None]


def own_release() -> str:
    """Return the id of the release this agent runs from, or "" (loaded over stdin, or from a source tree)."""
    # The zip lies in the release's directory, and that is named by its content.
    name = Path(sys.argv[0]).resolve().parent.name
    return name if is_release_id(name) else ""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb. Returns 0 when it answered (an `error` frame is an answer), 1 when nobody reads, 2 for no request."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Internal: no request, no answer, standard input is /dev/null.
    if arguments[:1] == ["supervise"]:
        from remote.agent.supervise import supervise

        return supervise(Path(arguments[1]), int(arguments[2]))
    if len(arguments) != 1 or arguments[0] not in VERBS:
        print(f"agent: expected one verb of {', '.join(VERBS)}", file=sys.stderr)
        return 2
    # Frames own the real standard output; whatever else prints (a subprocess, a warning) goes to stderr.
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        request = Request.read(0)
    except FrameError as error:
        print(f"agent: {error}", file=sys.stderr)
        return 2
    return _answer(arguments[0], request, output)


def _answer(verb: str, request: Request, output: int) -> int:
    try:
        with Answer(request.nonce, output) as answer:
            _run(verb, request, answer)
    except ClientGone:
        return 1
    return 0


def _run(verb: str, request: Request, answer: Answer) -> None:
    try:
        request.root = resolve_root(request.text("root", ""))
        answer.hello(own_release(), request.root)
        function: Verb = getattr(importlib.import_module(f"remote.agent.{VERBS[verb]}"), verb)
        function(request, answer)
    except DflashError as error:
        answer.error(error)
    except ClientGone:
        raise
    except Exception as error:  # the client must learn of every failure; the traceback travels with it
        failure = DflashError(f"the agent failed in {verb}", cause=f"{type(error).__name__}: {error}")
        answer.error(failure, debug=traceback.format_exc())
