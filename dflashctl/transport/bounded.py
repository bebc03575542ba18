"""Asking with a hard bound. The one module of the transports that starts a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def within(seconds: float, work: Callable[[], _T], otherwise: Callable[[], _T]) -> _T:
    """Return what `work` returns, or what `otherwise` does when that takes longer than `seconds`.

    What `work` raises is raised here. A `work` that was given up goes on by itself until its own time-outs end it: it sits in
    a call that nobody can interrupt (a connection being made), and the process must not wait for it at its end.
    """
    results: list[_T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised again below, in the thread that asked
            failures.append(error)

    thread = threading.Thread(target=run, name="bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    return results[0] if results else otherwise()
