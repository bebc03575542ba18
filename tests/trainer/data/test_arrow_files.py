from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from remote.protocol.errors import DflashError
from trainer.data.arrow_files import read_arrow, read_parquet
from trainer.data.documents import Dataset, open_dataset

IDS = [[1, 2, 3], [], [4, 5, 6, 7], [8, 9]]
FORMS: list[dict[str, Any]] = [
    {"loss_mask": [[0, 1, 1], [], [0, 0, 1, 1], [1, 1]]},
    {"labels": [[-100, 2, 3], [], [-100, -100, 6, 7], [8, 9]]},
    {"completion_mask": [[False, True, True], [], [False, False, True, True], [True, True]]},
    {"prompt_len": [1, 0, 2, 0]},
]


def write(path: Path, table: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
        return path
    with pa.OSFile(str(path), "wb") as sink:
        new = pa.ipc.new_stream if path.stem.endswith("stream") else pa.ipc.new_file
        with new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


def contents(dataset: Dataset) -> list[tuple[list[int], list[int]]]:
    documents = [dataset.document(i) for i in range(len(dataset))]
    return [(document.input_ids.tolist(), document.loss_mask.tolist()) for document in documents]


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
@pytest.mark.parametrize("ids_type", [pa.list_(pa.int64()), pa.large_list(pa.int32())])
def test_every_file_and_form_gives_the_same_documents(
    tmp_path: Path, name: str, form: dict[str, Any], ids_type: Any
) -> None:
    table = pa.table({"input_ids": pa.array(IDS, ids_type), "text": ["x"] * 4} | form)
    dataset = open_dataset(write(tmp_path / name, table), max_length=3, vocab_size=10)
    assert contents(dataset) == [([1, 2, 3], [0, 1, 1]), ([8, 9], [1, 1])]
    assert dataset.counts.without_candidates == 2


def test_an_arrow_file_is_mapped_and_not_copied(tmp_path: Path) -> None:
    table = pa.table({"input_ids": pa.array([[1, 2, 3]] * 1000, pa.list_(pa.int32())), "prompt_len": [1] * 1000})
    before = pa.total_allocated_bytes()
    chunks = list(read_arrow(write(tmp_path / "stream.arrow", table)))
    assert pa.total_allocated_bytes() - before < 4000, "12,000 bytes of ids would have to show"
    assert all(not chunk.ids.flags.owndata and not chunk.ids.flags.writeable for chunk in chunks)


def test_parquet_is_kept_in_five_bytes_a_token(tmp_path: Path) -> None:
    table = pa.table(
        {
            "input_ids": pa.array([[1, 2, 3]], pa.list_(pa.int64())),
            "loss_mask": pa.array([[0, 1, 1]], pa.list_(pa.int64())),
        }
    )
    (chunk,) = read_parquet(write(tmp_path / "a.parquet", table))
    assert (chunk.ids.dtype, chunk.supervision.dtype) == (np.int32, np.uint8)


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow"])
@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"input_ids": IDS, "loss_mask": [[0, 1, 1], [], [0, 0, 1], [1, 1]]}, "row 3"),
        ({"input_ids": [[1, 2, 3], None, [1], [2]], "loss_mask": [[1, 1, 1], [1], [1], [1]]}, "row 2"),
        ({"input_ids": IDS, "prompt_len": [1, 0, -2, 0]}, "row 3"),
        ({"input_ids": IDS, "prompt_len": [1, 0, None, 0]}, "row 3"),
        ({"input_ids": [[1], [], [2, None], [3]], "prompt_len": [0] * 4}, "row 3"),
        ({"input_ids": [[1.5]] * 4, "prompt_len": [0] * 4}, "wrong type"),
        ({"input_ids": ["ab"] * 4, "prompt_len": [0] * 4}, "wrong type"),
        ({"input_ids": IDS, "text": ["x"] * 4}, "is not tokenised"),
        ({"input_ids": [[1], [2], [3, 10], [4]], "prompt_len": [0] * 4}, "row 3"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, columns: dict[str, Any], said: str) -> None:
    with pytest.raises(DflashError) as caught:
        open_dataset(write(tmp_path / name, pa.table(columns)), max_length=9, vocab_size=10)
    assert said in caught.value.error
    assert str(tmp_path / name) in caught.value.error


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow"])
def test_a_column_that_stands_twice_is_named(tmp_path: Path, name: str) -> None:
    table = pa.table([pa.array(IDS), pa.array(IDS), pa.array([0] * 4)], names=["input_ids", "input_ids", "prompt_len"])
    with pytest.raises(DflashError, match="several columns named input_ids"):
        open_dataset(write(tmp_path / name, table), max_length=9)


def test_an_id_beyond_63_bits_is_named_as_it_stands(tmp_path: Path) -> None:
    ids = pa.array([[1, 2], [3, 2**63 + 5]], pa.list_(pa.uint64()))
    with pytest.raises(DflashError, match="row 2") as caught:
        open_dataset(write(tmp_path / "a.parquet", pa.table({"input_ids": ids, "prompt_len": [0, 0]})), max_length=9)
    assert f"token id {2**63 + 5} is outside" in caught.value.cause


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, pa.table({"input_ids": IDS, "prompt_len": [0] * 4}))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DflashError, match="cannot read"):
        open_dataset(path, max_length=9)


def test_without_pyarrow_the_way_out_is_said_and_jsonl_still_opens(tmp_path: Path, write_jsonl) -> None:
    write(tmp_path / "a.parquet", pa.table({"input_ids": IDS, "prompt_len": [0] * 4}))
    write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "prompt_len": 0}])
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from trainer.data.documents import open_dataset\n"
        "from remote.protocol.errors import DflashError\n"
        f"assert len(open_dataset({str(tmp_path / 'a.jsonl')!r}, max_length=9)) == 1\n"
        "try:\n"
        f"    open_dataset({str(tmp_path / 'a.parquet')!r}, max_length=9)\n"
        "except DflashError as error:\n"
        "    print(error.render())\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "need pyarrow" in said
    assert "pip install pyarrow" in said
