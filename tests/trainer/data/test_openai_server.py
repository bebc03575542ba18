"""Replies from a server: a real one on loopback, which answers as vLLM does and fails in every way that one does."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from remote.protocol.errors import DflashError, ExitCode
from trainer.data import generate, openai_server
from trainer.data.chat import ChatTokenizer
from trainer.data.dialects import Message
from trainer.data.documents import open_dataset
from trainer.data.openai_server import ChatServer, ServerSettings
from trainer.data.prompts import Prompt

Reply = tuple[int, dict[str, Any] | str, dict[str, str]]


class Far:
    """A server whose `answer` decides what each chat request gets: (status, body, headers)."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Reply]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models = ["toy"]
        self.models_status = 200
        self.asked_for_models = 0
        self.most_at_once = self._now = 0
        lock = threading.Lock()
        far = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                far.asked_for_models += 1
                self.send(far.models_status, {"data": [{"id": name} for name in far.models]}, {})

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    far.requests.append(request)
                    far.headers.append(dict(self.headers))
                    number = len(far.requests)
                    far._now += 1
                    far.most_at_once = max(far.most_at_once, far._now)
                reply = answer(request, number)
                with lock:
                    far._now -= 1
                self.send(*reply)

            def send(self, status: int, body: dict[str, Any] | str, headers: dict[str, str]) -> None:
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                try:
                    self.send_response(status)
                    for name, value in {**headers, "Content-Length": str(len(data))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    return  # the client has gone

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


MakeFar = Callable[..., Far]


@pytest.fixture
def make_far(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeFar]:
    monkeypatch.setattr(openai_server, "_LONGEST_PAUSE_S", 0.01)
    made: list[Far] = []

    def make(answer: Callable[[dict[str, Any], int], Reply]) -> Far:
        made.append(Far(answer))
        return made[-1]

    yield make
    for far in made:
        far.close()


def said(request: dict[str, Any], finish: str = "stop", **turn: Any) -> dict[str, Any]:
    content = f"Re: {request['messages'][-1]['content']}"
    message = {"role": "assistant", "content": content, **turn}
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": {"completion_tokens": 3}}


def well(request: dict[str, Any], _number: int) -> Reply:
    return 200, said(request), {}


def prompt(text: str = "hi", key: str = "0" * 16) -> Prompt:
    return Prompt(key, (Message("user", text),), (), [1, 2, 3])


def client(far: Far, **changes: Any) -> ChatServer:
    return ChatServer(ServerSettings(far.url, {"max_tokens": 5, "temperature": 0.0}, timeout=20, **changes), "toy")


def run(target_dir: Path, prompts: Path, output: Path, far: Far, *more: object) -> int:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    argv = ["--target-model", target_dir, "--prompts", prompts, "--output", output, "--server", far.url, *more]
    return generate.run(parser.parse_args([str(a) for a in argv]))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path: Path, write_jsonl) -> Path:
    return write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"Say {i}."} for i in range(30)])


def test_every_prompt_is_answered_once_many_at_a_time(
    target_dir: Path, tmp_path: Path, prompts: Path, make_far: MakeFar
) -> None:
    everyone = threading.Barrier(4)

    def together(request: dict[str, Any], number: int) -> Reply:
        if 1 < number <= 5:
            everyone.wait(timeout=20)
        return well(request, number)

    far = make_far(together)
    output = tmp_path / "replies.jsonl"
    assert run(target_dir, prompts, output, far, "--concurrency", 4, "--max-new-tokens", 9) == 0
    assert sorted(row["messages"][1]["content"] for row in rows(output)) == sorted(f"Re: Say {i}." for i in range(30))
    assert far.most_at_once == 4
    assert all(request["model"] == "toy" and request["max_tokens"] == 9 for request in far.requests)
    assert not {"chat_template_kwargs", "top_k", "tools", "return_token_ids"} & set(far.requests[0])
    recipe = json.loads((tmp_path / "replies.jsonl.recipe.json").read_text())
    assert (recipe["server_model"], recipe["dtype"]) == ("toy", "server")


def test_what_is_there_is_not_asked_again_and_seeds_hang_on_the_prompt(
    target_dir: Path, tmp_path: Path, prompts: Path, make_far: MakeFar
) -> None:
    def down(request: dict[str, Any], number: int) -> Reply:
        return well(request, number) if number <= 12 else (500, "gone", {})

    far, output = make_far(down), tmp_path / "replies.jsonl"
    with pytest.raises(DflashError, match="no answer from") as caught:
        run(target_dir, prompts, output, far, "--concurrency", 3)
    assert "status 500: gone, 8 times" in caught.value.cause
    kept = len(rows(output))
    assert 9 <= kept <= 12
    output.write_bytes(output.read_bytes()[:-5])  # and the writer was killed in its last line
    again = make_far(well)
    run(target_dir, prompts, output, again, "--concurrency", 3)
    assert len(again.requests) == 30 - (kept - 1)
    assert len({row["messages"][0]["content"] for row in rows(output)}) == len(rows(output)) == 30
    seeds = {r["messages"][0]["content"]: r["seed"] for r in far.requests}
    assert all(seeds.get(r["messages"][0]["content"], r["seed"]) == r["seed"] for r in again.requests)
    assert len(set(seeds.values())) == len(seeds)


def test_another_model_is_not_mixed_in(target_dir: Path, tmp_path: Path, prompts: Path, make_far: MakeFar) -> None:
    far, output = make_far(well), tmp_path / "replies.jsonl"
    run(target_dir, prompts, output, far)
    far.models = ["other"]
    with pytest.raises(DflashError, match="other settings"):
        run(target_dir, prompts, output, far)


def test_token_ids_make_a_data_set_and_are_compared(
    target_dir: Path, tmp_path: Path, prompts: Path, make_far: MakeFar, chat: ChatTokenizer
) -> None:
    extra = [0]

    def with_ids(request: dict[str, Any], _number: int) -> Reply:
        assert request["return_token_ids"] is True
        answer = said(request)
        ids = chat.prompt_ids([Message("user", request["messages"][-1]["content"])])
        answer["prompt_token_ids"] = ids + [5] * extra[0]
        answer["choices"][0]["token_ids"] = [7, 8, 2]
        return 200, answer, {}

    far = make_far(with_ids)
    run(target_dir, prompts, tmp_path / "replies.jsonl", far, "--token-ids")
    dataset = open_dataset(tmp_path / "replies.jsonl", max_length=99, vocab_size=49152)
    assert len(dataset) == 30
    assert dataset.document(0).input_ids.tolist()[-3:] == [7, 8, 2]
    extra[0] = 1
    with pytest.raises(DflashError, match="does not answer as") as caught:
        run(target_dir, prompts, tmp_path / "other.jsonl", far, "--token-ids")
    assert "renders a prompt" in caught.value.cause


def test_a_server_without_token_ids_is_refused_when_they_are_asked_for(make_far: MakeFar) -> None:
    with pytest.raises(DflashError, match="does not answer as") as caught:
        client(make_far(well), token_ids=True).reply(prompt())
    assert "no token_ids" in caught.value.cause


def test_tools_thoughts_and_calls_go_and_come(make_far: MakeFar) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "moon"}'}}

    def calls(request: dict[str, Any], _number: int) -> Reply:
        return 200, said(request, "tool_calls", content=None, reasoning="Hm.", tool_calls=[call]), {}

    far = make_far(calls)
    known = call | {"function": {"name": "look", "arguments": {"at": "moon"}}}
    before = (Message("user", "Where?"), Message("assistant", "", {"tool_calls": [known]}), Message("tool", "up"))
    answer = client(far).reply(Prompt("0" * 16, before, ({"name": "look"},), [1]))
    assert answer is not None
    assert answer.message == Message("assistant", "", {"reasoning_content": "Hm.", "tool_calls": [known]})
    assert (answer.finish, answer.tokens) == ("stop", 3)
    assert far.requests[0]["messages"][1]["tool_calls"] == [call]
    assert far.requests[0]["tools"] == [{"name": "look"}]


@pytest.mark.parametrize(
    ("body", "finish"), [({}, "length"), ({"content": None, "reasoning_content": "Let me"}, "length"), ({}, "stop")]
)
def test_a_cut_reply_is_known(make_far: MakeFar, body: dict[str, Any], finish: str) -> None:
    answer = client(make_far(lambda request, _: (200, said(request, finish, **body), {}))).reply(prompt())
    assert answer is not None
    assert answer.finish == finish


@pytest.mark.parametrize("finish", ["content_filter", "abort", None])
def test_a_reply_that_is_none_is_left_out(make_far: MakeFar, finish: str | None) -> None:
    assert client(make_far(lambda request, _: (200, said(request, finish), {}))).reply(prompt()) is None  # type: ignore[arg-type]


def test_a_call_that_is_no_json_is_left_out(make_far: MakeFar) -> None:
    call = {"function": {"name": "look", "arguments": '{"at": '}}
    assert client(make_far(lambda r, _: (200, said(r, tool_calls=[call]), {}))).reply(prompt()) is None


FAILURES: dict[str, Reply] = {
    "busy": (429, "slow down", {"Retry-After": "0"}),
    "down": (503, "", {}),
    "no JSON": (200, "<html>", {}),
    "no object": (200, "[]", {}),
}


@pytest.mark.parametrize("name", FAILURES)
def test_passing_failures_are_tried_again(make_far: MakeFar, name: str) -> None:
    far = make_far(lambda request, number: FAILURES[name] if number < 4 else well(request, number))
    answer = client(far).reply(prompt())
    assert answer is not None
    assert len(far.requests) == 4


def test_a_server_that_is_not_there_is_named(make_far: MakeFar) -> None:
    far = make_far(well)
    far.close()
    with pytest.raises(DflashError, match="no answer from") as caught:
        client(far).find_model()
    assert "ConnectionRefusedError" in caught.value.cause
    assert caught.value.code == ExitCode.PREFLIGHT


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_is_not_tried_again(make_far: MakeFar, status: int) -> None:
    far = make_far(lambda *_: (status, "no", {}))
    with pytest.raises(DflashError, match="refuses the request"):
        client(far).reply(prompt())
    assert len(far.requests) == 1


def test_the_first_bad_request_is_ours_and_later_ones_are_their_prompts(make_far: MakeFar) -> None:
    far = make_far(lambda r, _: (400, "too long", {}) if "long" in r["messages"][0]["content"] else well(r, 0))
    server = client(far)
    with pytest.raises(DflashError, match="refuses the request"):
        server.reply(prompt("long"))
    assert server.reply(prompt("short")) is not None
    assert server.reply(prompt("long")) is None


def test_prompts_without_a_reply_are_counted_and_tried_again(
    target_dir: Path, tmp_path: Path, prompts: Path, make_far: MakeFar, capsys: pytest.CaptureFixture[str]
) -> None:
    far = make_far(lambda r, n: (200, said(r, "abort" if n in (3, 9) else "stop"), {}))
    run(target_dir, prompts, tmp_path / "replies.jsonl", far)
    assert len(rows(tmp_path / "replies.jsonl")) == 28
    assert "2 prompts got no usable reply" in capsys.readouterr().err
    run(target_dir, prompts, tmp_path / "replies.jsonl", far)
    assert len(rows(tmp_path / "replies.jsonl")) == 30


def test_an_answer_of_another_kind_is_named(make_far: MakeFar) -> None:
    with pytest.raises(DflashError, match="does not answer as"):
        client(make_far(lambda *_: (200, {"object": "list"}, {}))).reply(prompt())


@pytest.mark.parametrize("models", [[], ["a", "b"]])
def test_the_model_is_named_where_there_is_a_choice(make_far: MakeFar, models: list[str]) -> None:
    far = make_far(well)
    far.models = models
    with pytest.raises(DflashError, match=f"has {len(models)} models"):
        client(far).find_model()


@pytest.mark.parametrize("status", [500, 422, 501])
def test_a_server_that_does_not_list_its_models_is_told_at_once(make_far: MakeFar, status: int) -> None:
    """transformers serve 5.19 without a cache of downloads: eight tries of a minute, and "start the server"."""
    far = make_far(well)
    far.models_status = status
    with pytest.raises(DflashError, match="does not say which models") as caught:
        client(far).find_model()
    assert far.asked_for_models == 1
    assert f"status {status}" in caught.value.cause
    assert "--server-model" in caught.value.hint


def test_models_of_a_server_that_is_starting_are_waited_for(make_far: MakeFar) -> None:
    far = make_far(well)
    far.models_status = 503
    with pytest.raises(DflashError, match="no answer from"):
        client(far).find_model()
    assert far.asked_for_models == 8


@pytest.mark.parametrize(
    ("status", "said", "hint"),
    [
        (422, {"detail": "Unexpected fields in the request: {'top_k'}"}, "--top-k, --token-ids"),
        (400, {"error": {"message": "Unrecognized request argument supplied: top_k"}}, "--top-k, --token-ids"),
        (400, {"detail": "Server is pinned to '/models/a'; requested 'b'."}, "--server-model"),
    ],
)
def test_a_field_that_a_server_does_not_know_is_told_from_a_wrong_address(
    make_far: MakeFar, status: int, said: dict[str, Any], hint: str
) -> None:
    """The first and the last word for word from transformers serve 5.19."""
    with pytest.raises(DflashError, match="refuses the request") as caught:
        client(make_far(lambda *_: (status, said, {}))).reply(prompt())
    assert hint in caught.value.hint


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a/v1", "http://"])
def test_an_address_is_a_url(url: str) -> None:
    with pytest.raises(DflashError) as caught:
        ChatServer(ServerSettings(url, {}))
    assert caught.value.code == ExitCode.USAGE


def test_the_key_is_sent_and_stored_nowhere(target_dir: Path, tmp_path: Path, prompts: Path, make_far: MakeFar) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    far = make_far(well)
    run(target_dir, prompts, tmp_path / "out.jsonl", far, "--api-key-file", tmp_path / "key", "--top-p", 0.9)
    assert far.headers[0]["Authorization"] == "Bearer s3cret"
    assert far.requests[0]["top_p"] == 0.9
    assert "s3cret" not in (tmp_path / "out.jsonl.recipe.json").read_text()


def test_closing_ends_requests_that_are_under_way(make_far: MakeFar) -> None:
    """Ctrl-C must not wait for a reply of half an hour."""
    hold = threading.Event()

    def slow(request: dict[str, Any], number: int) -> Reply:
        if number > 1:
            hold.wait(timeout=60)
        return well(request, number)

    far, ends = make_far(slow), []
    server = client(far)

    def consume() -> None:
        try:
            for part in openai_server.replies(server, [prompt(str(i)) for i in range(9)], 4):
                ends.append(len(part))
        except DflashError as error:
            ends.append(error.error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    deadline = time.monotonic() + 30
    while far.most_at_once < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    server.close()
    consumer.join(timeout=30)
    hold.set()
    assert not consumer.is_alive()
    assert ends == [1, f"no answer from {far.url}"]


def test_the_wait_that_a_server_asks_for_is_kept(make_far: MakeFar, monkeypatch: pytest.MonkeyPatch) -> None:
    far = make_far(lambda r, n: (429, "busy", {"Retry-After": "7"}) if n == 1 else well(r, n))
    server = client(far)
    waited: list[float] = []
    monkeypatch.setattr(server._closed, "wait", waited.append)
    assert server.reply(prompt()) is not None
    assert waited == [7.0]


def test_pauses_grow_and_are_bounded(make_far: MakeFar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "_LONGEST_PAUSE_S", 30.0)
    server = client(make_far(lambda *_: (503, "", {})))
    waited: list[float] = []
    monkeypatch.setattr(server._closed, "wait", waited.append)
    with pytest.raises(DflashError, match="no answer"):
        server.reply(prompt())
    assert len(waited) == 7
    for attempt, pause in enumerate(waited, start=1):
        most = min(0.5 * 2**attempt, 30.0)
        assert most / 2 <= pause <= most
