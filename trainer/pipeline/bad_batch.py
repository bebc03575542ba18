"""The batches of a refused step: kept on the CPU until the step's flag is read, then saved to the run's bad/ (rule 14).

<run>/bad/step-00000012/   batch-00000034.safetensors    tokens of a micro-batch; what was seen and the configuration in its header
                           drafter.safetensors           the weights that the step met
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from remote.protocol.codec import dumps, from_plain, loads_object
from remote.protocol.errors import DflashError, usage_error
from remote.protocol.files import fsync_directory
from trainer.checkpoint_files import DRAFTER_FILE
from trainer.drafter.model import Drafter
from trainer.pipeline.figures import StepFigures
from trainer.pipeline.packed import RowTokens

# A run that goes on regardless may refuse thousands of steps; the first ones say what there is to know, and a 27B target's
# drafter takes 7 GB each time.
_KEPT_STEPS = 3


@dataclass(frozen=True)
class BadBatch:
    """A micro-batch of a refused step. `seen`: states, copy, loss or gradient; `target`: the one that packed it.

    `token_ids_seen` i64[m]: what the softmax ran over besides random tokens; empty where it ran over the whole vocabulary.
    """

    row: RowTokens
    seen: str
    target: int
    config: dict[str, Any]
    token_ids_seen: torch.Tensor

    @classmethod
    def load(cls, path: Path) -> BadBatch:
        """Read a file of bad/. Raises a usage error when it is none."""
        try:
            with safe_open(path, "pt") as file:
                about = from_plain(_About, loads_object((file.metadata() or {}).get("bad_batch", "")))
            tensors = load_file(path)
            token_ids_seen = tensors.pop("token_ids_seen")
            ids = tensors["document_ids"]
            row = RowTokens(about.batch, about.step, about.epoch, **tensors, tokens=int((ids >= 0).sum()))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise usage_error(
                f"{path} is no batch of a refused step",
                cause=str(error),
                hint="name a file bad/step-N/batch-B.safetensors of a run's directory",
            ) from error
        return cls(row, about.seen, about.target, about.config, token_ids_seen)

    def save(self, path: Path) -> None:
        """Write the file. Raises OSError or SafetensorError."""
        row = self.row
        tensors = {
            "input_ids": row.input_ids,
            "loss_mask": row.loss_mask,
            "document_ids": row.document_ids,
            "position_ids": row.position_ids,
            "token_ids_seen": self.token_ids_seen,
        }
        about = _About(row.batch, row.step, row.epoch, self.seen, self.target, self.config)
        _save(tensors, path, {"bad_batch": dumps(about)})


@dataclass(frozen=True)
class _About:
    batch: int
    step: int
    epoch: int
    seen: str
    target: int
    config: dict[str, Any]
    schema: int = 1


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    # Several drafters write beside one another; each file appears whole or not at all.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file(tensors, temporary, metadata)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


@dataclass
class Evidence:
    """One drafter's tokens of the steps whose figures are not read yet. `documents`: the plan's .npz.

    `writes_drafter`: on one drafter, all have the same weights.
    """

    directory: Path
    config: dict[str, Any]
    documents: Path
    drafter: Drafter
    writes_drafter: bool
    _rows: dict[int, list[tuple[RowTokens, int]]] = field(default_factory=dict)
    _saved: int = 0

    def keep(self, row: RowTokens, target: int) -> None:
        """Keep the tokens of a micro-batch (17 bytes each) that a target packed."""
        self._rows.setdefault(row.step, []).append((row, target))

    def settle(self, figures: StepFigures) -> Path | None:
        """Let go of a step's tokens; save them if it was refused. Returns where, None when nothing was saved.

        Every drafter reads the same figures, so all save the same steps. Raises DflashError when there is no room.
        """
        rows = self._rows.pop(figures.step, [])
        if not figures.non_finite or self._saved == _KEPT_STEPS:
            return None
        self._saved += 1
        directory = self.directory / f"step-{figures.step:08d}"
        # Numbers that arose in the backward alone are in the sum of all: then every batch of the step is a suspect.
        seen = {suspect.place: suspect.what for suspect in figures.suspects}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with np.load(self.documents) as documents:
                token_ids_seen = torch.from_numpy(documents["token_ids_seen"])
            for row, target in rows:
                what = seen.get(row.batch % figures.micro_batches, "" if seen else "gradient")
                if what:
                    file = directory / f"batch-{row.batch:08d}.safetensors"
                    BadBatch(row, what, target, self.config, token_ids_seen).save(file)
            if self.writes_drafter:
                weights = {name: value.detach().cpu().contiguous() for name, value in self.drafter.state_dict().items()}
                _save(weights, directory / DRAFTER_FILE, {})
        except (OSError, SafetensorError) as error:
            raise DflashError(
                f"the batches of step {figures.step} cannot be saved", cause=f"{directory}: {error}"
            ) from error
        return directory
