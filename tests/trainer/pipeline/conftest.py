"""One tiny target, one tiny data set, and runs of the whole pipeline over them: each layout is run once and shared."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from remote.protocol import events as ev
from remote.protocol.files import write_json
from remote.protocol.layout import RunLayout, new_run_id
from remote.protocol.records import RankError, StopRequest, read_record
from trainer.config import TrainConfig

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 90.0


@dataclass
class Run:
    """A run of the pipeline and what it left behind."""

    layout: RunLayout
    config: TrainConfig
    codes: list[int] = field(default_factory=list)

    @property
    def log(self) -> str:
        return self.layout.train_log.read_text()

    def events(self, kind: type[ev.Event]) -> list[Any]:
        if not self.layout.events.exists():
            return []
        return [event for event in ev.read_events(self.layout.events.read_bytes()) if isinstance(event, kind)]

    @property
    def losses(self) -> dict[int, float]:
        return {step.step: step.loss for step in self.events(ev.Step)}

    @property
    def finished(self) -> ev.RunFinished:
        (event,) = self.events(ev.RunFinished)
        return event

    @property
    def checkpoints(self) -> list[Path]:
        from trainer.checkpoint_files import list_checkpoints

        return list_checkpoints(self.layout.checkpoints)

    def weights(self, name: str = "drafter") -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.checkpoints[-1] / f"{name}.safetensors")

    def error(self, rank: int) -> RankError:
        record = read_record(RankError, self.layout.error(rank))
        assert record is not None, self.log
        return record

    def ask_to_stop(self, *, checkpoint: bool = True) -> None:
        write_json(self.layout.stop, StopRequest(deadline=time.time() + 60, by="test", checkpoint=checkpoint))

    def wait_for_step(self, step: int) -> None:
        """Wait until a step was reported."""
        self.wait_for(lambda: step in self.losses, f"no step {step}")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something is so; `what` says that it is not."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.log}"
            time.sleep(0.01)


class WarmLauncher:
    """The client of warm_launcher.py: one run at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm_launcher.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.pid = self._answer()["pid"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def start(self, config: TrainConfig, layout: RunLayout, faults: dict[int, dict[str, Any]] | None = None) -> Run:
        """Prepare a run as the leader does and fork its ranks, with faults in some of them."""
        from trainer.pipeline.leader import prepare

        layout.create()
        plan = dataclasses.replace(prepare(config, layout), leader_pid=self.pid)
        plan.save(layout.path / "plan.json")
        request = {
            "plan": str(layout.path / "plan.json"),
            "ranks": plan.layout().ranks,
            "log": str(layout.train_log),
            "faults": faults or {},
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        return Run(layout, config)

    def wait(self, run: Run) -> Run:
        """Wait for the run's end."""
        run.codes = self._answer()["codes"]
        return run

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """63 random documents of 8 to 40 tokens, the first three of each unsupervised: 16 rows of 128 tokens."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    documents = [[draw.randrange(4, 48) for _ in range(draw.randint(8, 40))] for _ in range(63)]
    path.write_text("".join(json.dumps({"input_ids": ids, "prompt_len": 3}) + "\n" for ids in documents))
    return path


@pytest.fixture(scope="session")
def tiny_values(make_target: Callable[..., Path], data_file: Path) -> dict[str, Any]:
    """A configuration whose run takes about a second: 1 target, 1 drafter, float64."""
    return {
        "target_model": str(make_target()),
        "data_dir": str(data_file),
        "mask_token_id": 3,
        "block_size": 4,
        "drafter_layers": 2,
        "captured_layers": 2,
        "max_length": 64,
        "token_budget": 128,
        "bucket_tokens": 16,
        "num_anchors": 8,
        "row_anchors": 24,
        "epochs": 1,
        "micro_batches_per_step": 3,
        "device": "cpu",
        "dtype": "float64",
        "threads": 1,
        "ring_mib": 8,
        "profile_interval": 0.01,
        "collective_timeout": 60,
        "checkpoint_every": 0,
        "verify_copies": "all",
        "lr": 1e-2,
    }


@pytest.fixture(scope="session")
def warm_launcher() -> Iterator[WarmLauncher]:
    launcher = WarmLauncher()
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def start(
    warm_launcher: WarmLauncher, tiny_values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Run]:
    """Return start(**keys): begin a run that differs from the tiny configuration in these keys; `faults` by rank."""

    def begin(faults: dict[int, dict[str, Any]] | None = None, **changes: Any) -> Run:
        layout = RunLayout(tmp_path_factory.mktemp("run") / new_run_id())
        return warm_launcher.start(TrainConfig.from_mapping(tiny_values | changes), layout, faults)

    return begin


@pytest.fixture(scope="session")
def finish(warm_launcher: WarmLauncher) -> Callable[[Run], Run]:
    return warm_launcher.wait


@pytest.fixture(scope="session")
def trained(start: Callable[..., Run], finish: Callable[[Run], Run]) -> Callable[..., Run]:
    """Return trained(**keys): the finished run of this configuration, run once in the session."""
    runs: dict[str, Run] = {}

    def get(**changes: Any) -> Run:
        key = json.dumps(changes, sort_keys=True)
        if key not in runs:
            runs[key] = finish(start(**changes))
            assert set(runs[key].codes) == {0}, runs[key].log
        return runs[key]

    return get


@pytest.fixture(scope="session")
def poisoned(
    make_target: Callable[..., Path], data_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """A target whose embedding of token 47 is NaN, and data in which one document in the middle holds that token."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("poisoned")
    model = directory / "model"
    model.mkdir()
    source = make_target(tie_word_embeddings=False)
    for path in source.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][47] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    documents = [json.loads(line) for line in data_file.read_text().splitlines()]
    for number, document in enumerate(documents):
        document["input_ids"] = [46 if token == 47 else token for token in document["input_ids"]]
        if number == 20:
            document["input_ids"][1] = 47
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return {"target_model": str(model), "data_dir": str(data)}


@pytest.fixture(scope="session")
def broken_head(make_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], str]:
    """Return broken_head(factor): a target whose head is multiplied, while its states stay what they were."""

    from safetensors.torch import load_file, save_file

    def make(factor: float) -> str:
        model = tmp_path_factory.mktemp("head") / "model"
        model.mkdir()
        for path in make_target(tie_word_embeddings=False).iterdir():
            (model / path.name).write_bytes(path.read_bytes())
        weights = load_file(model / "model.safetensors")
        weights = {name: value.double() if name == "lm_head.weight" else value for name, value in weights.items()}
        weights["lm_head.weight"] *= factor
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        return str(model)

    return make
