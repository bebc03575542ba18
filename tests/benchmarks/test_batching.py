"""The benchmark of batching measures the shape that it names."""

from __future__ import annotations

import pytest

from benchmarks.batching import ANCHORS, BLOCK, main, measure


def test_a_micro_batch_has_the_anchors_of_the_recipe() -> None:
    found = measure(documents=12, rows=4)
    # Documents are long beside the budget of anchors; only a row of one short document does not fill it.
    assert 0.75 * ANCHORS * BLOCK < found.block_rows <= ANCHORS * BLOCK
    assert 6 <= found.rows <= 12
    assert min(found.opening, found.packing, found.reading, found.blocks) >= 0
    assert 0 <= found.padding < 0.2
    assert 0 <= found.block_padding < 0.25


def test_it_says_the_share_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--documents", "6", "--rows", "2", "--step", "0.5"]) == 0
    said = capsys.readouterr().out
    assert said.count("of a step of 0.5 s") == 2
    assert "padding of the target" in said
    assert "more are padding to a bucket" in said
