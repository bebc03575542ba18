"""The benchmark of the remote verbs: its figures are of what it says, and wrong ones are refused."""

from __future__ import annotations

import time

import pytest
from testbed.machine import missing_machine

from benchmarks.remote import (
    Bed,
    Row,
    agents,
    bulk,
    come_back,
    count_calls,
    follow_latency,
    in_turns,
    main,
    open_connection,
)


def test_a_row_says_whether_its_figure_is_over_its_bound():
    assert Row("x", 399.6, "ms", 400).line().split() == ["x", "399.6", "ms", "ok", "(at", "most", "400)"]
    assert "OVER (at most 400)" in Row("x", 401, "ms", 400).line()
    assert Row("x", 401, "ms").line().split() == ["x", "401", "ms"]


def test_works_take_turns():
    order = []
    took = in_turns(2, one=lambda: order.append(1), two=lambda: order.append(2))
    assert order == [1, 2, 1, 2]
    assert {name: len(seconds) for name, seconds in took.items()} == {"one": 2, "two": 2}


@pytest.fixture(scope="module")
def bed(proxmox_host, tmp_path_factory):
    if not proxmox_host.real:
        pytest.skip(missing_machine())
    yield Bed(proxmox_host, tmp_path_factory.mktemp("bed"))
    proxmox_host.reset()


def test_a_log_is_read_whole_while_memory_is_sampled(bed):
    bed.log.write_bytes(bytes(range(256)) * 8000)
    for words in (["logs"], ["logs", "--follow", "--tail", "1000000"]):
        seconds, first, client, agent = bulk(bed, 2, words)
        assert (seconds.bound, seconds.unit) == (20, "s")
        assert 5 < first.figure <= client.figure
        assert agent.figure > 5
    # An agent whose client is gone notices at its next heartbeat, two seconds later at most.
    deadline = time.monotonic() + 20
    while list(agents(bed.release)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(agents(bed.release)) == []


def test_what_is_not_the_whole_log_is_no_figure(bed):
    bed.log.write_bytes(b"line\n" * 1000)
    with pytest.raises(RuntimeError, match="is not the log"):
        bulk(bed, 1, ["logs", "--tail", "999"])


def test_all_other_figures(bed):
    true, status, ratio = open_connection(bed, 1, 0.2)
    assert ratio.figure == pytest.approx(status.figure / true.figure)
    assert true.figure > 200
    assert [row.unit for row in follow_latency(bed, 5)] == ["ms", "ms"]
    assert come_back(bed, 1)[0].figure > 200
    assert {row.figure for row in count_calls(bed)} == {1}


def test_without_a_testbed_it_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.remote.missing_machine", lambda: "containers need root")
    assert main([]) == 2
    assert capsys.readouterr().err == "error: containers need root\n"
