"""Replies from an OpenAI-compatible server (vLLM, SGLang, ...), many at once, with retries."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from remote.protocol.errors import DflashError, preflight_error, usage_error
from trainer.data.dialects import Message, conversation_of
from trainer.data.prompts import Answer, Prompt

# With back-off these last about two minutes: a server that restarts, or that another job fills for a while.
_TRIES = 8
_LONGEST_PAUSE_S = 30.0

# Answers that another try may change; the rest says that the request itself is wrong.
_PASSING = (408, 409, 425, 429, 500, 502, 503, 504)
_REFUSED = (401, 403, 404)

# Fields that OpenAI's protocol lacks; vLLM and SGLang have them, transformers serve 5.19 refuses the first two (422).
_BEYOND = ("top_k", "return_token_ids", "chat_template_kwargs")


@dataclass(frozen=True)
class ServerSettings:
    """Where the server is and what every request asks for.

    Attributes:
        url: up to and including the version, e.g. http://127.0.0.1:8000/v1.
        request: fields of every request beside messages and tools: max_tokens, temperature, ...
        api_key: sent as a bearer token where it is not empty.
        timeout: seconds of silence after which a request is made again; a reply comes in one piece at its end.
        token_ids: ask for the ids of prompt and reply, and refuse answers without them.
    """

    url: str
    request: dict[str, Any]
    api_key: str = ""
    timeout: float = 1800.0
    token_ids: bool = False


@dataclass(eq=False)
class _Problem(Exception):
    """A request that failed: whether another try may help, what was said, and the seconds the server asks to wait."""

    passing: bool
    status: int
    text: str
    pause: float = 0.0


@dataclass
class ChatServer:
    """A client for many threads. Close ends requests that are under way, so that Ctrl-C does not wait for replies."""

    settings: ServerSettings
    model: str = ""
    _closed: threading.Event = field(default_factory=threading.Event)
    _sockets: set[socket.socket] = field(default_factory=set)
    _answered: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.settings.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise usage_error(f"--server {self.settings.url} is no address", hint="e.g. http://127.0.0.1:8000/v1")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connect: Callable[[], http.client.HTTPConnection] = lambda: kind(
            parts.hostname or "", parts.port, timeout=self.settings.timeout
        )
        self._path = parts.path.rstrip("/")

    def find_model(self) -> str:
        """Return the name of the only model that the server has, and use it.

        Raises:
            DflashError: the server does not answer, does not say, or has several.
        """
        try:
            names = [entry["id"] for entry in self._try("GET", "/models").get("data", [])]
        except _Problem as problem:
            raise preflight_error(
                f"{self.settings.url} does not say which models it has",
                cause=problem.text,
                hint="name the one it serves with --server-model",
            ) from None
        if len(names) != 1:
            raise preflight_error(
                f"{self.settings.url} has {len(names)} models",
                cause=", ".join(names) or "it names none",
                hint="choose one with --server-model",
            )
        self.model = names[0]
        return self.model

    def reply(self, prompt: Prompt) -> Answer | None:
        """Return the server's reply, None where it has none for this prompt (too long for it, or filtered).

        Raises:
            DflashError: it does not answer, refuses every request, or renders the prompt otherwise than we do.
        """
        request = self.settings.request | {
            "model": self.model,
            "messages": [_as_sent(message) for message in prompt.messages],
            # Hangs on the prompt alone: sampled replies do not depend on order or interruptions.
            "seed": int(prompt.key[:8], 16) ^ int(self.settings.request.get("seed", 0)),
        }
        if prompt.tools:
            request["tools"] = list(prompt.tools)
        if self.settings.token_ids:
            request["return_token_ids"] = True
        try:
            answer = self._try("POST", "/chat/completions", request)
        except _Problem as problem:
            # One request in many is that prompt's fault; the first of all is ours.
            if self._answered:
                return None
            raise _refused(self.settings.url, problem) from None
        self._answered = True
        return _answer(answer, prompt, self.settings)

    def close(self) -> None:
        """End all requests, under way and to come, with an error."""
        self._closed.set()
        for each in list(self._sockets):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it was closed from the other side meanwhile

    def _try(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Make a request until it is answered. Raises _Problem for one that is wrong, DflashError for no answer."""
        for attempt in range(1, _TRIES + 1):
            try:
                return self._once(method, path, body)
            except _Problem as problem:
                if problem.status in _REFUSED:
                    raise _refused(self.settings.url, problem) from None
                # transformers 5.19 lists a cache of downloads, not the model it serves, and answers 500 without a cache.
                if not problem.passing or (method == "GET" and problem.status == 500):
                    raise
                if attempt == _TRIES or self._closed.is_set():
                    raise preflight_error(
                        f"no answer from {self.settings.url}",
                        cause=f"{problem.text}, {attempt} times",
                        hint="start the server and run the same command again: it goes on where it stopped",
                    ) from None
                # Spread by chance, else all requests that one restart broke off come back at once.
                pause = min(0.5 * 2**attempt, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
                self._closed.wait(max(pause, problem.pause))
        raise AssertionError("the last try returns or raises")

    def _once(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        connection = self._connect()
        headers = {"Content-Type": "application/json"}
        if self.settings.api_key:
            headers["Authorization"] = f"Bearer {self.settings.api_key}"
        held: socket.socket | None = None
        try:
            connection.connect()
            if (held := connection.sock) is not None:
                self._sockets.add(held)
            if self._closed.is_set():
                raise OSError("closed")
            connection.request(method, self._path + path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise _Problem(True, 0, f"{type(error).__name__}: {error}") from error
        finally:
            if held is not None:
                self._sockets.discard(held)
            connection.close()
        if response.status != 200:
            said = text[:500].decode(errors="replace").strip()
            pause = response.headers.get("Retry-After", "")
            raise _Problem(
                response.status in _PASSING,
                response.status,
                f"status {response.status}: {said or response.reason}",
                min(float(pause), 300.0) if pause.isdecimal() else 0.0,
            )
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise _Problem(True, 200, f"the answer is no JSON object: {text[:100]!r}")
        return answer


def replies(
    server: ChatServer, prompts: Sequence[Prompt], concurrency: int
) -> Generator[list[tuple[Prompt, Answer | None]]]:
    """Yield the answers of all prompts as they come, several where several came at once.

    The order is that of their ends: in order of the prompts one long reply would hold up all behind it.

    Raises:
        DflashError: as ChatServer.reply; the requests under way are ended first.
    """
    pool = ThreadPoolExecutor(concurrency)
    running: dict[Future[Answer | None], Prompt] = {}
    waiting = iter(prompts)
    try:
        while True:
            for prompt in waiting:
                running[pool.submit(server.reply, prompt)] = prompt
                # One alone until the server has answered once: what is wrong with all requests is said once.
                if len(running) == (concurrency if server._answered else 1):
                    break
            if not running:
                return
            done = wait(running, return_when=FIRST_COMPLETED).done
            yield [(running.pop(future), future.result()) for future in done]
    finally:
        server.close()
        pool.shutdown(cancel_futures=True)


def _as_sent(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's form, where arguments of a call are JSON in a string."""
    sent = message.to_dict()
    if calls := sent.get("tool_calls"):
        sent["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    return sent


def _answer(answer: dict[str, Any], prompt: Prompt, settings: ServerSettings) -> Answer | None:
    try:
        choice = answer["choices"][0]
        turn, finish = choice["message"], choice["finish_reason"]
        tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
    except (KeyError, IndexError, TypeError) as error:
        raise _foreign(settings, f"no choices[0].message with a finish_reason in the answer: {error!r}") from None
    if finish not in ("stop", "length", "tool_calls", "function_call"):
        return None
    ids: list[int] = []
    if settings.token_ids:
        ids = choice.get("token_ids") or []
        theirs = answer.get("prompt_token_ids") or choice.get("prompt_token_ids") or []
        if not ids or not theirs:
            raise _foreign(settings, "it returns no token_ids", "leave out --token-ids, or use a server that has them")
        if list(theirs) != prompt.input_ids:
            raise _foreign(
                settings,
                f"it renders a prompt to {len(theirs)} tokens that are {len(prompt.input_ids)} here",
                "serve the same model with the same chat template and --chat-template-kwargs",
            )
    turn = {**turn, "role": "assistant", "content": turn.get("content") or ""}  # null where it was cut in its thoughts
    try:
        message = conversation_of({"messages": [turn]}, Path("answer"), 1).messages[0]
    except DflashError:
        return None  # a small model's tool call may be no JSON
    return Answer(message, "length" if finish == "length" else "stop", ids, tokens or len(ids))


def _foreign(
    settings: ServerSettings, cause: str, hint: str = "give the address of a server of the target"
) -> DflashError:
    return preflight_error(f"{settings.url} does not answer as `generate` needs it", cause=cause, hint=hint)


def _refused(url: str, problem: _Problem) -> DflashError:
    if problem.status == 422 or any(field in problem.text for field in _BEYOND):
        hint = (
            "leave out what this server does not know: --top-k, --token-ids and --chat-template-kwargs are not OpenAI's"
        )
    else:
        hint = "see --server (the address up to /v1), --server-model and --api-key-file"
    return preflight_error(f"{url} refuses the request", cause=problem.text, hint=hint)
