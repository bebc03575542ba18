"""The work of `prepare` on one batch of lines, and the processes that share it.

The tokenizer is 80% of the work, but what surrounds it (JSON, the template, the loss mask) is Python and holds the
interpreter lock: threads inside the tokenizer alone would leave a machine of 16 cores idle for 3/4 of the time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError

from remote.protocol.errors import DflashError, preflight_error
from trainer.data.chat import ChatTokenizer, Encoded, Rendered, load_tokenizer
from trainer.data.dialects import Conversation, Message, conversation_key, conversation_of
from trainer.data.jsonl import parse_row, row_error
from trainer.data.sources import LineBatch, Source, copies, hash_share
from trainer.data.statistics import Counts
from trainer.data.tokenised_files import Documents

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Task:
    """What is done to every line, the same in all processes."""

    target_model: Path
    template_kwargs: dict[str, Any]
    sources: Sequence[Source]
    max_length: int
    held_out: float


@dataclass(frozen=True)
class Tokenised:
    """What became of a batch: documents to train on, documents held out, counts, and the errors of its bad rows."""

    source: int
    position: int
    train: Documents
    held_out: Documents
    counts: Counts
    bad: list[DflashError] = field(default_factory=list)


def held_out(conversation: Conversation, share: float) -> bool:
    """Return whether a conversation belongs to the held-out share: by the hash of what stands before the first reply.

    So other replies to the same prompt stay on the same side, and a set made again, with other sources or for another
    target, splits alike.
    """
    messages = conversation.messages
    first = next((index for index, message in enumerate(messages) if message.role == "assistant"), len(messages))
    opening: Sequence[Message] = messages[:first] or messages
    return hash_share(f"held-out:{conversation_key(opening)}") < share


def tokenise(chat: ChatTokenizer, task: Task, batch: LineBatch) -> Tokenised:
    """Parse, choose, render, tokenise and cut the lines of a batch."""
    source = task.sources[batch.source]
    counts = Counts()
    bad: list[DflashError] = []
    taken: list[tuple[Rendered, int, bool]] = []
    for number, line in batch.lines:
        try:
            conversation = conversation_of(parse_row(line, source.path, number), source.path, number)
            counts.read += 1
            times = copies(conversation_key(conversation.messages, conversation.tools), source.times)
            if times:
                rendered = _render(chat, conversation, source.path, number)
                taken.append((rendered, times, held_out(conversation, task.held_out)))
        except DflashError as error:
            bad.append(error)
        else:
            counts.not_taken += not times
    counts.bad_rows = len(bad)
    parts: dict[bool, list[tuple[Encoded, int]]] = {False: [], True: []}
    documents = chat.tokenise([rendered for rendered, _, _ in taken])
    for document, (_, times, aside) in zip(documents, taken, strict=True):
        cut = _cut(document, task.max_length, counts)
        if cut is not None:
            # Held-out documents are measured on, not learnt from: once is enough.
            parts[aside].append((cut, 1 if aside else times))
    train, aside = (Documents.of([each for each, _ in part], [n for _, n in part]) for part in parts.values())
    counts.count(train, held_out=False)
    counts.count(aside, held_out=True)
    return Tokenised(batch.source, batch.position, train, aside, counts, bad)


def _render(chat: ChatTokenizer, conversation: Conversation, path: Path, number: int) -> Rendered:
    try:
        return chat.render(conversation)
    except TemplateError as error:
        raise row_error(path, number, f"the chat template refuses it: {error}") from None


def _cut(document: Encoded, max_length: int, counts: Counts) -> Encoded | None:
    """Return the document cut to the maximum length, None if it has no label left."""
    counts.turns_left_out += document.turns_left_out
    if len(document.input_ids) > max_length:
        counts.truncated += 1
        document = replace(
            document, input_ids=document.input_ids[:max_length], loss_mask=document.loss_mask[:max_length]
        )
    if document.loss_mask.any():
        return document
    counts.without_supervised_tokens += 1
    return None


def tokenise_all(chat: ChatTokenizer, task: Task, batches: Iterable[LineBatch], processes: int) -> Iterator[Tokenised]:
    """Yield what becomes of each batch, in order.

    With one process everything happens in this one, with `chat`, on all its threads. With more, at most two batches a
    process are on their way, whatever the size of the data.

    Raises:
        DflashError: a worker process died.
    """
    if processes == 1:
        yield from (tokenise(chat, task, batch) for batch in batches)
        return
    # Spawned: a fork would copy the threads' locks of everything imported here in whatever state they are.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start_worker, (task,))
    others = multiprocessing.active_children()
    try:
        yield from in_order(lambda batch: pool.submit(_in_worker, batch), batches, 2 * processes)
    except BrokenProcessPool as error:
        raise preflight_error(
            "a process of prepare ended without a word",
            cause="most likely the system ended it for want of memory",
            hint="use fewer --processes",
        ) from error
    except BaseException:
        # Ctrl-C, a bad row: a worker that still imports, or tokenises, would be waited for up to 15 s.
        for worker in multiprocessing.active_children():
            if worker not in others:
                worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def in_order(submit: Callable[[Item], Future[Result]], items: Iterable[Item], most: int) -> Iterator[Result]:
    """Yield the results of all items in order; at most `most` are on their way, results that wait included."""
    waiting: deque[Future[Result]] = deque()
    for item in items:
        if len(waiting) == most:
            yield waiting.popleft().result()
        waiting.append(submit(item))
    while waiting:
        yield waiting.popleft().result()


_worker: tuple[ChatTokenizer, Task] | None = None
"""This worker process's tokenizer, loaded once; None everywhere else."""


def _start_worker(task: Task) -> None:
    global _worker
    # Ctrl-C reaches the whole group; the parent ends the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The processes are the parallelism; threads of each would fight for the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (load_tokenizer(task.target_model, task.template_kwargs), task)


def _end_with_parent() -> None:
    """End this process when its parent is gone: a killed parent tells nobody, and the pool's queue never closes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        with contextlib.suppress(OSError):
            wait([parent.sentinel])
        os._exit(1)


def _in_worker(batch: LineBatch) -> Tokenised:
    assert _worker is not None, "the pool runs _start_worker first"
    return tokenise(*_worker, batch)
