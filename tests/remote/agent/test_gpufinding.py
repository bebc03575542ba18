"""GPUs as doctor tells them: device files, the driver's numbers, and who holds what."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote.agent import gpufinding
from remote.agent.gpufinding import (
    OUTSIDE,
    device_majors,
    driver_version,
    gpu_finding,
    gpu_nodes,
    node_problem,
    owner,
    run_of,
)
from remote.agent.gpus import named
from remote.protocol.layout import new_run_id

# /dev/null has major 1 ("mem"): it stands for a device file here, for making one needs root.
MAJORS = "Character devices:\n  1 mem\n195 nvidia\n  1 nvidia-uvm\n\nBlock devices:\n 8 sd\n"


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """Return a function that fills a /dev of our own with device files of these names."""
    folder = tmp_path / "dev"
    folder.mkdir()
    monkeypatch.setattr(gpufinding, "_DEVICES", folder)
    monkeypatch.setattr(gpufinding, "_MAJORS", tmp_path / "majors")
    monkeypatch.setattr(gpufinding, "_DRIVER", tmp_path / "version")
    (tmp_path / "majors").write_text(MAJORS)
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC 13.2.0\n"
    )

    def make(*names: str) -> Path:
        for name in names:
            (folder / name).symlink_to("/dev/null")
        return folder

    return make


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Return a function that sets what nvidia-smi prints and its exit code."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def says(output: str, code: int = 0) -> None:
        (tmp_path / "smi.txt").write_text(output)
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat {tmp_path}/smi.txt\nexit {code}\n")
        (folder / "nvidia-smi").chmod(0o755)

    return says


@contextlib.contextmanager
def process_with(run: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that carries this run id, until the block ends."""
    command = [sys.executable, "-c", "print(flush=True); import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"DFLASH_RUN_ID": run}) as child:
        # For a moment after its exec a process shows no environment at all.
        child.stdout.readline()
        yield child


def table(*used: int) -> str:
    return "".join(f"{index}, NVIDIA H200, {mib}, 143771\n" for index, mib in enumerate(used))


def test_a_machine_without_gpus(devices, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    devices()
    assert gpu_finding("cpu", []).state == "ok"
    failed = gpu_finding("cuda", ["0"])
    assert (failed.state, failed.code) == ("failed", 7)
    assert "/dev/nvidia0" in failed.text
    assert "dev0: /dev/nvidia0" in failed.hint
    assert gpu_finding("", []).state == "warning"


def test_free_ones(devices, smi):
    devices("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")
    smi(table(4, 4))
    found = gpu_finding("cuda", ["0", "1"])
    assert (found.state, found.text) == ("ok", "2 x NVIDIA H200, 140 GiB each, driver 580.95.05; all free")


def test_kinds_are_counted_apart(devices, smi):
    devices("nvidia0", "nvidia-uvm")
    smi("0, NVIDIA H200, 4, 143771\n1, RTX, 4, 24576\n")
    assert gpu_finding("cuda", []).text.startswith("NVIDIA H200, 140 GiB; RTX, 24 GiB, driver")


def test_one_that_the_configuration_wants_is_not_there(devices, smi):
    devices("nvidia0", "nvidia-uvm")
    smi(table(4, 4))
    found = gpu_finding("cuda", ["1", "7"])
    assert (found.state, "wants GPU 7" in found.text) == ("failed", True)


@pytest.mark.parametrize(
    ("device", "wanted", "state"), [("cuda", ["1"], "failed"), ("cuda", ["0"], "warning"), ("cpu", [], "warning")]
)
def test_held_by_somebody_outside(devices, smi, device, wanted, state):
    devices("nvidia0", "nvidia1", "nvidia-uvm")
    smi(table(4, 60000))
    found = gpu_finding(device, wanted)
    assert found.state == state
    assert f"GPU 1: 60,000 MiB by {OUTSIDE}" in found.text
    assert "--wait-gpus" in found.hint


def test_held_by_our_own_run_is_no_trouble(devices, smi, monkeypatch):
    devices("nvidia0", "nvidia1", "nvidia-uvm")
    smi(table(50000, 60000))
    run = new_run_id()
    with process_with(run) as child:
        monkeypatch.setattr(gpufinding, "holders", lambda index: [child.pid])
        assert run_of(child.pid) == run
        found = gpu_finding("cuda", ["0", "1"])
        assert (found.state, found.text.partition("; ")[2]) == ("ok", f"GPU 0, 1: 110,000 MiB by run {run}")
        # A stranger beside it is named, and only he.
        assert owner([child.pid, os.getpid()]) == named([os.getpid()])
    assert run_of(child.pid) == ""


@pytest.mark.parametrize("value", ["", "x", "../../etc", "20260101-000000-zzzzzz", "\x1b[2J"])
def test_a_run_id_that_is_none_is_not_believed(value):
    with process_with(value) as child:
        assert run_of(child.pid) == ""


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("Failed to initialize NVML: Unknown Error\n", "daemon-reload"),
        (
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n",
            "reboot the host",
        ),
    ],
)
def test_lost_devices_have_their_own_way_out(devices, smi, said, word):
    devices("nvidia0", "nvidia-uvm")
    smi(said, 255)
    found = gpu_finding("cuda", ["0"])
    assert (found.state, word in found.hint) == ("failed", True)
    assert said.splitlines()[0] in found.text
    assert gpu_finding("cpu", []).state == "warning"


def test_device_files_without_the_tool(devices, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    devices("nvidia0", "nvidia-uvm")
    assert "no nvidia-smi" in gpu_finding("cuda", ["0"]).text
    assert gpu_finding("cpu", []).state == "warning"


def test_a_stale_major_of_nvidia_uvm(devices, smi):
    folder = devices("nvidia0", "nvidia-uvm")
    smi(table(4))
    assert node_problem(True, folder, MAJORS) is None
    text, hint = node_problem(True, folder, MAJORS.replace("  1 nvidia-uvm", "511 nvidia-uvm"))
    assert text == "/dev/nvidia-uvm has major 1, the driver's is 511 now"
    assert "restart the container" in hint
    # A host whose /proc/devices a container may not see: nothing to compare with.
    assert node_problem(True, folder, "") is None


def test_no_nvidia_uvm(devices, smi):
    devices("nvidia0", "nvidiactl")
    smi(table(4))
    assert "no /dev/nvidia-uvm: CUDA cannot start" in gpu_finding("cuda", ["0"]).text


def test_a_plain_file_is_no_device(devices):
    folder = devices("nvidia0")
    (folder / "nvidia-uvm").write_text("")
    assert node_problem(True, folder, MAJORS)[0].startswith("no /dev/nvidia-uvm")
    assert gpu_nodes(folder) == ["nvidia0"]
    assert gpu_nodes(folder / "none") == []


@given(st.text(max_size=120))
def test_any_text_of_the_kernel(text):
    assert all(number >= 0 for number in device_majors(text).values())
    assert driver_version(text) == "" or driver_version(text)[0].isdigit()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.lists(
        st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20)
        | st.sampled_from(["0, a, 1, 2", "٣, a, 1, 2", "0, a, 9999999999999, [N/A]", "0,,,", "0, NVIDIA, 4"])
        | st.integers(-5, 10**30).map(lambda number: f"{number}, x, {number}, {number}"),
        max_size=4,
    ).map("\n".join),
    code=st.sampled_from([0, 0, 9]),
    device=st.sampled_from(["cuda", "cpu", ""]),
)
def test_whatever_nvidia_smi_prints(devices, smi, text, code, device):
    smi(text, code)
    found = gpu_finding(device, ["0"])
    assert found.state in ("ok", "warning", "failed")
    assert found.text
