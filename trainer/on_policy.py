"""How much of a data set is the target's own output: the share of labels that equal the target's most likely token.

Acceptance collapses where this is low: the drafter learns text that the target would not write.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.documents import Dataset
from trainer.data.progress import Progress
from trainer.target.decode import Decoder

# 1,024 rows of 248,320 logits are 1 GB in float32.
_ROWS = 1024


@dataclass(frozen=True)
class OnPolicy:
    """Counts over a sample of documents; a label is a token with loss_mask 1 that has a token before it."""

    documents: int
    labels: int
    agreeing: int

    @property
    def share(self) -> float:
        """Share of labels that the target would have written itself."""
        return self.agreeing / max(1, self.labels)


@torch.inference_mode()
def on_policy_rate(decoder: Decoder, dataset: Dataset, documents: int, seed: int) -> OnPolicy:
    """Measure a sample of at most `documents` documents, drawn by `seed`; one document a forward."""
    drawn = np.random.default_rng(seed).permutation(len(dataset))[:documents]
    labels = agreeing = 0
    with Progress("the target's own choice", len(drawn)) as progress:
        for index in sorted(drawn.tolist()):
            document = dataset.document(index)
            hidden, _ = decoder.batch(1).append([document.input_ids.tolist()])
            positions = torch.from_numpy(np.flatnonzero(document.loss_mask[1:]) + 1)
            wanted = torch.from_numpy(document.input_ids.astype(np.int64))[positions]
            # The state BEFORE a label predicts it.
            for rows, own in zip(hidden[0, positions - 1].split(_ROWS), wanted.split(_ROWS), strict=True):
                agreeing += int((decoder.logits(rows).argmax(dim=-1).cpu() == own).sum())
            labels += len(positions)
            progress.add(1, len(document.input_ids))
    return OnPolicy(len(drawn), labels, agreeing)
