"""The line of doctor about the target's directory: what its files say, without loading a weight or importing the trainer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from remote.agent.finding import FAILED, OK, WARNING, Finding, gib
from remote.protocol.codec import loads_object

SUPPORTED = (
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
)
"""Architectures that the trainer captures layers of; a test holds this to trainer/target/facts.py."""

SHARED_MEMORY = "/dev/shm"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_INDEX = "model.safetensors.index.json"
_COPY_AGAIN = "copy the model again"
_JSON_LIMIT, _HEADER_LIMIT = 64 << 20, 100_000_000


class _Unusable(Exception):
    """What is wrong with the directory, and the way out."""

    def __init__(self, text: str, hint: str = _COPY_AGAIN) -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint


def model_finding(text: str, room: int, loader: str) -> Finding:
    """Return the line about the directory `text`; its weights have to fit into `room` bytes (0: unknown) of `loader`.

    May raise OSError where the directory cannot be looked at.
    """
    if not text:
        return Finding("model", FAILED, "target_model is not set", "name it with --target-model")
    directory = Path(text)
    try:
        said = _described(directory)
        weights = _weights(directory)
    except _Unusable as problem:
        return Finding("model", FAILED, problem.text, problem.hint)
    place = f"{directory}: {said}, {gib(weights)}"
    if _in_shared_memory(directory):
        place += ", gone after a container restart"
    if room and weights > room:
        hint = "choose a smaller target, or devices with more memory"
        return Finding("model", WARNING, f"{place}; {loader} has {gib(room)} free", hint)
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        # Training reads token ids; chat templates, evaluation and serving need the tokenizer.
        return Finding(
            "model", WARNING, f"{place}; no tokenizer beside it", "copy tokenizer.json and its config as well"
        )
    return Finding("model", OK, place)


def _in_shared_memory(directory: Path) -> bool:
    return directory.is_absolute() and directory.parts[:3] == Path(SHARED_MEMORY).parts


def _described(directory: Path) -> str:
    """Return the kind of model that config.json describes."""
    if not directory.is_dir():
        raise _Unusable(f"no model directory at {directory}", _missing_hint(directory))
    path = directory / "config.json"
    if not path.is_file():
        raise _Unusable(f"{directory} has no config.json")
    config = _object(path)
    names = config.get("architectures")
    first = cast("list[Any]", names)[0] if isinstance(names, list) and names else None
    if first not in SUPPORTED:
        named = repr(first)[:80] if first is not None else "no architecture"
        raise _Unusable(f"{path} names {named}, which cannot be a target", f"supported: {', '.join(SUPPORTED)}")
    kind = config.get("model_type")
    return kind[:80] if isinstance(kind, str) else str(first)


def _missing_hint(directory: Path) -> str:
    if _in_shared_memory(directory):
        return "a container start empties /dev/shm: copy the model there again"
    if directory.parts[-3:] == ("build", "demo", "target"):
        return "`make demo` makes the demo's target; or name yours with --target-model"
    return "copy the model there, or name its directory with --target-model"


def _object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _JSON_LIMIT:
            raise ValueError("it is larger than 64 MiB")
        return loads_object(path.read_bytes())
    except OSError as problem:
        raise _Unusable(
            f"{path} cannot be read: {problem.strerror}", "the user who trains must be able to"
        ) from problem
    except ValueError as problem:
        raise _Unusable(f"{path} is no JSON object: {str(problem)[:120]}") from problem


def _weights(directory: Path) -> int:
    """Return the bytes of all weight files, after comparing each with what its header promises."""
    files = _weight_files(directory)
    if not files:
        raise _Unusable(f"{directory} has no *.safetensors", "other weight formats are not read")
    if missing := [name for name in files if not (directory / name).is_file()]:
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise _Unusable(f"{len(missing)} of {len(files)} weight files of {directory} are missing: {some}")
    total = 0
    for name in files:
        total += _complete(directory / name)
    return total


def _weight_files(directory: Path) -> Sequence[str]:
    index = directory / _INDEX
    if not index.is_file():
        return sorted(path.name for path in directory.glob("*.safetensors"))
    mapping = _object(index).get("weight_map")
    names = list(cast("dict[str, Any]", mapping).values()) if isinstance(mapping, dict) else list[Any]()
    # Plain names alone: a path in there would lead out of the directory.
    if not names or not all(isinstance(name, str) and "/" not in name and "\0" not in name for name in names):
        raise _Unusable(f"{index} has no usable weight_map")
    return sorted(set(names))


def _complete(file: Path) -> int:
    """Return the file's size. The header is `u64 length, JSON {name: {data_offsets: [begin, end]}}`."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _HEADER_LIMIT + 1
        header = stream.read(length) if length <= _HEADER_LIMIT else b""
    try:
        end = 8 + length + max((_end(entry) for entry in loads_object(header).values()), default=0)
    except ValueError as problem:
        raise _Unusable(f"the header of {file} is damaged or cut off") from problem
    # A copy that was cut off has a whole header; it would fail only minutes into loading.
    if size < end:
        raise _Unusable(f"{file} is cut off: {size:,} of {end:,} bytes")
    return size


def _end(entry: Any) -> int:
    """Return the byte behind a tensor, counted from the end of the header; __metadata__ has none."""
    offsets = cast("dict[str, Any]", entry).get("data_offsets", [0, 0]) if isinstance(entry, dict) else None
    numbers = cast("list[Any]", offsets) if isinstance(offsets, list) else []
    if len(numbers) != 2 or not isinstance(numbers[1], int):
        raise ValueError("no data_offsets")
    return numbers[1]
