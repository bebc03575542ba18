"""Which rank is what, and what makes a process a member of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.protocol.errors import preflight_error
from remote.protocol.identity import read_pidfile, read_stat
from remote.protocol.layout import RunLayout
from remote.protocol.locks import is_held
from trainer.config import TrainConfig
from trainer.pipeline.channel import PeerDied
from trainer.pipeline.layout import Layout, Role
from trainer.pipeline.membership import Filing, file_error
from trainer.pipeline.plan import RunPlan
from trainer.pipeline.watchdog import Stalled

ROOT = Path(__file__).resolve().parents[3]
STORY = Layout("cuda", (0, 1, 2, 3, 4), (5, 6, 7))


def test_the_storys_eight_gpus() -> None:
    assert [STORY.role(rank) for rank in range(8)] == [Role.TARGET] * 5 + [Role.DRAFTER] * 3
    assert [STORY.device_of(rank) for rank in range(8)] == [f"cuda:{device}" for device in range(8)]
    assert (STORY.ranks, STORY.first_drafter, len(STORY.pairs)) == (8, 5, 15)
    assert STORY.describe() == "5 targets / 3 drafters on cuda"


def test_shared_roles() -> None:
    layout = Layout("cuda", (2, 3), (2, 3))
    assert [layout.role(rank) for rank in range(2)] == [Role.SHARED] * 2
    assert [layout.device_of(rank) for rank in range(2)] == ["cuda:2", "cuda:3"]
    assert (layout.ranks, layout.first_drafter, layout.pairs) == (2, 0, [])
    assert layout.describe() == "2 shared ranks on cuda"
    assert Layout("cpu", (0,), (0,)).describe() == "1 shared rank on cpu"


def test_on_a_cpu_every_device_is_the_cpu() -> None:
    assert {Layout("cpu", (0, 1), (2,)).device_of(rank) for rank in range(3)} == {"cpu"}


@given(st.lists(st.integers(0, 15), min_size=2, max_size=16, unique=True), st.data())
def test_every_device_has_one_rank_and_every_pair_one_place(devices: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(devices) - 1))
    layout = Layout("cuda", tuple(devices[:cut]), tuple(devices[cut:]))
    ranks = range(layout.ranks)
    assert sorted(layout.device_of(rank) for rank in ranks) == sorted(f"cuda:{device}" for device in devices)
    assert layout.role(layout.first_drafter) is Role.DRAFTER
    assert layout.index(layout.first_drafter) == 0
    assert len(set(layout.pairs)) == len(layout.pairs) == layout.targets * layout.drafters
    for role, count in ((Role.TARGET, layout.targets), (Role.DRAFTER, layout.drafters)):
        assert [layout.index(rank) for rank in ranks if layout.role(rank) is role] == list(range(count))


# ---- membership

MEMBER = """
import os, sys, time
from pathlib import Path
from remote.protocol.layout import RunLayout
from trainer.pipeline.membership import join_run
lock = join_run(RunLayout(Path(sys.argv[1])), rank=4, leader_pid=int(sys.argv[2]) if len(sys.argv) > 2 else os.getppid())
assert "torch" not in sys.modules
print("in", flush=True)
time.sleep(60)
"""
LEADER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_member_holds_the_lock_leaves_its_pid_and_dies_with_the_leader(tmp_path: Path) -> None:
    run = RunLayout(tmp_path / "run")
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(run.path), MEMBER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with leader:
        assert leader.stdout is not None
        pid = int(leader.stdout.readline())
        assert leader.stdout.readline() == "in\n"
        assert is_held(run.run_lock)
        identity = read_pidfile(run.rank_pid(4))
        assert identity is not None
        assert identity.pid == pid
        assert identity.is_alive()
        leader.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while identity.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not identity.is_alive()
    assert not is_held(run.run_lock)


def test_a_member_whose_leader_has_ended_before_ends_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMBER, str(tmp_path / "run"), "1"],
        cwd=ROOT,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode != 0
    assert b"ended before" in done.stderr
    assert read_stat(os.getpid()) is not None


def test_an_error_is_filed_whole(tmp_path: Path) -> None:
    run = RunLayout(tmp_path)
    run.create()
    try:
        raise preflight_error("no model", cause="not there", hint="look elsewhere")
    except Exception as error:
        file_error(run, error, rank=2, role="drafter", device="cuda:7", phase="loading", time=12.5)
    filed = json.loads(run.error(2).read_text())
    assert {key: filed[key] for key in ("rank", "role", "device", "phase", "time", "message", "cause", "hint", "code")} == {
        "rank": 2, "role": "drafter", "device": "cuda:7", "phase": "loading", "time": 12.5, "message": "no model",
        "cause": "not there", "hint": "look elsewhere", "code": 7,
    }  # fmt: skip
    assert "test_an_error_is_filed_whole" in filed["traceback"]


class Phases:
    current = "saving"


class DistError(RuntimeError):
    """As torch.distributed has it, above DistBackendError."""


@pytest.mark.parametrize(
    ("error", "consequence", "blames"),
    [
        (PeerDied("target 1 (rank 5)", rank=5), True, 5),
        (type("DistBackendError", (DistError,), {})("NCCL communicator was aborted"), True, None),
        (RuntimeError("[x/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:29"), True, None),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, None),
        (Stalled(1, "target 1 stands still", cause="c"), False, 5),
        (Stalled(None, "no rank gets on", cause="c"), False, -1),
    ],
)
def test_what_follows_from_another_ranks_end_is_filed_as_that(
    tmp_path: Path, error: Exception, consequence: bool, blames: int | None
) -> None:
    # The second machine's third rank, of four on each.
    run = RunLayout(tmp_path)
    run.create()
    Filing(run, 6, 2, "drafter", "cuda:2", Phases()).file(error)  # type: ignore[arg-type]
    filed = json.loads(run.error(6).read_text())
    assert (filed["rank"], filed["phase"]) == (6, "saving")
    assert (filed["consequence"], filed["blames"]) == (consequence, blames)


def test_a_rank_has_a_name_for_people() -> None:
    layout = Layout("cuda", (0, 1), (2, 6))
    assert [layout.name(rank, 4 + rank) for rank in (1, 3)] == [
        "target 1 (rank 5, cuda:1)",
        "drafter 1 (rank 7, cuda:6)",
    ]


# ---- the plan


def plan(directory: Path) -> RunPlan:
    return RunPlan(
        run_id="r", run_dir=str(directory), config=TrainConfig(drafter_gpus=(1, 2)).to_dict(), leader_pid=1, sockets="/tmp/x",
        ring_file="", slot_bytes=1, slots_per_pair=2, captured_layers=2, hidden_size=8, documents="d.npz",
        data_fingerprint="f", total_steps=9, first_step=1, output_dir="/o",
    )  # fmt: skip


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    written = plan(tmp_path)
    written.save(tmp_path / "plan.json")
    read = RunPlan.load(tmp_path / "plan.json")
    assert read == written
    assert read.train_config() == TrainConfig(drafter_gpus=(1, 2))
    assert read.layout().drafters == 2


def test_a_missing_or_torn_plan_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RunPlan.load(tmp_path / "plan.json")
    plan(tmp_path).save(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text((tmp_path / "plan.json").read_text()[:50])
    with pytest.raises(ValueError):
        RunPlan.load(tmp_path / "plan.json")
