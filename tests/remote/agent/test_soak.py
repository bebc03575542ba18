"""Many cycles of start and stop with something killed in each: never two runs, never an unowned process."""

from __future__ import annotations

import random
import signal

import pytest

from remote.agent.lifecycle import lives, run_ids, status_of
from remote.agent.processes import carriers, recorded_ranks
from remote.protocol.identity import read_pidfile
from remote.protocol.layout import new_run_id

ENDED = {"finished", "stopped", "failed", "lost"}
WAYS = ("stop", "now", "client", "supervisor", "leader", "rank", "supervisor and leader", "client in mid-stop")


def harm(far, run, way: str, draw: random.Random) -> None:
    """Do to the living run what `way` says; whatever is left afterwards, `stop` has to end."""
    if way in ("supervisor", "supervisor and leader"):
        assert read_pidfile(run.supervisor_pid).send(signal.SIGKILL)
    if way in ("leader", "supervisor and leader"):
        read_pidfile(run.trainer_pid).send(signal.SIGKILL)
    if way == "rank":
        draw.choice([*recorded_ranks(run).values()]).send(signal.SIGKILL)
    if way == "client in mid-stop":
        call = far.begin("stop", grace=0.3)
        call.until(lambda frame: True)
        call.kill()
    if way == "now":
        far.ok("stop", now=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_cycles_of_harm(far, wait_for, seed):
    draw = random.Random(seed)
    for way in draw.sample(WAYS, len(WAYS)):
        request = far.request(
            *draw.choice([(), ("--ignore-stop",), ("--grandchild",), ("--ignore-term", "--ignore-stop")])
        )
        request["spec"]["stop_grace"] = 0.3
        if way == "client":
            call = far.begin("start", **request)
            call.until(lambda frame: True)
            call.kill()
            request["spec"]["run_id"] = draw.choice([request["spec"]["run_id"], new_run_id()])
        reply = far.call("start", **request)
        living = [far.root.run(name) for name in run_ids(far.root) if lives(far.root.run(name))]
        assert len(living) == 1, reply
        harm(far, living[0], way, draw)
        # An answer of either kind: a run that fails while it is stopped is an error.
        far.call("stop", grace=0.3)
        state = status_of(living[0]).state
        assert state in ENDED, (way, state)
        for name in run_ids(far.root):
            wait_for(lambda name=name: not lives(far.root.run(name)))
            wait_for(lambda name=name: not carriers(name))
    assert not list(far.root.releases.glob(".tmp-*"))
