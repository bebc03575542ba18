"""The demo computes in the type that its CPU is fast in, and says so before it trains."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[3] / "templates" / "demo" / "run.py"
XEON = "processor\t: 0\nmodel name\t: Some Xeon @ 2.0GHz\nflags\t\t: fpu avx512f{}\n\n"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """run.py as a module, with nothing to make and nothing to measure."""
    spec = importlib.util.spec_from_file_location("demo_run", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up by name.
    monkeypatch.setitem(sys.modules, "demo_run", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BUILD", tmp_path / "build")
    monkeypatch.setattr(module, "make_target", lambda: tmp_path / "target")
    return module


@pytest.mark.parametrize(
    ("flags", "dtype", "why"),
    [
        ("", "float32", "the CPU (Some Xeon @ 2.0GHz) has no bf16 units"),
        (" avx512_bf16", "bfloat16", "the CPU (Some Xeon @ 2.0GHz) has avx512_bf16"),
        (" avx512_bf16 amx_bf16 amx_tile", "bfloat16", "the CPU (Some Xeon @ 2.0GHz) has amx_bf16, avx512_bf16"),
        (" amx_tile amx_int8", "float32", "the CPU (Some Xeon @ 2.0GHz) has no bf16 units"),
        # A word that only begins so.
        (" avx512_bf16x", "float32", "the CPU (Some Xeon @ 2.0GHz) has no bf16 units"),
    ],
)
def test_bfloat16_only_where_there_are_units_for_it(demo: ModuleType, flags: str, dtype: str, why: str) -> None:
    assert demo.dtype_for(XEON.format(flags) * 2) == (dtype, why)


@pytest.mark.parametrize("facts", ["", "processor\t: 0\nFeatures\t: fp asimd bf16\n"])
def test_a_cpu_of_another_kind_computes_in_float32(demo: ModuleType, facts: str) -> None:
    assert demo.dtype_for(facts) == ("float32", "the CPU (unnamed) has no bf16 units")


class Begun(Exception):
    """Training would begin here."""


@pytest.mark.parametrize(("flags", "dtype"), [("", "float32"), (" amx_bf16", "bfloat16")])
def test_the_demo_says_it_and_a_flag_of_ones_own_comes_last(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    dtype: str,
) -> None:
    (tmp_path / "cpuinfo").write_text(XEON.format(flags))
    monkeypatch.setattr(demo, "CPU_FACTS", tmp_path / "cpuinfo")
    given: list[list[str]] = []

    def train(words: list[str]) -> None:
        given.append(words)
        raise Begun

    monkeypatch.setattr(demo, "train", train)
    main: Callable[[list[str]], None] = demo.main
    with pytest.raises(Begun):
        main(["--max-steps", "20", "--dtype", "float64"])
    assert given == [["--dtype", dtype, "--max-steps", "20", "--dtype", "float64"]]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("computing in")]
    assert line.startswith(f"computing in {dtype}: the CPU (Some Xeon @ 2.0GHz) has ")
