"""The checksum of a slot: the design's formula, from what was packed and from what was captured, and what each of them sees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.pipeline.checksum import captured_checksum, checksum
from trainer.pipeline.packed import PackBuffer

CPU = torch.device("cpu")
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
floats = st.lists(st.floats(width=32, allow_nan=True), min_size=2, max_size=60)


def reference(states: torch.Tensor) -> int:
    raw = states.contiguous().view(torch.uint8).flatten().tolist()
    raw += [0] * (-len(raw) % 4)
    words = [int.from_bytes(bytes(raw[at : at + 4]), "little") for at in range(0, len(raw), 4)]
    return sum(word * (2 * place + 1) for place, word in enumerate(words)) % 2**64


@given(floats, dtypes)
def test_the_checksum_is_the_designs_formula(values: list[float], dtype: torch.dtype) -> None:
    states = torch.tensor(values, dtype=torch.float32).to(dtype)
    assert int(checksum(states)) % 2**64 == reference(states)


def test_the_checksum_does_not_depend_on_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(100, 7, dtype=torch.float64)
    whole = int(checksum(states))
    monkeypatch.setattr("trainer.pipeline.checksum._CHUNK", 13)
    assert int(checksum(states)) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("damage", ["swapped", "shifted", "torn", "repeated", "zeroed", "one bit"])
def test_the_checksum_sees_what_a_wrong_copy_does(damage: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    right = torch.randn(64, 8).to(dtype)
    wrong = right.clone()
    if damage == "swapped":
        wrong[[3, 40]] = wrong[[40, 3]]
    elif damage == "shifted":
        wrong = wrong.roll(1, 0)
    elif damage == "torn":  # The second half still holds the batch before.
        wrong[32:] = torch.randn(32, 8).to(dtype)
    elif damage == "repeated":
        wrong[10] = wrong[11]
    elif damage == "zeroed":
        wrong[63] = 0
    else:
        wrong.view(torch.uint8)[63, 1] ^= 1
    assert int(checksum(wrong)) != int(checksum(right))


# ---- the same number without packing


def captured(layers: int, lengths: list[int], hidden: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths) + 2, hidden)
    return [torch.randn(shape, generator=draw).to(dtype) for _ in range(layers)]


def packed(outputs: list[torch.Tensor], lengths: list[int], tokens: int, *, split: bool) -> torch.Tensor:
    shape = (tokens + 3, len(outputs), outputs[0].shape[-1])
    buffer = PackBuffer.allocate(*shape, split=split, dtype=outputs[0].dtype, device=CPU)
    buffer.storage.fill_(3.0)
    return buffer.pack(outputs, lengths, tokens)


@settings(max_examples=150)
@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(0, 5),
    dtypes,
    st.booleans(),
    st.integers(1, 40),
)
def test_what_was_captured_tells_the_checksum_of_what_must_be_packed(
    layers: int, lengths: list[int], hidden: int, padding: int, dtype: torch.dtype, split: bool, chunk: int
) -> None:
    outputs, tokens = captured(layers, lengths, hidden, dtype), sum(lengths) + padding
    right = reference(packed(outputs, lengths, tokens, split=split))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.pipeline.checksum._CHUNK", chunk)
        assert int(captured_checksum(outputs, lengths, tokens, split=split)) % 2**64 == right


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_that_lie_apart_in_memory_are_no_other(dtype: torch.dtype, split: bool) -> None:
    lengths = [4, 7, 2]
    outputs = captured(3, lengths, 5, dtype)
    apart = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in outputs]
    assert not apart[0].is_contiguous()
    sums = {int(captured_checksum(each, lengths, 16, split=split)) for each in (outputs, apart)}
    assert sums == {int(checksum(packed(outputs, lengths, 16, split=split)))}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("hidden", [4, 5])
@pytest.mark.parametrize("damage", ["row shifted", "too early", "layers swapped", "not zeroed", "document late"])
def test_a_pack_that_went_wrong_is_caught(damage: str, hidden: int, split: bool) -> None:
    lengths, tokens = [4, 7, 2], 16
    outputs = captured(3, lengths, hidden, torch.bfloat16)
    right = int(captured_checksum(outputs, lengths, tokens, split=split))
    states = packed(outputs, lengths, tokens, split=split)
    if damage == "row shifted":
        one = states[1] if split else states[:, hidden : 2 * hidden]
        one[5] = one[4].clone()
    elif damage == "too early":  # The outputs of the batch before.
        states = packed(captured(3, lengths, hidden, torch.bfloat16, seed=1), lengths, tokens, split=split)
    elif damage == "layers swapped":
        states = packed([outputs[1], outputs[0], outputs[2]], lengths, tokens, split=split)
    elif damage == "not zeroed":
        states[..., -1, :] = 3.0
    else:
        states = packed(outputs, [5, 6, 2], tokens, split=split)
    # A sum over what was packed would have agreed with it.
    assert int(checksum(states)) != right


def test_padding_of_the_target_does_not_count() -> None:
    lengths = [3, 5]
    outputs = captured(2, lengths, 4, torch.float32)
    other = [each.clone() for each in outputs]
    for each in other:
        each[0, 3:] = float("inf")
        each[1, 5:] = float("nan")
    assert len({int(captured_checksum(each, lengths, 8, split=False)) for each in (outputs, other)}) == 1
