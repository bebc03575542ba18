"""GPUs: read from a real executable named nvidia-smi, which here says what a test wants."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from remote.agent import gpus
from remote.protocol.errors import DflashError
from remote.protocol.records import RunSpec, read_record


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets what nvidia-smi prints and its exit code."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script, text = folder / "nvidia-smi", tmp_path / "smi.txt"
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def says(output: str, code: int = 0) -> None:
        text.write_text(output)
        script.write_text(f"#!/bin/sh\ncat {text}\nexit {code}\n")
        script.chmod(0o755)

    return says


def table(*used: int) -> str:
    return "".join(f"{index}, NVIDIA H200, {mib}, 143771\n" for index, mib in enumerate(used))


def test_without_nvidia_smi_there_are_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.list_gpus() == []
    with pytest.raises(DflashError) as caught:
        gpus.require_free(["0"])
    assert caught.value.render().splitlines() == [
        "error: no GPU on the far end",
        "  cause: nvidia-smi finds none there",
        "  hint: choose another destination, or train on its processor with --device cpu",
    ]
    assert caught.value.code == 7
    assert gpus.require_free(["cpu"]) == {}


def test_a_table_is_read(smi):
    smi("0, NVIDIA H200, 4, 143771\n1, Name, with comma, [N/A], 97887\nnoise\n")
    assert gpus.list_gpus() == [
        gpus.Gpu("0", "NVIDIA H200", 4, 143771),
        gpus.Gpu("1", "Name, with comma", 0, 97887),
    ]


def test_a_gpu_that_is_not_there_is_named(smi):
    smi(table(4, 4))
    with pytest.raises(DflashError) as caught:
        gpus.require_free(["1", "2"])
    assert (caught.value.error, caught.value.cause) == ("no GPU 2 there", "it has 2: 0, 1")


def test_a_start_without_gpus_is_refused_with_whatever_else_is_missing(far):
    error = far.start(spec={"devices": ["0"]}, preflight=True).error
    assert error["code"] == 7
    first, second = error["problems"]
    assert (first["error"], "GPU" in second["error"]) == ("no GPU on the far end", False), "told once, not in two ways"


def test_lost_devices_are_an_error_of_their_own(smi):
    smi("Failed to initialize NVML: Unknown Error\n", 255)
    with pytest.raises(DflashError) as caught:
        gpus.list_gpus()
    assert "Failed to initialize NVML" in caught.value.cause
    assert "restart" in caught.value.hint


def test_a_held_gpu_is_named_with_what_holds_it(smi):
    smi(table(4, 60000))
    assert gpus.require_free(["0"]) == {"0": 4}
    with pytest.raises(DflashError) as caught:
        gpus.require_free(["0", "1"])
    assert caught.value.code == 7
    assert caught.value.error == "GPU 1 is held"
    assert "60000 MiB in use by a holder outside this container" in caught.value.cause


def test_a_holder_has_a_name_and_a_user_where_psutil_is(monkeypatch):
    own, ended = os.getpid(), subprocess.Popen(["true"])
    ended.wait()
    program = psutil.Process(own).name()
    assert gpus.named([own, ended.pid]) == f"pid {own} ({program} of {getpass.getuser()}), {ended.pid}"
    # The system's Python has no psutil.
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert gpus.named([own]) == f"pid {own}"


def test_holders_are_found_by_what_they_hold_open(tmp_path, monkeypatch):
    # Any file stands for the device: the search is by resolved path.
    assert os.getpid() not in gpus.holders("0")
    with open(os.devnull, "rb"):
        assert gpus._has_open(Path(f"/proc/{os.getpid()}/fd"), "/dev/null")


def test_waiting_ends_when_memory_is_free(smi, monkeypatch):
    monkeypatch.setattr(gpus, "_WAIT_SECONDS", 0.01)
    smi(table(60000))
    told = []

    def tell(text: str) -> None:
        told.append(text)
        smi(table(4))

    gpus.wait_free(["0"], tell, lambda: None)
    assert told == ["waiting for GPU 0 (GPU 0: 60000 MiB)"]


def test_a_run_on_a_gpu_from_start_to_stop(far, smi):
    smi(table(4, 60000))
    error = far.start(spec={"devices": ["0", "1"]}).error
    assert (error["code"], error["error"]) == (7, "GPU 1 is held")
    assert not list(far.root.runs.iterdir()), "nothing is left of a refused start"
    far.running(spec={"devices": ["0"]})
    assert read_record(RunSpec, far.run.spec).gpu_memory == {"0": 4}
    assert far.start(spec={"devices": ["0", "cpu"]}).error["code"] == 4
    assert "GPU memory free on 1/1" in far.ok("stop", now=True)["message"]


def test_memory_that_never_falls_is_told(smi, monkeypatch, tmp_path):
    from remote.agent import stop
    from remote.protocol.files import write_json
    from remote.protocol.layout import RunLayout

    monkeypatch.setattr(stop, "_GPU_SECONDS", 0.0)
    run = RunLayout(tmp_path / "20200101-000000-aaaaaa")
    run.create()
    write_json(run.spec, RunSpec(run.run_id, (sys.executable,), {}, ("0",), gpu_memory={"0": 4}))
    smi(table(50000))
    with pytest.raises(DflashError) as caught:
        stop._wait_for_gpus(run)
    assert caught.value.code == 9
    assert "GPU 0: 50000 MiB" in caught.value.cause
