"""Random documents are a data set that the trainer reads, and the same one each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.random_documents import main, make_documents
from trainer.data.documents import open_dataset


@given(
    count=st.integers(1, 20),
    shortest=st.integers(8, 30),
    spread=st.integers(0, 40),
    vocabulary=st.integers(2, 300_000),
    seed=st.integers(0, 2**32),
)
def test_the_trainer_reads_what_was_written(tmp_path_factory, count, shortest, spread, vocabulary, seed):
    file = tmp_path_factory.mktemp("data") / "documents.jsonl"
    tokens = make_documents(
        file, count=count, shortest=shortest, longest=shortest + spread, vocabulary=vocabulary, seed=seed
    )
    data = open_dataset(file, max_length=4096, vocab_size=vocabulary)
    assert len(data) == count
    assert int(data.lengths.sum()) == tokens
    assert shortest <= data.lengths.min()
    assert data.lengths.max() <= shortest + spread
    for index in range(count):
        document = data.document(index)
        assert document.loss_mask.sum() == len(document.input_ids) - len(document.input_ids) // 4


def test_the_seed_decides_the_documents(tmp_path):
    values = {"count": 5, "shortest": 10, "longest": 20, "vocabulary": 100}
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        make_documents(tmp_path / name, seed=seed, **values)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "same").read_bytes()
    assert (tmp_path / "one").read_bytes() != (tmp_path / "other").read_bytes()


def test_the_command_line_says_how_much_it_wrote(tmp_path, capsys):
    file = tmp_path / "documents.jsonl"
    assert main([str(file), "--count", "3", "--shortest", "9", "--longest", "9", "--vocabulary", "50"]) == 0
    assert "3 documents, 27 tokens" in capsys.readouterr().out
    assert len(file.read_text().splitlines()) == 3
