"""Typed calls to the agent at the far end: one argv, one request, one answer each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dflashctl.answer import NO_ANSWER_HINT, Answer, NoHello, Patience, shortened
from dflashctl.errors import ConnectionLost, NoAnswer
from dflashctl.lazy import lazily
from dflashctl.transport import EXPLANATION_SECONDS, Channel, Transport
from dflashctl.transport.bounded import within as bounded
from dflashctl.transport.explain import old_python, python_spoke
from remote.protocol.codec import plain
from remote.protocol.frames import Kind, json_frame, new_nonce
from remote.protocol.loader import LOADER

if TYPE_CHECKING:
    from dflashctl import results
    from dflashctl.release import Release
    from dflashctl.results import Begun, Deployed, Releases, Resumed, RolledBack, Stopped
    from remote.protocol.records import RunSpec, RunStatus
else:
    results = lazily("dflashctl.results")

SILENCE = 10.0
"""Seconds without a byte after which the far end counts as gone: five heartbeats."""

STATUS_SECONDS = 10.0
"""Longest time a status may take, with the explanation of why there is none."""

_OVERTIME_SECONDS = 0.5
"""A single hop that does not answer for 10 s has the better sentence."""

_CLOSING_SECONDS = 1.0
"""What is kept of that for giving the channel back."""

_NOT_TWICE = frozenset({"rollback"})
"""Verbs that do another thing when they are asked again; start carries its own run id, the others find their work done."""

OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class StartRequest:
    """What a start asks for. `limit`: seconds of silence before the answer is "not ready"; `resume`: "", RUN or RUN@STEP.

    `current`: launch the release that is current over there, whatever the spec believes; off, the spec's very release.
    """

    verb: ClassVar[str] = "start"

    spec: RunSpec
    limit: float
    resume: str = ""
    wait_gpus: bool = False
    current: bool = True

    def body(self, python: str) -> dict[str, Any]:
        """Return the request's fields; `python` is the interpreter over there."""
        return {
            "spec": plain(self.spec),
            "python": python,
            "limit": self.limit,
            "resume": self.resume,
            "wait_gpus": self.wait_gpus,
            "current": self.current,
        }


@dataclass(frozen=True)
class RestartRequest(StartRequest):
    """A start in the place of `run`, which is stopped before if it lives, as `now` and `grace` (seconds) say."""

    verb: ClassVar[str] = "restart"

    run: str = ""
    now: bool = False
    grace: float = 120.0

    def body(self, python: str) -> dict[str, Any]:
        return super().body(python) | {"run": self.run, "now": self.now, "grace": self.grace, "by": self.spec.by}


def _cause(failure: NoHello) -> str:
    return shortened(failure.said) or "it ended without a word"


class AgentClient:
    """Typed access to one destination's agent. `calls` counts remote calls: a short verb makes one.

    `meanwhile` is called once a request is out: the far end needs 0.1 s and more to its first word.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        python: str,
        root: str = "",
        release: str = "",
        pyz: Callable[[], bytes],
        silence: float = SILENCE,
        trace: Callable[[str], None] = lambda text: None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        self.calls = 0
        self._trace = trace
        self._meanwhile = meanwhile
        self.transport = transport
        self.root = root
        self._python = python
        self._release = release
        self._pyz = pyz
        self._silence = silence

    def call(self, verb: str, request: dict[str, Any], *, more: bool = False, within: float = math.inf) -> Answer:
        """Send `request` to `verb` and return its answer, hello already read. With `more`, input follows.

        An agent that was deployed is used where it lies; if it is gone, or was never there, one travels along on stdin.
        `within`: seconds for all of it, an explanation included. Raises NoAnswer when neither says hello, and what a hop
        knows of the reason instead.
        """
        deadline = time.monotonic() + within - EXPLANATION_SECONDS - _CLOSING_SECONDS
        patience = Patience(self._silence, deadline)
        if self._release and self.root:
            try:
                return self._open(verb, request, more, patience, loaded=False)
            except NoHello as failure:
                # A hop that knows why would only say the same again, for the price of one more call. But a connection
                # that broke off may come back; then the first request may have been read, its answer being what was lost.
                if not isinstance(failure.known, ConnectionLost):
                    self._raise_known(failure)
                # Nor do a pct or an sshd that was killed keep what they had started from going on.
                if verb in _NOT_TWICE and not python_spoke(failure.said):
                    raise failure.known or ConnectionLost(
                        f"{self.transport.name} ended the call without an answer", cause=_cause(failure)
                    ) from None
        try:
            return self._open(verb, request, more, patience, loaded=True)
        except NoHello as failure:
            self._raise_known(failure)
            raise NoAnswer(
                f"no answer from {self.transport.name}", cause=_cause(failure), hint=NO_ANSWER_HINT
            ) from None

    def _raise_known(self, failure: NoHello) -> None:
        """Raise what was said instead of a hello, when the Python over there or a hop knows what that means."""
        known = old_python(failure.said, self.transport.name, self._python) or failure.known
        if known is not None:
            raise known from None

    def _open(self, verb: str, request: dict[str, Any], more: bool, patience: Patience, *, loaded: bool) -> Answer:
        self.calls += 1
        # Drawn anew for each attempt: frames of one that was given up cannot be taken for the next one's.
        nonce = new_nonce()
        argv = self._argv(verb, loaded)
        self._trace(f"{self.transport.name}: {' '.join('LOADER' if word == LOADER else word for word in argv)}")
        channel = self._reach(argv, patience)
        answer = Answer(channel, nonce, self.transport, patience)
        try:
            for piece in self._preamble(loaded):
                answer.send(piece, patience.left())
            answer.send(json_frame(nonce, Kind.REQUEST, {"root": self.root, **request}).encode(), patience.left())
            if not more:
                answer.end()
            self._meanwhile()
            answer.expect_hello()
        except BaseException:
            channel.close()
            raise
        return answer

    def _reach(self, argv: list[str], patience: Patience) -> Channel:
        if patience.deadline == math.inf:
            return self.transport.open(argv)
        # Each hop has a time-out of its own, and ConnectTimeout may be anything. A failure to connect needs no explanation.
        left = patience.deadline + EXPLANATION_SECONDS + _CLOSING_SECONDS + _OVERTIME_SECONDS - time.monotonic()
        return bounded(left, lambda: self.transport.open(argv), self._unreached)

    def _unreached(self) -> Channel:
        raise NoAnswer(
            f"no connection to {self.transport.name}",
            cause="none came about in the time that this command has",
            hint="`dflashctl doctor` waits longer and tells which hop is slow",
        )

    def _argv(self, verb: str, loaded: bool) -> list[str]:
        if loaded:
            return [self._python, "-I", "-c", LOADER, verb]
        # -I: neither the far end's PYTHONPATH nor its user site may slip a `remote` of another version in.
        return [self._python, "-I", f"{self.root}/releases/{self._release}/agent.pyz", verb]

    def _preamble(self, loaded: bool) -> Iterable[bytes]:
        if loaded:
            pyz = self._pyz()
            yield f"{len(pyz)}\n".encode("ascii") + pyz

    def deploy(self, release: Release, *, selfcheck: bool, on_event: OnEvent) -> Deployed:
        """Ship `release` unless it is there, have it checked and made current."""
        request = {
            "release": release.id,
            "manifest": release.manifest,
            "python": self._python,
            "selfcheck": selfcheck,
        }
        with self.call("deploy", request, more=True) as answer:
            for item in answer:
                # One call for both cases: the agent asks for the archive only if it lacks it.
                if isinstance(item, dict) and "need" in item:
                    if item["need"]:
                        answer.upload(release.archive())
                    answer.end()
                elif isinstance(item, dict):
                    on_event(item)
            return results.parse(results.Deployed, answer.result)

    def start(self, request: StartRequest, on_event: OnEvent) -> RunStatus:
        """Start or restart a run, or ask after it when it was launched already; return at its first step or its end."""
        with self.call(request.verb, request.body(self._python)) as answer:
            return results.parse(results.Started, answer.drain(on_event)).status

    def begun_with(self, run: str) -> Begun:
        """Return what a run ("" for the live or last one) was started with, and its state."""
        with self.call("spec", {"run": run}) as answer:
            return results.parse(results.Begun, answer.drain())

    def spec(self, resume: str) -> Resumed:
        """Return the checkpoint that `resume` ("last", RUN or RUN@STEP) means and what its run was started with."""
        with self.call("spec", {"resume": resume}) as answer:
            return results.parse(results.Resumed, answer.drain())

    def stop(self, run: str, *, now: bool, grace: float, by: str, on_event: OnEvent) -> Stopped:
        """Stop a run ("" for the live one) and wait until nothing of it lives."""
        with self.call("stop", {"run": run, "now": now, "grace": grace, "by": by}) as answer:
            return results.parse(results.Stopped, answer.drain(on_event))

    def status(self, run: str = "") -> RunStatus:
        """Return the state of a run; of the live or last one for ""."""
        with self.call("status", {"run": run}, within=STATUS_SECONDS) as answer:
            return results.parse(results.RunStatus, answer.drain())

    def runs(self, limit: int) -> tuple[RunStatus, ...]:
        """Return at most `limit` runs, newest first."""
        with self.call("runs", {"limit": limit}) as answer:
            return results.parse(results.Runs, answer.drain()).runs

    def releases(self) -> Releases:
        """Return the releases over there and which is current."""
        with self.call("releases", {}) as answer:
            return results.parse(results.Releases, answer.drain())

    def rollback(self, to: str) -> RolledBack:
        """Make release `to` current ("" for the one before the current one)."""
        try:
            with self.call("rollback", {"to": to}) as answer:
                return results.parse(results.RolledBack, answer.drain())
        except ConnectionLost as error:
            hint = "it may have been done: `dflashctl releases` shows which one is current, --to RELEASE names one"
            raise ConnectionLost(error.error, cause=error.cause, hint=hint) from error
