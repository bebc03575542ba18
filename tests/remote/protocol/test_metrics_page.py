"""docs/metrics.md is what the declarations say."""

from pathlib import Path

from remote.protocol.events import KINDS
from remote.protocol.metrics_page import page

TREE = Path(__file__).resolve().parents[3]


def test_the_page_is_current() -> None:
    assert (TREE / "docs" / "metrics.md").read_text(encoding="utf-8") == page()


def test_every_kind_and_field_is_explained() -> None:
    text = page()
    for kind in KINDS:
        assert f"## {kind}\n" in text
    assert "| loss | nats | yes |" in text
