"""From the schedule's micro-batch to the target's input and the host side of the packed row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.documents import Dataset
from trainer.data.rows import padded_width
from trainer.data.schedule import MicroBatch
from trainer.pipeline.packed import RowTokens


@dataclass(frozen=True)
class ReadRow:
    """One micro-batch as read: the target's right-padded input i64[k, width], the documents' lengths, the packed tokens."""

    padded: torch.Tensor
    lengths: list[int]
    row: RowTokens


def packed_length(tokens: int, bucket_tokens: int) -> int:
    """Return the positions of a packed row: its tokens rounded up to the bucket, so that few shapes exist."""
    return -(-tokens // bucket_tokens) * bucket_tokens


class RowReader:
    """Reads documents and packs their tokens; states follow from the target."""

    def __init__(self, dataset: Dataset, bucket_tokens: int, *, pad_token: int = 0) -> None:
        self._dataset = dataset
        self._bucket = bucket_tokens
        self._pad_token = pad_token

    def read(self, micro_batch: MicroBatch) -> ReadRow:
        """Return the micro-batch's documents, packed one after another and padded to the bucket."""
        documents = [self._dataset.document(index) for index in micro_batch.row.documents]
        lengths = [len(document.input_ids) for document in documents]
        width = padded_width(max(lengths), self._bucket)
        padded = np.full((len(documents), width), self._pad_token, dtype=np.int64)
        total = packed_length(sum(lengths), self._bucket)
        input_ids = np.full(total, self._pad_token, dtype=np.int32)
        loss_mask = np.zeros(total, dtype=np.uint8)
        document_ids = np.full(total, -1, dtype=np.int64)
        position_ids = np.zeros(total, dtype=np.int32)
        offset = 0
        for place, (index, document) in enumerate(zip(micro_batch.row.documents, documents, strict=True)):
            length = lengths[place]
            span = slice(offset, offset + length)
            padded[place, :length] = document.input_ids
            input_ids[span] = document.input_ids
            loss_mask[span] = document.loss_mask
            document_ids[span] = index
            position_ids[span] = np.arange(length)
            offset += length
        row = RowTokens(
            batch=micro_batch.b,
            step=micro_batch.step,
            epoch=micro_batch.epoch,
            input_ids=torch.from_numpy(input_ids),
            loss_mask=torch.from_numpy(loss_mask),
            document_ids=torch.from_numpy(document_ids),
            position_ids=torch.from_numpy(position_ids),
            tokens=offset,
        )
        return ReadRow(torch.from_numpy(padded), lengths, row)
