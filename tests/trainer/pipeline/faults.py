"""Faults put into one forked rank: at the n-th call of a function of the trainer it raises, pauses, hangs, is killed, ...

`{"what": "hang", "where": "trainer.pipeline.target_side:Producer.states", "call": 5}`
"""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any


class Injected(Exception):
    """What a fault raises."""


def _raise() -> None:
    raise Injected("on purpose")


def _run_out_of_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. (on purpose)")


_WHAT: dict[str, Callable[[], object]] = {
    "raise": _raise,
    "run out of memory": _run_out_of_memory,
    "pause": lambda: time.sleep(0.5),
    "hang": lambda: threading.Event().wait(),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: os.kill(os.getpid(), signal.SIGBUS),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def inject(fault: dict[str, Any]) -> None:
    """Put the fault into this process."""
    module, _, path = fault["where"].partition(":")
    *outer, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in outer:
        owner = getattr(owner, each)
    function = getattr(owner, name)
    calls = itertools.count(1)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == fault.get("call", 1):
            _WHAT[fault["what"]]()
        return function(*args, **kwargs)

    setattr(owner, name, faulty)
