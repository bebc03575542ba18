"""How much is taken of each file, and that a batch of lines is bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote.protocol.errors import DflashError, ExitCode
from trainer.data import sources
from trainer.data.sources import Source, copies, hash_share, line_batches, mixed, parse_source


def test_a_source_is_a_file_and_a_weight() -> None:
    assert parse_source("a.jsonl=3") == Source(Path("a.jsonl"), 3.0)
    assert parse_source("dir=x/a.jsonl=0.5") == Source(Path("dir=x/a.jsonl"), 0.5)


@pytest.mark.parametrize("text", ["a.jsonl", "a.jsonl=", "=3", "a.jsonl=0", "a.jsonl=-1", "a.jsonl=inf", "a=nan"])
def test_anything_else_is_a_usage_error(text: str) -> None:
    with pytest.raises(DflashError) as caught:
        parse_source(text)
    assert caught.value.code == ExitCode.USAGE


@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0.01, 100)), min_size=1, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
def test_proportions_are_those_of_the_weights_and_one_source_is_taken_as_it_is(
    tmp_path: Path, parts: list[tuple[int, float]]
) -> None:
    given_sources = []
    for index, (rows, weight) in enumerate(parts):
        path = tmp_path / f"{index}.jsonl"
        path.write_text("{}\n\n" * rows)
        given_sources.append(Source(path, weight))
    for mixing, extreme in (("shrink", max), ("repeat", min)):
        found = mixed(given_sources, mixing)  # type: ignore[arg-type]
        taken = [source.times * rows / weight for source, (rows, weight) in zip(found, parts, strict=True)]
        assert taken == pytest.approx([taken[0]] * len(taken))
        assert extreme(source.times for source in found) == pytest.approx(1)


def test_a_source_without_rows_has_no_proportion(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DflashError, match="has no rows"):
        mixed([Source(tmp_path / "a.jsonl")], "shrink")


def test_copies_are_the_times_on_average_and_the_same_each_time() -> None:
    keys = [str(i) for i in range(4000)]
    for times in (0.0, 0.3, 1.0, 2.75):
        found = [copies(key, times) for key in keys]
        assert set(found) <= {int(times), int(times) + 1}
        assert sum(found) / len(found) == pytest.approx(times, abs=0.03)
        assert found == [copies(key, times) for key in keys]


def test_a_larger_share_takes_what_a_smaller_one_took() -> None:
    taken = [{key for key in map(str, range(500)) if copies(key, times)} for times in (0.2, 0.4)]
    assert taken[0] < taken[1]


def test_the_hash_is_pinned_and_in_range() -> None:
    """A split that is made again by a later version has to be the same."""
    assert hash_share("held-out:c6318caad8681765") == pytest.approx(0.5039170934506529)
    assert all(0 <= hash_share(str(i)) < 1 for i in range(1000))


@given(st.lists(st.integers(0, 90), max_size=40), st.integers(1, 100), st.integers(1, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_batches_hold_every_line_once_and_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], most_bytes: int, most_rows: int
) -> None:
    monkeypatch.setattr(sources, "_BATCH_BYTES", most_bytes)
    monkeypatch.setattr(sources, "_BATCH_ROWS", most_rows)
    files = []
    for name, part in (("a.jsonl", sizes[::2]), ("b.jsonl", sizes[1::2])):
        (tmp_path / name).write_text("".join("x" * size + "\n" for size in part))
        files.append(Source(tmp_path / name))
    batches = list(line_batches(files))
    for index, part in enumerate((sizes[::2], sizes[1::2])):
        own = [line for batch in batches if batch.source == index for line in batch.lines]
        assert own == [(n, b"x" * size + b"\n") for n, size in enumerate(part, start=1) if size]
    for batch in batches:
        assert 1 <= len(batch.lines) <= most_rows
        assert len(batch.lines) == 1 or sum(len(line) for _, line in batch.lines) <= most_bytes


@pytest.mark.parametrize("weights", [(1e-308, 1.0), (1e300, 1.0), (1.0, 3e6)])
@pytest.mark.parametrize("mixing", ["shrink", "repeat"])
def test_weights_that_lie_too_far_apart_are_a_usage_error(
    tmp_path: Path, weights: tuple[float, float], mixing: sources.Mixing
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(DflashError, match="too far apart") as caught:
        mixed([Source(tmp_path / name, weight) for name, weight in zip(("a", "b"), weights, strict=True)], mixing)
    assert caught.value.code == ExitCode.USAGE


@pytest.mark.parametrize("weight", [1e-308, 1e308])
def test_the_size_of_all_weights_means_nothing(tmp_path: Path, weight: float) -> None:
    for name, rows in (("a", 4), ("b", 2)):
        (tmp_path / name).write_text("{}\n" * rows)
    found = mixed([Source(tmp_path / "a", weight), Source(tmp_path / "b", weight)], "repeat")
    assert [source.times for source in found] == [1.0, 2.0]
