"""The order and the bound of work on its way, and what happens to processes whose other side dies."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.protocol.errors import DflashError
from trainer.data.chat import ChatTokenizer
from trainer.data.dialects import Conversation, Message
from trainer.data.sources import LineBatch, Source
from trainer.data.tokenising import Task, held_out, in_order, tokenise, tokenise_all


@given(st.integers(0, 30), st.integers(1, 6), st.randoms())
def test_results_come_in_order_and_no_more_than_the_bound_is_ever_on_its_way(count: int, most: int, random) -> None:
    running: list[tuple[int, Future[int]]] = []
    begun = 0

    class Eager(Future):  # type: ignore[type-arg]
        """Asked for its result, it lets the others finish first, in any order."""

        def result(self, timeout: float | None = None) -> int:
            random.shuffle(running)
            while running:
                item, future = running.pop()
                future.set_result(item)
            return super().result(timeout)

    def submit(item: int) -> Future[int]:
        nonlocal begun
        begun += 1
        running.append((item, Eager()))
        return running[-1][1]

    seen: list[int] = []
    for result in in_order(submit, iter(range(count)), most):
        seen.append(result)
        assert begun - len(seen) < most
    assert seen == list(range(count))


def test_a_failure_is_raised_in_its_turn() -> None:
    def submit(item: int) -> Future[int]:
        future: Future[int] = Future()
        future.set_exception(ValueError(item)) if item == 2 else future.set_result(item)
        return future

    results = in_order(submit, range(5), 3)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="2"):
        next(results)


def test_a_worker_that_dies_is_an_error_for_people(
    chat: ChatTokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = Task(tmp_path / "no-model", {}, [Source(tmp_path / "a.jsonl")], 99, 0.0)
    with pytest.raises(DflashError, match="ended without a word") as caught:
        list(tokenise_all(chat, task, [LineBatch(0, [(1, b"{}")], 2)], 2))
    assert "--processes" in caught.value.hint
    capfd.readouterr()


PARENT = """
import multiprocessing, sys, time
from trainer.data.tokenising import _end_with_parent
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=_end_with_parent)
    child.start()
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(timeout=10)
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{worker}/status").exists() and "zombie" not in Path(f"/proc/{worker}/status").read_text():
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.05)


def test_a_row_that_the_template_refuses_is_named(chat: ChatTokenizer, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(chat._tokenizer)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    task = Task(tmp_path, {}, [Source(tmp_path / "a.jsonl")], 99, 0.0)
    part = tokenise(ChatTokenizer(tokenizer), task, LineBatch(0, [(4, b'{"prompt": "a", "response": "b"}')], 9))
    assert [(error.error, error.cause) for error in part.bad] == [
        (f"bad row in {tmp_path / 'a.jsonl'}, row 4", "the chat template refuses it: roles must alternate")
    ]
    assert len(part.train) == 0


def test_the_held_out_share_goes_by_what_stands_before_the_first_reply() -> None:
    def talk(*contents: str) -> Conversation:
        return Conversation(tuple(Message("assistant" if i % 2 else "user", c) for i, c in enumerate(contents)))

    aside = [f"prompt {i}" for i in range(400) if held_out(talk(f"prompt {i}", "reply"), 0.1)]
    assert 20 < len(aside) < 60
    assert all(held_out(talk(prompt, "another", "and on", "yes"), 0.1) for prompt in aside)
    assert all(held_out(talk(prompt), 0.2) for prompt in aside)
    replies_only = [Conversation((Message("assistant", str(i)),)) for i in range(100)]
    assert 0 < sum(held_out(conversation, 0.5) for conversation in replies_only) < 100


def test_a_failure_does_not_wait_for_workers_that_still_begin(
    chat: ChatTokenizer, tmp_path: Path, target_dir: Path
) -> None:
    """Ctrl-C in `prepare` took up to 15 s: the imports of every worker were waited for."""
    task = Task(target_dir, {}, [Source(tmp_path / "a.jsonl")], 99, 0.0)

    def interrupted() -> Iterator[LineBatch]:
        yield LineBatch(0, [(1, b'{"prompt": "a", "response": "b"}')], 2)
        started[:] = multiprocessing.active_children()
        raise KeyboardInterrupt

    started: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        list(tokenise_all(chat, task, interrupted(), 2))
    assert started
    # Ended by us, not by themselves when they were ready.
    assert {worker.exitcode for worker in started} == {-signal.SIGTERM}
