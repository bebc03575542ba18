"""What a target directory says of itself, without loading a weight and without torch: the preflight's source."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote.protocol.errors import DflashError, preflight_error

# Where `make demo` puts its target; the preset of this machine names it.
_DEMO_TARGET = ("build", "demo", "target")
PLAIN = ("LlamaForCausalLM", "Qwen3ForCausalLM")
HYBRID = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
# Types whose numbers are the weights themselves. Others (F8_E4M3, I8, packed I32) mean nothing without scales beside them.
_PLAIN_TYPES = ("F16", "BF16", "F32", "F64")
# Where the text stack's tensors live: the multimodal wrapper has one level more.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
# A safetensors header is JSON; the format bounds it at 100 MB.
_HEADER_LIMIT = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies (file, and the place and number of its bytes there) and what shape it has."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    bytes: int


@dataclass(frozen=True)
class TargetFacts:
    """A target directory: its text config (a dict) and its tensors' names. `vocab_size` counts embedding rows."""

    path: Path
    architecture: str
    text_config: Mapping[str, Any]
    hidden_size: int
    num_layers: int
    vocab_size: int
    tied: bool
    eos_token_ids: tuple[int, ...]
    prefix: str
    embedding_name: str
    head_name: str
    tensors: Mapping[str, TensorEntry]

    @property
    def hybrid(self) -> bool:
        """Whether some layers are recurrent, so that a KV cache alone cannot be rolled back."""
        return "linear_attention" in (self.text_config.get("layer_types") or ()) or self.architecture in HYBRID


def target_facts(path: Path | str) -> TargetFacts:
    """Read config.json and the safetensors headers of a target directory.

    Raises:
        DflashError: directory, config or weights missing, unreadable, truncated, quantised or of an unsupported
            architecture (code 7).
    """
    directory = Path(path)
    config = read_config(directory)
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in PLAIN + HYBRID:
        raise preflight_error(
            f"{directory} holds a {architecture}, which is not supported as a target",
            cause="the architecture in its config.json decides how layers are captured",
            hint=f"supported: {', '.join(PLAIN + HYBRID)}",
        )
    # A wrapper nests the language model's configuration; a text model is one itself.
    text_config = dict(config.get("text_config") or config)
    tensors = tensor_entries(directory)
    prefix = next((prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in tensors), None)
    if prefix is None:
        raise _unusable(directory, "no tensor named embed_tokens.weight", "the directory must hold the whole model")
    embedding_name = f"{prefix}embed_tokens.weight"
    tied = _tied(config, text_config, has_head="lm_head.weight" in tensors)
    head_name = embedding_name if tied else "lm_head.weight"
    if head_name not in tensors:
        raise _unusable(directory, f"no tensor named {head_name}, and tie_word_embeddings is not set")
    _refuse_quantised(directory, (config, text_config), prefix, head_name, tensors)
    # Rows of the table, not config.vocab_size: a mask token needs an embedding row, and tables are padded upwards.
    vocab_size, hidden_size = tensors[embedding_name].shape
    return TargetFacts(
        path=directory,
        architecture=architecture,
        text_config=text_config | {"vocab_size": vocab_size},
        hidden_size=hidden_size,
        num_layers=int(text_config["num_hidden_layers"]),
        vocab_size=vocab_size,
        tied=tied,
        eos_token_ids=_eos_token_ids(directory, text_config, config),
        prefix=prefix,
        embedding_name=embedding_name,
        head_name=head_name,
        tensors=tensors,
    )


def read_config(directory: Path) -> dict[str, Any]:
    """Return the directory's config.json.

    Raises:
        DflashError: there is no such directory or file, or it is no JSON object (code 7).
    """
    if not directory.is_dir():
        hint = "give the path of a directory with config.json and *.safetensors"
        if directory.parts[-3:] == _DEMO_TARGET:
            hint = "`make demo` makes the demo's target; or name yours with --target-model"
        elif directory.is_relative_to("/dev/shm"):
            # Where the presets keep a large model; it goes with the memory that it lies in.
            hint = "a container start empties /dev/shm: copy the model there again"
        cause = "it is a file" if directory.exists() else "there is nothing at that path on the machine that trains"
        raise preflight_error(f"no model directory at {directory}", cause=cause, hint=hint)
    path = directory / "config.json"
    if not path.is_file():
        raise _unusable(directory, "it has no config.json")
    try:
        config = json.loads(_text(path))
    except ValueError as problem:
        raise _unusable(directory, f"config.json is no JSON: {problem}") from problem
    if not isinstance(config, dict):
        raise _unusable(directory, "config.json holds no object")
    return config


def tensor_entries(directory: Path) -> dict[str, TensorEntry]:
    """Return every tensor of a directory's safetensors files by name, from their headers alone.

    Raises:
        DflashError: there are none, one is truncated or malformed, or the index names a missing file (code 7).
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = {directory / name for name in json.loads(_text(index))["weight_map"].values()}
        except (ValueError, KeyError, AttributeError, TypeError) as problem:
            raise _unusable(directory, f"{index.name} is malformed: {problem}") from problem
    else:
        files = set(directory.glob("*.safetensors"))
    if not files:
        raise _unusable(directory, "it has no *.safetensors", "other weight formats are not read")
    entries: dict[str, TensorEntry] = {}
    for file in sorted(files):
        entries |= read_header(file)
    return entries


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return a safetensors file's tensors by name, after comparing its size with what its header promises.

    The header is `u64 length, JSON {name: {dtype, shape, data_offsets}}`.

    Raises:
        DflashError: the file is missing, unreadable, damaged or cut off (code 7).
    """
    if not file.is_file():
        raise _unusable(file.parent, f"{file.name} is missing", "copy the model again")
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _HEADER_LIMIT + 1
            header = stream.read(length) if length <= _HEADER_LIMIT else b""
    except OSError as problem:
        raise _unreadable(file, problem) from problem
    try:
        described = json.loads(header)
        described.pop("__metadata__", None)
        end = 8 + length + max((each["data_offsets"][1] for each in described.values()), default=0)
        entries = {name: _entry(file, each, 8 + length) for name, each in described.items()}
    except (ValueError, KeyError, AttributeError, TypeError, IndexError) as problem:
        raise _unusable(file.parent, f"the header of {file.name} is damaged or cut off", "copy the model again") from (
            problem
        )
    # A copy that was cut off has a whole header; it would fail only minutes into loading, on one rank.
    if size < end:
        raise _unusable(file.parent, f"{file.name} is cut off: {size} of {end} bytes", "copy the model again")
    return entries


def _entry(file: Path, described: Mapping[str, Any], data: int) -> TensorEntry:
    start, end = described["data_offsets"]
    return TensorEntry(file, tuple(described["shape"]), described["dtype"], data + start, end - start)


def _tied(config: Mapping[str, Any], text_config: Mapping[str, Any], *, has_head: bool) -> bool:
    """Return whether the embedding is the head too. A wrapper says it at two levels; if they differ, the files decide."""
    said = {bool(each["tie_word_embeddings"]) for each in (config, text_config) if "tie_word_embeddings" in each}
    return said.pop() if len(said) == 1 else bool(said) and not has_head


def _refuse_quantised(
    directory: Path,
    configs: Sequence[Mapping[str, Any]],
    prefix: str,
    head_name: str,
    tensors: Mapping[str, TensorEntry],
) -> None:
    """Raise a preflight error for quantised weights, by what the config says and by the tensors' own types.

    They would load: an fp8 file has the plain names and shapes, and its scales would be left out without a word.
    """
    quantised = next((each["quantization_config"] for each in configs if each.get("quantization_config")), None)
    used = (name for name in sorted(tensors) if name.startswith(prefix) or name == head_name)
    odd = next((name for name in used if tensors[name].dtype not in _PLAIN_TYPES), None)
    if quantised:
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, Mapping) else quantised
        cause = f"its config.json has a quantization_config of the method {method}"
    elif odd is not None:
        cause = f"{odd} is of type {tensors[odd].dtype}, not {', '.join(_PLAIN_TYPES[:-1])} or {_PLAIN_TYPES[-1]}"
    else:
        return
    hint = "dequantise it, or take the bf16 release"
    raise preflight_error(f"{directory} holds a quantised model", cause=cause, hint=hint)


def _eos_token_ids(directory: Path, *configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end tokens: those of generation_config.json, else of config.json."""
    generation = directory / "generation_config.json"
    sources = list(configs)
    if generation.is_file():
        try:
            sources.insert(0, json.loads(_text(generation)))
        except ValueError as problem:
            raise _unusable(directory, f"{generation.name} is no JSON: {problem}") from problem
    for source in sources:
        eos = source.get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (int(eos),)
    return ()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as problem:
        raise _unreadable(path, problem) from problem


def _unreadable(path: Path, problem: OSError) -> DflashError:
    hint = "the user who trains must be able to read it"
    return _unusable(path.parent, f"{path.name} cannot be read: {problem.strerror}", hint)


def _unusable(
    directory: Path, cause: str, hint: str = "copy the model again, or give another directory"
) -> DflashError:
    return preflight_error(f"{directory} is no usable model directory", cause=cause, hint=hint)
