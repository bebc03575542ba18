"""The selfcheck passes this tree, and refuses trees with the mistakes it is there for."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from trainer import selfcheck, toy
from trainer.config import TrainConfig
from trainer.data.documents import open_dataset

TREE = Path(__file__).resolve().parents[2]

SOURCE = """
import os
from math import inf

LIMIT = 3
class Row:
    size = LIMIT
    def wide(self): return [bucket_ids for _ in range(len(os.sep))]
def later(): return helper(inf)
def helper(x): return x if LIMIT else print(__name__)
"""


def module_of(tmp_path: Path, source: str) -> ModuleType:
    file = tmp_path / "planted.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("planted", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_selfcheck(tree: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainer", "selfcheck", "--json"]
    return subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=False)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for room in ("remote", "trainer"):
        shutil.copytree(TREE / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def last_object(output: str) -> dict[str, object]:
    return json.loads(output.splitlines()[-1])


def test_a_name_that_nobody_defines_is_found_with_its_line(tmp_path: Path) -> None:
    assert selfcheck.undefined_names(module_of(tmp_path, SOURCE)) == ["planted.py:8 bucket_ids"]


def test_names_that_are_defined_are_none(tmp_path: Path) -> None:
    assert selfcheck.undefined_names(module_of(tmp_path, SOURCE.replace("bucket_ids", "LIMIT"))) == []


def test_every_module_of_this_tree_is_sound() -> None:
    modules = list(selfcheck.import_all())
    assert {"trainer.train", "trainer.pipeline.rank", "remote.protocol.frames"} <= {each.__name__ for each in modules}
    assert [name for module in modules for name in selfcheck.undefined_names(module)] == []


def test_this_tree_passes_and_trains_the_toy() -> None:
    done = run_selfcheck(TREE)
    assert done.returncode == 0, done.stderr
    result = last_object(done.stdout)
    assert result["ok"] is True
    assert 3.0 < result["loss"] < 6.0  # pyright: ignore  # ln(96) = 4.56


def test_an_undefined_name_is_refused_before_anything_is_trained(copied: Path) -> None:
    file = copied / "trainer" / "pipeline" / "session.py"
    file.write_text(file.read_text().replace("self._blocks(packed.row)", "batch_bucket_ids(packed.row)", 1))
    done = run_selfcheck(copied)
    said = last_object(done.stdout)
    assert done.returncode == 7
    assert said["error"] == "1 undefined name"
    assert "batch_bucket_ids" in str(said["cause"])
    assert "session.py:" in str(said["cause"])
    assert "Traceback" not in done.stderr


def test_the_rank_that_failed_is_named_and_not_the_one_that_lost_it(copied: Path) -> None:
    # Its peer loses the connection and complains within milliseconds; a clean-up before the filing made that the cause.
    file = copied / "trainer" / "target" / "load.py"
    source = file.read_text()
    file.write_text(source.replace('    """Load the text stack', '    raise RuntimeError("planted")\n    """Load', 1))
    assert file.read_text() != source
    done = run_selfcheck(copied)
    said = last_object(done.stdout)
    assert done.returncode == 7
    assert said["error"] == "the toy did not train: the target failed in loading"
    assert said["cause"] == "RuntimeError: planted"
    assert "load_target" in str(said["detail"])


def test_the_toy_is_data_that_trains(tmp_path: Path) -> None:
    toy.make_toy_data(tmp_path / "data.jsonl")
    dataset = open_dataset(tmp_path / "data.jsonl", max_length=64, vocab_size=toy.VOCABULARY)
    assert len(dataset) == 12
    assert (dataset.candidates > 0).all()
    config = TrainConfig.from_mapping(toy.toy_config(tmp_path, tmp_path / "data.jsonl"))
    assert config.mask_token_id not in dataset.token_ids_seen()
