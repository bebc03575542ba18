"""Rule 11: what a forward captured is dropped once it is packed. Never is more of it alive than one forward put out."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from races.in_process import run_both, shared_session

from trainer.pipeline.packed import PackBuffer
from trainer.target.capture import Target


class Watch:
    """Watches the memory behind captured outputs, also where only a view of it is kept."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at_begin: list[int] = []
        self.at_end: list[int] = []
        self.of_one: list[int] = []
        self._watched: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        capture = Target.capture

        def watched(target: Target, input_ids: torch.Tensor) -> list[torch.Tensor]:
            self.at_begin.append(self.live())
            captured = capture(target, input_ids)
            storages = [each.untyped_storage() for each in captured]
            self._watched += [(weakref.ref(each), each.nbytes()) for each in storages]
            self.of_one.append(sum(each.nbytes() for each in storages))
            self.at_end.append(self.live())
            return captured

        patch.setattr(Target, "capture", watched)

    def live(self) -> int:
        self._watched = [(ref, size) for ref, size in self._watched if ref() is not None]
        return sum(size for _, size in self._watched)

    @property
    def bounded(self) -> bool:
        return not any(self.at_begin) and self.at_end == self.of_one


@pytest.mark.parametrize("split", ["off", "on"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_forward_meets_what_the_one_before_captured(
    tiny_values: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, mode: str, split: str
) -> None:
    watch = Watch(monkeypatch)
    # With the teacher's state three layers are captured; its buffers are of another width.
    run_both(tiny_values | {"transfer": mode, "split_fc": split, "kl_weight": 0.5 if split == "on" else 0.0}, tmp_path)
    assert len(watch.of_one) >= 16
    assert watch.bounded, list(zip(watch.at_begin, watch.at_end, watch.of_one, strict=True))


def test_nor_with_shared_roles(tiny_values: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    with shared_session(tiny_values | {"drafter_gpus": [0]}, tmp_path) as session:
        for micro_batch in session.micro_batches(1):
            row = session.receive(micro_batch)
            session.backward(row, last=True)
            session.release(row)
    assert len(watch.of_one) == 3
    assert watch.bounded


KEPT = {
    "the batch": list,
    "one layer": lambda captured: captured[-1],
    "a view of a row": lambda captured: captured[0][0, :1],
}


@pytest.mark.parametrize("what", KEPT)
def test_a_producer_that_keeps_something_of_the_last_batch_is_caught(
    tiny_values: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    watch = Watch(monkeypatch)
    pack = PackBuffer.pack
    kept: list[Any] = []

    def keeping(buffer: PackBuffer, captured: list[torch.Tensor], *rest: Any) -> torch.Tensor:
        kept[:] = [KEPT[what](captured)]
        return pack(buffer, captured, *rest)

    monkeypatch.setattr(PackBuffer, "pack", keeping)
    run_both(tiny_values | {"max_steps": 2}, tmp_path)
    assert not watch.bounded
