"""The two ends of the target that a drafter borrows: its embedding and its head, read without the layers between."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.target.facts import target_facts
from trainer.target.weights import read_tensors


def load_ends(
    path: Path | str, dtype: torch.dtype, device: torch.device | str, *, embed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (embed_weight, head_weight), f[V, H] each; one and the same tensor where the target ties them.

    `embed`: the embedding, where this process has loaded it already; 2.5 GB for the 27B target.

    Raises:
        DflashError: see `target_facts` (code 7).
    """
    facts = target_facts(path)
    ends = {} if embed is None else {facts.embedding_name: embed}
    names = {facts.embedding_name, facts.head_name} - ends.keys()
    ends |= read_tensors(facts.tensors, names, dtype=dtype, device=torch.device(device))
    return ends[facts.embedding_name], ends[facts.head_name]
