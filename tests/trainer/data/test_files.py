from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from remote.protocol.errors import DflashError
from trainer.data.documents import open_dataset
from trainer.data.files import data_files

ROWS = [{"input_ids": [i, i + 1, i + 2], "loss_mask": [0, 1, 1]} for i in range(10)]
TABLE = pa.table({name: [row[name] for row in ROWS] for name in ("input_ids", "loss_mask")})


def save_to_disk(path: Path, table: pa.Table = TABLE, shards: int = 2) -> Path:
    """Write the layout of datasets.save_to_disk (as datasets 5.2 writes it): arrow streams and state.json."""
    path.mkdir(parents=True)
    names = [f"data-{i:05}-of-{shards:05}.arrow" for i in range(shards)]
    per_shard = -(-len(table) // shards)
    for i, name in enumerate(names):
        part = table.slice(i * per_shard, per_shard)
        with pa.OSFile(str(path / name), "wb") as sink, pa.ipc.new_stream(sink, part.schema) as writer:
            writer.write_table(part, max_chunksize=3)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names], "_fingerprint": "f"}))
    (path / "dataset_info.json").write_text("{}")
    return path


def refused(path: Path) -> DflashError:
    with pytest.raises(DflashError) as caught:
        data_files(path)
    assert caught.value.hint
    return caught.value


@pytest.fixture
def reference(tmp_path: Path, write_jsonl) -> str:
    return open_dataset(write_jsonl(tmp_path / "reference.jsonl", ROWS), max_length=9).fingerprint


def test_a_datasets_directory_is_read_in_the_order_of_its_state(tmp_path: Path, reference: str) -> None:
    assert open_dataset(save_to_disk(tmp_path / "set"), max_length=9).fingerprint == reference


def test_of_a_dictionary_of_splits_train_is_read(tmp_path: Path, reference: str) -> None:
    save_to_disk(tmp_path / "set" / "train")
    save_to_disk(tmp_path / "set" / "test", TABLE.slice(0, 1), 1)
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    assert open_dataset(tmp_path / "set", max_length=9).fingerprint == reference


def test_a_single_split_needs_no_name(tmp_path: Path, reference: str) -> None:
    save_to_disk(tmp_path / "set" / "all")
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["all"]}')
    assert open_dataset(tmp_path / "set", max_length=9).fingerprint == reference


def test_several_splits_without_train_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    assert "a, b" in refused(tmp_path).cause


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = save_to_disk(tmp_path / "set")
    (path / "data-00001-of-00002.arrow").unlink()
    assert "data-00001-of-00002.arrow" in refused(path).cause


def test_indices_of_old_versions_are_refused(tmp_path: Path) -> None:
    path = save_to_disk(tmp_path / "set")
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "i.arrow"}]}))
    assert "flatten_indices" in refused(path).hint


def test_a_torn_state_is_named(tmp_path: Path) -> None:
    path = save_to_disk(tmp_path / "set")
    (path / "state.json").write_text('{"_data')
    assert "state.json is no valid JSON" in refused(path).error


@pytest.mark.parametrize("names", [["b.jsonl", "a.jsonl"], ["b.jsonl.gz", "a.jsonl"]])
def test_a_directory_of_files_is_read_in_the_order_of_names(
    tmp_path: Path, write_jsonl, reference: str, names: list[str]
) -> None:
    second, first = names
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / second, ROWS[5:])
    write_jsonl(folder / first, ROWS[:5])
    (folder / "dataset.json").write_text("{}")
    assert open_dataset(folder, max_length=9).fingerprint == reference


def test_two_forms_in_one_directory_are_refused(tmp_path: Path, write_jsonl) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    pq.write_table(TABLE, tmp_path / "a.parquet")
    assert "jsonl and parquet" in refused(tmp_path).cause


def test_nothing_there(tmp_path: Path) -> None:
    assert "no data at" in refused(tmp_path / "none").error


def test_nothing_known_there(tmp_path: Path) -> None:
    assert "it holds nothing" in refused(tmp_path).cause
    (tmp_path / "notes.txt").write_text("x")
    assert "notes.txt" in refused(tmp_path).cause
    assert ".txt" in refused(tmp_path / "notes.txt").cause
