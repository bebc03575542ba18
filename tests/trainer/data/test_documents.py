from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote.protocol.errors import DflashError, ExitCode
from trainer.data import scan
from trainer.data.documents import Dataset, open_dataset

ROW = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}
FORMS: list[dict[str, Any]] = [
    {"loss_mask": [0, 0, 1, 1]},
    {"loss_mask": [False, False, True, True]},
    {"labels": [-100, -100, 7, 8]},
    {"completion_mask": [0, 0, 1, 1]},
    {"prompt_len": 2},
]


def rejected(path: Path, **settings: Any) -> DflashError:
    with pytest.raises(DflashError) as caught:
        open_dataset(path, **({"max_length": 99, "vocab_size": 100} | settings))
    assert caught.value.code == ExitCode.PREFLIGHT
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_supervision_gives_the_same_document(tmp_path: Path, write_jsonl, form: dict[str, Any]) -> None:
    dataset = open_dataset(write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7, 8]} | form]), max_length=99)
    document = dataset.document(0)
    assert document.input_ids.dtype == np.int32
    assert document.loss_mask.dtype == np.uint8
    assert document.input_ids.tolist() == [5, 6, 7, 8]
    assert document.loss_mask.tolist() == [0, 0, 1, 1]
    assert (dataset.lengths.tolist(), dataset.supervised.tolist(), dataset.candidates.tolist()) == ([4], [2], [1])


def test_the_fingerprint_is_of_the_content_not_of_its_form(tmp_path: Path, write_jsonl) -> None:
    prints = {
        open_dataset(
            write_jsonl(tmp_path / f"{i}.jsonl", [{"input_ids": [5, 6, 7, 8]} | form]), max_length=99
        ).fingerprint
        for i, form in enumerate(FORMS)
    }
    assert len(prints) == 1


@pytest.mark.parametrize(
    "rows",
    [
        [ROW | {"input_ids": [5, 6, 7, 9]}],
        [ROW | {"loss_mask": [1, 1, 1, 1]}],
        [ROW, ROW],
        [ROW | {"input_ids": [5, 7, 6, 8]}],
    ],
)
def test_other_content_has_another_fingerprint(tmp_path: Path, write_jsonl, rows: list[Any]) -> None:
    first = open_dataset(write_jsonl(tmp_path / "a.jsonl", [ROW]), max_length=99)
    assert open_dataset(write_jsonl(tmp_path / "b.jsonl", rows), max_length=99).fingerprint != first.fingerprint


def test_the_fingerprint_of_a_set_is_pinned(tmp_path: Path, write_jsonl) -> None:
    """Checkpoints store it: a later version that computes another one could not resume them."""
    dataset = open_dataset(write_jsonl(tmp_path / "a.jsonl", [ROW, ROW | {"input_ids": [1, 2, 3, 4]}]), max_length=99)
    assert dataset.fingerprint.startswith("4d8688db903869c8")


def test_long_documents_are_cut_and_counted(tmp_path: Path, write_jsonl) -> None:
    dataset = open_dataset(write_jsonl(tmp_path / "a.jsonl", [ROW, ROW | {"input_ids": [1, 2, 3, 4]}]), max_length=3)
    assert dataset.lengths.tolist() == [3, 3]
    assert dataset.candidates.tolist() == [1, 1]
    assert dataset.document(1).input_ids.tolist() == [1, 2, 3]
    assert dataset.counts.truncated == 2


def test_documents_without_candidates_are_dropped_and_counted(tmp_path: Path, write_jsonl) -> None:
    lonely = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0]}
    empty: dict[str, list[int]] = {"input_ids": [], "loss_mask": []}
    dataset = open_dataset(
        write_jsonl(tmp_path / "a.jsonl", [lonely, ROW, empty, {"input_ids": [1], "loss_mask": [1]}]), max_length=99
    )
    assert len(dataset) == 1
    assert dataset.document(0).input_ids.tolist() == [5, 6, 7, 8]
    assert (dataset.counts.read, dataset.counts.kept, dataset.counts.without_candidates) == (4, 1, 3)


@pytest.mark.parametrize("index", [-1, 1])
def test_there_is_no_document_outside_the_set(tmp_path: Path, write_jsonl, index: int) -> None:
    dataset = open_dataset(write_jsonl(tmp_path / "a.jsonl", [ROW]), max_length=99)
    with pytest.raises(IndexError):
        dataset.document(index)


def test_token_ids_seen_are_those_of_what_is_trained(tmp_path: Path, write_jsonl) -> None:
    rows = [ROW, {"input_ids": [90, 91], "loss_mask": [0, 0]}, {"input_ids": [7, 2, 50], "loss_mask": [1, 1, 1]}]
    dataset = open_dataset(write_jsonl(tmp_path / "a.jsonl", rows), max_length=3)
    assert dataset.token_ids_seen().tolist() == [2, 5, 6, 7, 50]
    assert dataset.token_ids_seen().dtype == np.int64


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=9), min_size=1),
    st.integers(3, 9),
)
def test_token_ids_seen_are_those_of_all_documents_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[tuple[int, bool]]], longest: int
) -> None:
    path = tmp_path_factory.mktemp("seen") / "a.jsonl"
    rows = [{"input_ids": [t for t, _ in d], "loss_mask": [int(on) for _, on in d]} for d in documents]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, ROW]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "_PIECE_TOKENS", 10)
        dataset = open_dataset(path, max_length=longest)
        wanted = {t for i in range(len(dataset)) for t in dataset.document(i).input_ids.tolist()}
        assert dataset.token_ids_seen().tolist() == sorted(wanted)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=9), min_size=1),
    st.integers(3, 9),
    st.sampled_from(["loss_mask", "labels", "prompt_len"]),
)
def test_labels_are_counted_as_all_documents_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[tuple[int, bool]]], longest: int, form: str
) -> None:
    path = tmp_path_factory.mktemp("labels") / "a.jsonl"
    said = {
        "loss_mask": lambda d: [int(on) for _, on in d],
        "labels": lambda d: [token if on else -100 for token, on in d],
        "prompt_len": lambda d: sum(not on for _, on in d),
    }[form]
    kept = [(5, True)] * 3
    rows = [{"input_ids": [token for token, _ in d], form: said(d)} for d in [*documents, kept]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "_PIECE_TOKENS", 10)
        dataset = open_dataset(path, max_length=longest)
        every = [dataset.document(i) for i in range(len(dataset))]
        for token in range(4):
            wanted = sum(int(((each.input_ids == token) & (each.loss_mask == 1)).sum()) for each in every)
            assert dataset.count_labels(token) == wanted


def test_documents_of_two_sets_are_compared_by_content(tmp_path: Path, write_jsonl) -> None:
    def opened(name: str, ids: list[list[int]]) -> Dataset:
        rows = [{"input_ids": each, "prompt_len": 0} for each in ids]
        return open_dataset(write_jsonl(tmp_path / name, rows), max_length=4)

    train = opened("a.jsonl", [[1, 2, 3], [4, 5, 6, 7, 8], [1, 2, 3], [9, 9]])
    # In any order; the same up to the maximum length is the same; one that stands twice counts twice.
    assert train.common(opened("b.jsonl", [[4, 5, 6, 7], [3, 2, 1], [1, 2, 3], [1, 2, 3], [1, 2]])) == 3
    assert train.common(opened("c.jsonl", [[2, 1, 3]])) == 0
    assert train.common(train) == 4


def test_a_set_without_supervised_tokens_is_refused_with_counts(tmp_path: Path, write_jsonl) -> None:
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}] * 3
    error = rejected(write_jsonl(tmp_path / "a.jsonl", rows))
    assert "no supervised token" in error.error
    assert "3 documents read, 0 kept" in error.cause


def test_a_set_without_two_supervised_tokens_in_a_row_is_refused(tmp_path: Path, write_jsonl) -> None:
    error = rejected(write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]}]))
    assert "no anchor candidate" in error.error


def test_untokenised_data_are_sent_to_prepare(tmp_path: Path, write_jsonl) -> None:
    error = rejected(write_jsonl(tmp_path / "a.jsonl", [{"messages": [], "id": 3}]))
    assert error.cause == "columns seen: id, messages"
    assert "trainer prepare" in error.hint


@pytest.mark.parametrize("row", [{"input_ids": [1]}, {"loss_mask": [1]}, {"text": "x"}, {}])
def test_missing_columns_are_named(tmp_path: Path, write_jsonl, row: dict[str, Any]) -> None:
    error = rejected(write_jsonl(tmp_path / "a.jsonl", [row]))
    assert "loss_mask, labels, completion_mask, prompt_len" in error.error
    assert error.cause == f"columns seen: {', '.join(row) or 'none'}"


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"input_ids": [1, 2], "loss_mask": [1]}, "input_ids has 2 entries, loss_mask has 1"),
        ({"input_ids": [1, 100], "loss_mask": [1, 1]}, "token id 100 is outside the vocabulary of 100"),
        ({"input_ids": [1, -1], "loss_mask": [1, 1]}, "token id -1 is outside"),
        ({"input_ids": [1.5, 2], "loss_mask": [1, 1]}, "no flat list of integers"),
        ({"input_ids": [[1], [2, 3]], "loss_mask": [1, 1]}, "no flat list of integers"),
        ({"input_ids": [[1], [2]], "loss_mask": [1, 1]}, "no flat list of integers"),
        ({"input_ids": ["a", "b"], "loss_mask": [1, 1]}, "no flat list of integers"),
        ({"input_ids": [1, None], "loss_mask": [1, 1]}, "no flat list of integers"),
        ({"input_ids": [1, 2**40], "loss_mask": [1, 1]}, "beyond 32 bits"),
        ({"input_ids": [1, 2**70], "loss_mask": [1, 1]}, "no flat list of integers"),
        ({"input_ids": "12", "loss_mask": [1, 1]}, "input_ids is str, not a list"),
        ({"input_ids": [1, 2]}, "loss_mask is NoneType, not a list"),
        ("{nonsense", "not valid JSON"),
    ],
)
def test_a_bad_row_is_named_with_file_and_row(tmp_path: Path, write_jsonl, row: Any, cause: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [ROW, row])
    error = rejected(path)
    assert error.error == f"bad row in {path}, row 2"
    assert cause in error.cause


@pytest.mark.parametrize("length", [-1, "3", None, True, 2.0])
def test_a_bad_prompt_length_is_named(tmp_path: Path, write_jsonl, length: Any) -> None:
    error = rejected(write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "prompt_len": length}]))
    assert "prompt_len is" in error.cause


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda i: st.lists(i, max_size=3),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(JSON | st.lists(st.integers(0, 99), max_size=4), JSON | st.lists(st.integers(0, 1), max_size=4))
def test_whatever_a_row_holds_it_is_read_or_refused_for_people(tmp_path: Path, ids: Any, mask: Any) -> None:
    path = tmp_path / "fuzz.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    try:
        dataset = open_dataset(path, max_length=3, vocab_size=100)
    except DflashError as error:
        refusal = error.error
    else:
        refusal = "row 2"
        assert all(len(dataset.document(i).input_ids) == dataset.lengths[i] for i in range(len(dataset)))
    assert "row 2" in refusal


def test_a_file_of_many_chunks_is_one_set(tmp_path: Path, write_jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"input_ids": [i, i + 1, i + 2], "loss_mask": [0, 1, 1]} for i in range(30)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    whole = open_dataset(path, max_length=99)
    monkeypatch.setattr("trainer.data.tokenised_jsonl._CHUNK_TOKENS", 10)
    chunked = open_dataset(path, max_length=99)
    assert chunked.fingerprint == whole.fingerprint
    assert [chunked.document(i).input_ids[0] for i in range(30)] == list(range(30))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 99), st.integers(0, 1)), min_size=1, max_size=9), min_size=1, max_size=9
    ),
    st.integers(2, 9),
)
def test_every_figure_is_that_of_the_documents_it_gives(tmp_path: Path, drawn: Any, max_length: int) -> None:
    """What the schedule is made from (lengths, candidates) is what the target will read."""
    rows = [{"input_ids": [t for t, _ in row], "loss_mask": [on for _, on in row]} for row in drawn]
    path = tmp_path / "figures.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, ROW | {"loss_mask": [1, 1, 1, 1]}]))
    dataset = open_dataset(path, max_length=max_length, vocab_size=100)
    for index in range(len(dataset)):
        document = dataset.document(index)
        mask = document.loss_mask
        assert len(document.input_ids) == len(mask) == dataset.lengths[index] <= max_length
        assert mask.sum() == dataset.supervised[index]
        assert (mask[:-1] & mask[1:]).sum() == dataset.candidates[index] >= 1
    assert dataset.counts.read == len(rows) + 1
    assert dataset.counts.kept + dataset.counts.without_candidates == dataset.counts.read


def test_counts_are_said_in_words(tmp_path: Path, write_jsonl) -> None:
    dataset = open_dataset(write_jsonl(tmp_path / "a.jsonl", [ROW, ROW | {"loss_mask": [0, 1, 0, 0]}]), max_length=3)
    assert str(dataset.counts) == (
        "2 documents read, 1 kept, 1 dropped without two supervised tokens in a row, 2 cut to the maximum length, "
        "3 supervised tokens"
    )


def test_a_prompt_length_beyond_32_bits_is_named(tmp_path: Path, write_jsonl) -> None:
    error = rejected(write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "prompt_len": 2**70}]))
    assert "prompt_len lies beyond 32 bits" in error.cause
