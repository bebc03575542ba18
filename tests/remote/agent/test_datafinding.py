"""Data and space as doctor tells them: what is there, and what the trainer's own preflight says of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote.agent import datafinding
from remote.agent.datafinding import (
    Verdict,
    data_files,
    data_finding,
    first_columns,
    other_findings,
    space_finding,
)
from remote.agent.preflight import NO_VERDICT
from remote.protocol.errors import preflight_error, together, usage_error

GIB = 1 << 30
ROW = json.dumps({"input_ids": [1, 2], "loss_mask": [0, 1]})
FOUND = Verdict(found={"documents": 4417, "tokens": 842359, "steps": 560, "drafter_parameters": 1_730_213_120})
NOT_DEPLOYED = Verdict(not_read="nothing is deployed there", hint="run `dflashctl deploy` first")


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "b.jsonl").write_text(ROW + "\n")
    (folder / "a.jsonl").write_text(ROW + "\n")
    (folder / "README.md").write_text("x")
    return folder


def failed(cause: str, error: str = "it is wrong") -> Verdict:
    return Verdict.of(preflight_error(error, cause=cause, hint="mend it"))


def test_what_the_preflight_counted(data):
    found = data_finding(str(data), FOUND)
    assert (found.state, found.hint) == ("ok", "")
    assert found.text == (
        f"{data}: 2 files, 0 MiB, columns input_ids, loss_mask; 4,417 documents, 842,359 tokens, 560 steps"
    )


def test_a_file_is_named_once(data):
    assert data_finding(str(data / "a.jsonl"), FOUND).text.startswith(f"{data}/a.jsonl: 0 MiB, columns")


def test_not_set_and_not_there(tmp_path):
    assert (data_finding("", FOUND).state, "--data-dir" in data_finding("", FOUND).hint) == ("failed", True)
    gone = data_finding(str(tmp_path / "none"), FOUND)
    assert (gone.state, gone.code, gone.text) == ("failed", 7, f"no data at {tmp_path}/none")


def test_an_error_about_the_data_stands_in_its_line(data):
    verdict = failed(f"columns seen in {data}/a.jsonl: text")
    found = data_finding(str(data), verdict)
    assert (found.state, found.hint) == ("failed", "mend it")
    assert found.text == f"it is wrong: columns seen in {data}/a.jsonl: text"
    assert other_findings(verdict, [str(data)]) == []


def test_an_error_about_something_else_has_a_line_of_its_own(data):
    verdict = failed("mask_token_id 99 is outside the vocabulary")
    assert (data_finding(str(data), verdict).state, "read whole" in data_finding(str(data), verdict).text) == (
        "ok",
        True,
    )
    (other,) = other_findings(verdict, [str(data)])
    assert (other.name, other.state, other.code) == ("preflight", "failed", 7)
    assert other_findings(FOUND, [str(data)]) == []


def test_of_several_problems_each_stands_in_its_own_line(data, tmp_path):
    model = preflight_error("no model directory at /m", cause="nothing is there")
    rows = preflight_error("a bad row", cause=f"{data}/a.jsonl row 7")
    space = preflight_error("no space left for the ring", cause="/dev/shm is full", hint="free it")
    mask = usage_error("mask_token_id is not set")
    verdict = Verdict.of(together([model, rows, space, mask]))
    assert data_finding(str(data), verdict).text == f"a bad row: {data}/a.jsonl row 7"
    assert space_finding(tmp_path, "", GIB, 3, verdict).hint == "free it"
    assert [each.text for each in other_findings(verdict, [str(data), "/m"])] == ["mask_token_id is not set"]
    # A model that our own look found whole, and the trainer did not.
    assert len(other_findings(verdict, [str(data)])) == 2


@pytest.mark.parametrize(
    "error", [usage_error("unknown key 'epoks'"), preflight_error(NO_VERDICT, cause="it ended with code 9")]
)
def test_a_preflight_that_judged_nothing_vouches_for_nothing(data, error):
    found = data_finding(str(data), Verdict.of(error))
    assert (found.state, "not read: the preflight ended before that" in found.text) == ("warning", True)
    assert len(other_findings(Verdict.of(error), [str(data)])) == 1


def test_before_the_first_deploy_it_tells_what_is_there(data):
    found = data_finding(str(data), NOT_DEPLOYED)
    assert (found.state, found.hint) == ("warning", "run `dflashctl deploy` first")
    assert "columns input_ids, loss_mask; not read: nothing is deployed there" in found.text


def test_space_that_lacks_fails_the_line_of_space_alone(data, tmp_path):
    verdict = failed("/dev/shm has 1 MiB free", "no space left for the ring")
    assert data_finding(str(data), verdict).state == "ok"
    assert other_findings(verdict, [str(data)]) == []
    found = space_finding(tmp_path, "", GIB, 3, verdict)
    assert (found.state, "no space left for the ring" in found.text, found.hint) == ("failed", True, "mend it")


def test_space_is_compared_with_checkpoints_as_the_preflight_counts_them(tmp_path):
    found = space_finding(tmp_path, str(tmp_path / "out"), 0, 3, FOUND)
    # Two of three count, and one that is being written: 3 * 12 bytes a parameter.
    assert f"(checkpoints: {36 * 1_730_213_120 / GIB:.1f} GiB)" in found.text
    assert "ring" not in found.text
    assert f"{tmp_path}/out" in found.text


def test_the_sizes_of_a_checkpoint_are_the_trainers(tmp_path, monkeypatch):
    """The figure of this line is the one that the trainer's own check of space compares with."""
    import trainer.preflight as trainer
    from trainer.config import TrainConfig
    from trainer.drafter.config import derive

    text = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 8, "intermediate_size": 64, "vocab_size": 48, "rope_theta": 1e4, "rms_norm_eps": 1e-6}
    drafter = derive(
        text | {"max_position_embeddings": 99}, num_layers=2, block_size=8, mask_token_id=3, num_target_layer_ids=2
    )
    asked = {}
    monkeypatch.setattr(trainer, "_need_space", lambda path, need, what, hint: asked.update({what: need}))
    trainer.check_space(TrainConfig(keep_checkpoints=3), drafter, tmp_path)
    parameters = trainer.parameter_count(drafter)
    assert asked["checkpoints"] == datafinding._CHECKPOINT_BYTES * parameters * 3


def test_a_ring_that_may_not_fit_is_a_warning_unless_the_preflight_said_that_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr(datafinding, "free_space", lambda path: {"total": 8 * GIB, "free": 4 * GIB})
    assert space_finding(tmp_path, "", 6 * GIB, 1, NOT_DEPLOYED).state == "warning"
    assert space_finding(tmp_path, "", 6 * GIB, 1, FOUND).state == "ok"


def test_a_disk_that_is_nearly_full_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(datafinding, "free_space", lambda path: {"total": 8 * GIB, "free": 4 << 20})
    found = space_finding(tmp_path, "/out", 0, 1, FOUND)
    assert (found.state, "4 MiB free" in found.text, str(tmp_path) in found.hint) == ("warning", True, True)


def test_files_of_a_saved_data_set_and_of_its_splits(tmp_path):
    for name in ("train/data-1.arrow", "train/data-0.arrow", "train/state.json", "dataset_dict.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert [path.name for path in data_files(tmp_path)] == ["data-0.arrow", "data-1.arrow"]


def test_an_empty_directory_says_what_it_lacks(tmp_path):
    assert "no file that ends in .jsonl" in data_finding(str(tmp_path), NOT_DEPLOYED).text


def test_columns_come_from_packed_and_plain_rows_and_from_nothing_else(tmp_path):
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"prompt": 1, "a\\u001b[2J": 2}\n'))
    assert first_columns(packed) == ["prompt", "a\\u001b[2J"]
    assert first_columns(tmp_path / "x.parquet") == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60) | st.binary(max_size=40).map(gzip.compress), name=st.sampled_from(["a", "b.gz"]))
def test_any_first_row(tmp_path, content, name):
    path = tmp_path / f"x.jsonl{Path(name).suffix}"
    path.write_bytes(content)
    assert isinstance(first_columns(path), list)
    path.write_bytes(content[: len(content) // 2])
    assert isinstance(first_columns(path), list)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    found=st.dictionaries(
        st.sampled_from(["documents", "tokens", "steps", "drafter_parameters"]),
        st.none() | st.text(max_size=3) | st.integers(0, 10**12) | st.floats() | st.booleans(),
    )
)
def test_whatever_a_preflight_of_another_version_prints(data, tmp_path, found):
    verdict = Verdict(found=found)
    assert data_finding(str(data), verdict).state == "ok"
    assert space_finding(tmp_path, "", 0, 2, verdict).name == "space"
