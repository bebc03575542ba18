"""What travels: the bytes of every slot are the same in both modes (rule 9), and are what the target's layers put out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from races.in_process import Slots, slots_of_a_run

FORMS: dict[str, dict[str, Any]] = {
    "packed, bfloat16": {"dtype": "bfloat16"},
    "split, float64": {"split_fc": "on"},
    "split with the teacher's layer, float32": {"split_fc": "on", "dtype": "float32", "kl_weight": 0.5},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_slot_holds_the_same_bytes_in_both_modes(
    tiny_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    values = tiny_values | FORMS[form]

    def slots(mode: str) -> Slots:
        return slots_of_a_run(values | {"transfer": mode}, tmp_path, monkeypatch)

    asynchronous = slots("async")
    assert slots("sync") == asynchronous
    assert sorted(asynchronous) == list(range(16))
    # All different, or the comparison says nothing.
    assert len({states for states, *_ in asynchronous.values()}) == 16
