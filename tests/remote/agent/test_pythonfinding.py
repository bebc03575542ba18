"""What doctor says of an interpreter, and the command that mends it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.agent.interpreters import Interpreter, packages_of
from remote.agent.pythonfinding import KERNELS, NEEDED, lacking, numbers, python_finding, within

REPOSITORY = Path(__file__).parents[3]
FULL = {"torch": "2.13.0+cpu", "transformers": "5.19.0", "safetensors": "0.6.2", "numpy": "2.3.1"}
HOME = "/venv/bin/python"


def of(versions: dict[str, str], *, python: str = "3.11.2", managed: bool = False, **where: str) -> Interpreter:
    return Interpreter(HOME, python, versions, where, managed)


def test_the_ranges_are_those_of_the_project_file():
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    stated = dict(re.match(r"([\w-]+)(.*)", line).groups() for line in [*extras["trainer"], *extras["cuda"]])
    assert {name: stated[name] for name in NEEDED | KERNELS} == NEEDED | KERNELS


def test_one_that_has_everything():
    found = python_finding(of(FULL), "cpu")
    assert (found.state, found.hint) == ("ok", "")
    assert found.text == f"3.11.2, torch 2.13.0+cpu, transformers 5.19.0, at {HOME}"


def test_the_real_one_that_runs_this_test():
    found = python_finding(packages_of(sys.executable), "cpu")
    assert (found.state, "torch 2." in found.text) == ("ok", True)


def test_a_package_of_another_place_is_told_with_it():
    text = python_finding(of(FULL, torch="/usr/lib/python3", transformers="/venv/lib/python3.11"), "cpu").text
    assert "torch 2.13.0+cpu in /usr/lib/python3," in text
    assert "/venv/lib" not in text


@pytest.mark.parametrize("python", ["3.10.12", "2.7.18", "3.9"])
def test_an_old_python_is_a_failure(python):
    found = python_finding(of(FULL, python=python), "cpu")
    assert (found.state, found.code) == ("failed", 7)
    assert "too old" in found.text
    assert "--python" in found.hint


def test_missing_packages_come_with_the_command_for_that_interpreter():
    found = python_finding(of({"numpy": "2.3.1", "safetensors": "0.6.2"}), "cpu")
    assert found.state == "failed"
    assert "no torch, transformers" in found.text
    words = shlex.split(found.hint)
    assert words == [HOME, "-m", "pip", "install", "torch>=2.11,<2.14", "transformers>=5.15,<6"]


def test_a_distributions_own_python_is_offered_a_venv():
    hint = python_finding(of({}, managed=True), "cpu").hint
    assert hint.startswith(f"{HOME} -m venv ")
    assert re.search(r"--python /\S+/bin/python$", hint)


def test_the_system_python_of_debian_says_that_it_is_managed(tmp_path):
    marker = list(Path("/usr/lib").glob("python3*/EXTERNALLY-MANAGED"))
    if not marker or not Path("/usr/bin/python3").exists():
        pytest.skip("this system does not mark its Python")
    assert packages_of("/usr/bin/python3").managed
    # Inside an environment pip is at home, whatever the Python below is.
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    assert not packages_of(str(tmp_path / "v/bin/python")).managed


def test_kernels_are_wanted_on_a_gpu_and_unwanted_on_a_cpu():
    assert python_finding(of(FULL), "cuda").state == "warning"
    assert "flash-linear-attention" in python_finding(of(FULL), "cuda").hint
    with_kernels = of(FULL | {"flash-linear-attention": "0.6.0"})
    assert python_finding(with_kernels, "cuda").state == "ok"
    assert "fla 0.6.0" in python_finding(with_kernels, "cuda").text
    assert "uninstall" in python_finding(with_kernels, "cpu").hint


def test_a_version_that_nobody_tested_is_a_warning():
    found = python_finding(of(FULL | {"torch": "2.4.1"}), "cpu")
    assert (found.state, "untested: torch" in found.text) == ("warning", True)
    assert "'torch>=2.11,<2.14'" in found.hint


@pytest.mark.parametrize(
    ("version", "bounds", "fits"),
    [
        ("2.11", ">=2.11,<2.14", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.9.1", ">=2.11,<2.14", False),
        ("5.19.0.dev0", ">=5.15,<6", True),
        ("2.13.0+cu128", ">=2.11,<2.14", True),
        ("6", ">=5.15,<6", False),
        ("unknown", ">=5.15,<6", True),
    ],
)
def test_versions(version, bounds, fits):
    assert within(version, bounds) is fits


@given(st.text(max_size=20))
def test_any_version(text):
    assert all(number >= 0 for number in numbers(text))
    assert within(text, ">=1,<2") in (True, False)
    assert python_finding(of(FULL | {"torch": text}, python=text), "cuda").name == "python"


def test_an_interpreter_that_lacks_something_gets_the_command_that_brings_it():
    assert lacking(of(dict.fromkeys(NEEDED, "1"))) is None
    error = lacking(of({"numpy": "2.3", "transformers": "5.19"}, managed=True))
    assert (error.code, error.error) == (7, f"{HOME} lacks torch, safetensors")
    assert f"{HOME} -m venv " in error.hint
    assert "pip install 'torch>=2.11,<2.14' 'safetensors>=0.5,<1', then pass --python " in error.hint
