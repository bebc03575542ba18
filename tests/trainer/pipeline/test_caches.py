"""Kernels and the results of their tuning are kept where the next run, and the next release, find them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.config import TrainConfig
from trainer.pipeline import leader
from trainer.pipeline.caches import cache_environment, kept_folder
from trainer.pipeline.layout import Layout

PLACES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def test_below_root_where_the_agent_started_the_run(tmp_path: Path) -> None:
    found, warning = cache_environment(tmp_path / "run", {"DFLASH_ROOT": str(tmp_path / "root"), "HOME": "/nowhere"})
    assert {name: found[name] for name in PLACES} == {
        name: str(tmp_path / "root/cache" / folder) for name, folder in PLACES.items()
    }
    assert (found["TRITON_CACHE_AUTOTUNING"], found["FLA_CACHE_RESULTS"], warning) == ("1", "1", "")


def test_another_run_and_another_release_have_the_same_folder(tmp_path: Path) -> None:
    environ = {"DFLASH_ROOT": str(tmp_path)}
    runs = [cache_environment(tmp_path / "runs" / name, environ) for name in ("a", "b")]
    assert runs[0] == runs[1]
    assert not kept_folder(environ).is_relative_to(tmp_path / "releases")


@pytest.mark.parametrize(("said", "place"), [("xdg", "xdg/dflashctl"), ("", ".cache/dflashctl")])
def test_without_an_agent_it_is_in_the_users_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, place: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kept_folder({"XDG_CACHE_HOME": str(tmp_path / said)} if said else {}) == tmp_path / place
    # The specification wants relative ones ignored: they would lie in whatever directory the run was started in.
    assert kept_folder({"XDG_CACHE_HOME": "somewhere"}) == tmp_path / ".cache/dflashctl"


@pytest.mark.parametrize("name", [*PLACES, "TRITON_CACHE_AUTOTUNING", "FLA_CACHE_RESULTS"])
def test_what_the_user_has_set_stays(tmp_path: Path, name: str) -> None:
    found, _ = cache_environment(tmp_path, {"DFLASH_ROOT": str(tmp_path), name: "mine"})
    assert name not in found
    assert len(found) == 3


def test_a_folder_that_cannot_be_written_is_replaced_by_the_runs_own_and_said(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file where a directory should be")
    found, warning = cache_environment(tmp_path / "run", {"DFLASH_ROOT": str(tmp_path / "root")})
    assert found["TRITON_CACHE_DIR"] == str(tmp_path / "run/cache/triton")
    assert warning.startswith(f"compiled kernels are kept in {tmp_path / 'run'}")
    assert str(tmp_path / "root/cache") in warning


def test_a_user_without_a_home_gets_the_runs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    found, warning = cache_environment(tmp_path, {})
    assert found["TRITON_CACHE_DIR"] == str(tmp_path / "cache/triton")
    assert warning.endswith("the user has no home directory")


def test_nothing_is_looked_at_where_the_user_has_set_both_places(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    environ = {"DFLASH_ROOT": str(tmp_path / "root")} | dict.fromkeys(PLACES, "/mine")
    assert cache_environment(tmp_path, environ)[1] == ""


@pytest.mark.parametrize("writable", [True, False])
def test_the_launcher_gets_them(
    tiny_values: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    writable: bool,
) -> None:
    seen: dict[str, str] = {}
    root = tmp_path / "root"
    if not writable:
        root.write_text("")
    for name in (*PLACES, "TRITON_CACHE_AUTOTUNING", "FLA_CACHE_RESULTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DFLASH_ROOT", str(root))
    monkeypatch.setattr(os, "execve", lambda path, argv, environment: seen.update(environment, argv0=path))
    config = TrainConfig.from_mapping(tiny_values | {"device": "cuda"})
    leader.launch(Layout.of(config), tmp_path / "plan.json", config)
    kept = root / "cache" if writable else tmp_path / "cache"
    assert seen["TRITON_CACHE_DIR"] == str(kept / "triton")
    assert seen["TORCHINDUCTOR_CACHE_DIR"] == str(kept / "inductor")
    assert seen["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert seen["argv0"] == sys.executable
    assert capsys.readouterr().err.count("compiled kernels") == (0 if writable else 1)


def test_a_run_on_the_cpu_keeps_nothing(
    tiny_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setenv("DFLASH_ROOT", str(tmp_path / "root"))
    monkeypatch.setattr(os, "execve", lambda path, argv, environment: seen.update(environment))
    config = TrainConfig.from_mapping(tiny_values)
    leader.launch(Layout.of(config), tmp_path / "plan.json", config)
    assert seen
    assert not (tmp_path / "root").exists()
