"""Who is blamed when nothing gets on: by the rule alone, and by watchdogs of processes that stand still, wait or are frozen."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.pipeline.vitals import Board, Vitals
from trainer.pipeline.watchdog import STALLED, Stalled, judge, work_done

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 300.0
TARGET = Vitals("target 0 (rank 0, cpu)", 1000, 1000, LIMIT, "training: target_forward")
DRAFTER = Vitals("drafter 0 (rank 1, cpu)", 1000, 1000, LIMIT, "training: wait_states", "target 0 (rank 0)")


def at(vitals: Vitals, *, moved: float = 1000, seen: float = 1000, **changes: object) -> Vitals:
    return dataclasses.replace(vitals, moved=moved, seen=seen, **changes)  # type: ignore[arg-type]


def found(vitals: dict[int, Vitals], me: int, *, since: float = 0, ranks: int = 2) -> Stalled | None:
    return judge(vitals, me, ranks, now=1000, since=since)


def test_a_rank_that_stands_still_names_itself_and_its_stage() -> None:
    stalled = found({0: at(TARGET, moved=700), 1: at(DRAFTER, moved=600)}, 0)
    assert stalled is not None
    assert stalled.local_rank == 0
    assert stalled.error == "target 0 (rank 0, cpu) stands still in training: target_forward"
    assert "300 s" in stalled.cause
    assert "--stall-timeout" in stalled.hint


def test_a_rank_that_waits_is_not_blamed_and_lets_the_other_speak_first() -> None:
    assert found({0: at(TARGET, moved=701), 1: at(DRAFTER, moved=401)}, 0) is None
    assert found({0: at(TARGET, moved=701), 1: at(DRAFTER, moved=401)}, 1) is None
    assert found({0: at(TARGET, moved=500), 1: at(DRAFTER, moved=401)}, 1) is None


def test_a_slow_rank_that_gets_on_lets_the_others_wait_for_ever() -> None:
    assert found({0: at(TARGET, moved=990), 1: at(DRAFTER, moved=1)}, 1) is None


@pytest.mark.parametrize("waits", [True, False])
def test_a_frozen_rank_is_named_by_the_others_wherever_they_are(waits: bool) -> None:
    frozen = at(TARGET, moved=650, seen=700)
    other = at(DRAFTER if waits else dataclasses.replace(DRAFTER, awaits="", doing="training: figures"), moved=650)
    stalled = found({0: frozen, 1: other}, 1)
    assert stalled is not None
    assert stalled.local_rank == 0
    assert stalled.error == "target 0 (rank 0, cpu) gives no sign of life since 300 s"
    assert "frozen" in stalled.cause
    assert ("drafter 0 (rank 1, cpu) waits for target 0 (rank 0)" in stalled.cause) == waits


def test_a_rank_does_not_blame_itself_while_another_falls_silent() -> None:
    standing = dataclasses.replace(DRAFTER, awaits="", doing="training: figures")
    assert found({0: at(TARGET, seen=800), 1: at(standing, moved=650)}, 1) is None
    stalled = found({0: at(TARGET, seen=990), 1: at(standing, moved=650)}, 1)
    assert stalled is not None
    assert stalled.local_rank == 1


def test_a_rank_that_ended_well_may_be_silent() -> None:
    assert found({0: at(TARGET, seen=1, moved=1, ended=True), 1: at(DRAFTER, moved=500)}, 1) is None


def test_each_has_the_bound_of_its_own_phase() -> None:
    loading = at(TARGET, moved=200, seen=990, limit=3 * LIMIT, doing="loading")
    assert found({0: loading, 1: at(DRAFTER, moved=200)}, 0) is None
    assert found({0: at(loading, moved=90, seen=990), 1: at(DRAFTER)}, 0) is not None


def test_ranks_that_all_wait_end_at_twice_the_bound_with_everybodys_place() -> None:
    waiting = dataclasses.replace(TARGET, doing="training: wait_buffer", awaits="drafter 0 (rank 1)")
    assert found({0: at(waiting, moved=300), 1: at(DRAFTER, moved=401)}, 0) is None
    stalled = found({0: at(waiting, moved=300), 1: at(DRAFTER, moved=400)}, 0, ranks=3)
    assert stalled is not None
    assert stalled.local_rank is None
    assert "target 0 (rank 0, cpu): training: wait_buffer, waits for drafter 0 (rank 1)" in stalled.cause
    assert "drafter 0 (rank 1, cpu): training: wait_states, waits for target 0 (rank 0)" in stalled.cause
    assert "local rank 2 has not begun" in stalled.cause


def test_a_machine_that_was_frozen_as_a_whole_is_forgiven() -> None:
    both = {0: at(TARGET, moved=100, seen=100), 1: at(DRAFTER, moved=100, seen=100)}
    assert found(both, 1) is not None
    assert found(both, 1, since=900) is None
    assert found(both, 0, since=900) is None


TEXT = st.text(max_size=200).map(lambda text: text.replace("\0", ""))
TIMES = st.floats(allow_nan=False, allow_infinity=False)


@given(st.builds(Vitals, TEXT, TIMES, TIMES, TIMES, TEXT, TEXT, st.booleans()))
def test_what_a_rank_writes_is_what_the_others_read(vitals: Vitals) -> None:
    read = Vitals.unpack(vitals.pack())
    assert (read.seen, read.moved, read.limit, read.ended) == (vitals.seen, vitals.moved, vitals.limit, vitals.ended)
    for mine, theirs in ((vitals.name, read.name), (vitals.doing, read.doing), (vitals.awaits, read.awaits)):
        # Cut to its place in the record, perhaps within a character.
        assert mine.startswith(theirs.rstrip("\N{REPLACEMENT CHARACTER}")) or "\N{REPLACEMENT CHARACTER}" in mine


@given(st.binary(min_size=384, max_size=384))
def test_no_record_is_unreadable(data: bytes) -> None:
    Vitals.unpack(data)


def test_a_path_that_is_no_unicode_can_be_written_down() -> None:
    vitals = at(TARGET, doing="loading (target /models/\udcff on cuda:0)")
    assert Vitals.unpack(vitals.pack()).doing == "loading (target /models/? on cuda:0)"


def test_the_board_outlives_its_name_and_shows_who_has_begun(tmp_path: Path) -> None:
    one, other = Board(tmp_path / "board", 3), Board(tmp_path / "board", 3)
    (tmp_path / "board").unlink()
    one.write(0, TARGET)
    other.write(2, DRAFTER)
    assert one.read() == other.read() == {0: TARGET, 2: DRAFTER}
    one.close()
    other.close()


def test_work_is_what_is_read_written_or_touched(tmp_path: Path) -> None:
    before = work_done()
    (tmp_path / "file").write_bytes(bytes(4 << 20))
    written = work_done()
    assert written - before >= 4 << 20
    time.sleep(0.05)
    assert work_done() - written < 1 << 20


# One rank in a process of its own: argv is directory, local rank, what it does.
RANK = """
import json, os, sys, threading, time
from pathlib import Path
from trainer.pipeline.pulse import Pulse
from trainer.pipeline.vitals import Board
from trainer.pipeline.watchdog import Ward, Watchdog

Path(sys.argv[1], "stacks").mkdir(exist_ok=True)
directory, rank, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if what == "kernel":
    import torch

    torch.zeros(1, device="cuda")
pulse = Pulse()

def file(stalled):
    text = {"rank": stalled.local_rank, "error": stalled.error, "cause": stalled.cause, "detail": stalled.detail}
    (directory / f"error-{rank}").write_text(json.dumps(text))

class Phases:
    current = "saving" if what == "save" else "training"
    detail = "step 3" if what == "save" else ""

ward = Ward(rank, 3, f"rank {rank}", Phases, 0.3 if what in ("save", "linger") else 1.0)
board = Board(directory / "board", 3)
with Watchdog(ward, pulse, board, directory / "stacks" / f"{rank}", file).watching():
    print("begun", flush=True)
    if what == "forward":
        pulse.turn_to("forward")
        threading.Event().wait()
    if what == "kernel":
        pulse.turn_to("backward")
        torch.cuda._sleep(1 << 42)  # longer than any test
        torch.cuda.synchronize()
    for _ in range(15 if what == "save" else 0):
        (directory / "file").write_bytes(bytes(1 << 20))
        time.sleep(0.1)
    if what == "save":
        (directory / "written").touch()
        threading.Event().wait()
    if what == "unwatched":
        del Phases.detail
    while what in ("work", "unwatched"):
        pulse.turn_to("forward")
        time.sleep(0.05)
    with pulse.waiting("rank 0"):
        sys.stdin.readline()
while what == "linger":
    time.sleep(0.05)
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in running:
        process.kill()
        process.communicate()


def begin(ranks: list[subprocess.Popen[str]], directory: Path, rank: int, what: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(directory), str(rank), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    ranks.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def test_a_standing_process_ends_itself_with_its_stacks(ranks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    standing = begin(ranks, tmp_path, 0, "forward")
    waiting = begin(ranks, tmp_path, 1, "wait")
    assert standing.wait(60) == STALLED
    said = standing.stderr.read() if standing.stderr else ""
    told = json.loads((tmp_path / "error-0").read_text())
    assert (told["rank"], told["error"]) == (0, "rank 0 stands still in training: forward")
    assert "in wait" in told["detail"]
    assert "watchdog.py" in (tmp_path / "stacks" / "0").read_text()
    assert "error: rank 0 stands still" in said
    # The one that waits for it has said nothing: it waits longer.
    assert waiting.poll() is None
    assert not (tmp_path / "error-1").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_process_whose_gpu_hangs_ends_itself(ranks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    assert begin(ranks, tmp_path, 0, "kernel").wait(100) == STALLED
    told = json.loads((tmp_path / "error-0").read_text())
    assert told["error"] == "rank 0 stands still in training: backward"
    assert "synchronize" in told["detail"]


def test_a_frozen_process_is_named_by_the_one_that_waits_for_it(
    ranks: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    frozen = begin(ranks, tmp_path, 0, "work")
    frozen.send_signal(signal.SIGSTOP)
    waiting = begin(ranks, tmp_path, 1, "wait")
    assert waiting.wait(60) == STALLED
    told = json.loads((tmp_path / "error-1").read_text())
    assert told["rank"] == 0
    assert told["error"].startswith("rank 0 gives no sign of life")
    assert told["cause"].endswith("rank 1 waits for rank 0")


def test_a_slow_save_gets_on_by_what_it_writes(ranks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    # 1.5 s of writing under a bound of 0.9 s; only then it stands still.
    assert begin(ranks, tmp_path, 0, "save").wait(60) == STALLED
    assert (tmp_path / "written").exists()
    assert json.loads((tmp_path / "error-0").read_text())["error"] == "rank 0 stands still in saving (step 3)"


def test_whom_nobody_watches_any_more_is_not_found_silent(ranks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    working = begin(ranks, tmp_path, 0, "work")
    unwatched, leaving = begin(ranks, tmp_path, 1, "unwatched"), begin(ranks, tmp_path, 2, "wait")
    leaving.communicate(timeout=60)
    assert leaving.returncode == 0
    with pytest.raises(subprocess.TimeoutExpired):
        working.wait(2)
    unwatched.kill()
    # Its watchdog has failed, out loud.
    assert "AttributeError" in (unwatched.stderr.read() if unwatched.stderr else "")


def test_a_process_that_cannot_end_is_ended(ranks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    lingering = begin(ranks, tmp_path, 0, "linger")
    _, said = lingering.communicate("\n", timeout=60)
    assert lingering.returncode == 1
    assert "Timeout" in said
