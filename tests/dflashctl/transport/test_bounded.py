"""A question with a hard bound: its answer, its failure, or what is said instead."""

from __future__ import annotations

import threading

import pytest

from dflashctl.transport.bounded import within


def test_the_answer_of_what_is_done_in_time():
    assert within(5.0, lambda: "answer", lambda: "otherwise") == "answer"


def test_what_it_raises_is_raised_where_it_was_asked():
    def fail():
        raise LookupError("inside")

    with pytest.raises(LookupError, match="inside"):
        within(5.0, fail, lambda: None)


def test_what_hangs_is_given_up_and_ends_by_itself():
    release, before = threading.Event(), set(threading.enumerate())
    assert within(0.05, release.wait, lambda: "otherwise") == "otherwise"
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon, "it must not keep the process from ending"
    release.set()
    thread.join(5.0)
    assert not thread.is_alive()
