"""What the leader decided before any rank was launched, as one JSON file that every rank reads. Torch-free."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote.protocol.files import write_json
from remote.protocol.layout import RunLayout
from remote.protocol.records import read_record
from trainer.config import TrainConfig
from trainer.pipeline.layout import Layout

PLAN_VARIABLE = "DFLASH_PLAN"
"""Environment variable that tells a rank where the plan lies."""


@dataclass(frozen=True)
class RunPlan:
    """Facts all ranks share. `documents` is an .npz with the lengths and candidates that the schedule is computed from."""

    run_id: str
    run_dir: str
    config: dict[str, Any]
    leader_pid: int
    sockets: str
    ring_file: str
    slot_bytes: int
    slots_per_pair: int
    captured_layers: int
    hidden_size: int
    documents: str
    data_fingerprint: str
    total_steps: int
    first_step: int
    output_dir: str
    resume: str = ""
    target_fingerprint: str = ""
    held_out_fingerprint: str = ""
    target_architecture: str = ""
    attended: bool = False
    """Whether a process waits in front of a person for the run's end, and tells what ended it."""

    def train_config(self) -> TrainConfig:
        return TrainConfig.from_mapping(self.config, "the run's plan")

    def layout(self) -> Layout:
        return Layout.of(self.train_config())

    @property
    def packed_layers(self) -> int:
        """Layers whose states travel: the captured ones, and the last one too where the drafter learns from it."""
        return self.captured_layers + self.train_config().distils

    @property
    def run(self) -> RunLayout:
        return RunLayout(Path(self.run_dir))

    @property
    def event_address(self) -> Path:
        return Path(self.sockets) / "events.sock"

    @property
    def board(self) -> Path:
        """The mapping in which the ranks of this machine see each other; see trainer.pipeline.vitals."""
        return Path(self.sockets) / "board"

    def pair_address(self, target: int, drafter: int) -> Path:
        """Socket that joins one target to one drafter."""
        return Path(self.sockets) / f"pair-{target}-{drafter}.sock"

    def forget_names(self) -> None:
        """Remove the ring's file and the sockets' directory: both live on in the mappings and connections that ranks have."""
        if self.ring_file:
            Path(self.ring_file).unlink(missing_ok=True)
        shutil.rmtree(self.sockets, ignore_errors=True)

    def save(self, path: Path) -> None:
        write_json(path, self)

    @classmethod
    def load(cls, path: Path) -> RunPlan:
        """Read a plan. Raises FileNotFoundError or ValueError."""
        plan = read_record(cls, path)
        if plan is None:
            raise FileNotFoundError(path)
        return plan
