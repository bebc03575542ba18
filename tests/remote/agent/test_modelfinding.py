"""The target's directory as doctor sees it: complete, cut off, missing in part, odd."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote.agent import modelfinding
from remote.agent.modelfinding import SUPPORTED, model_finding

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
INDEX = "model.safetensors.index.json"


def safetensors(tensors: dict[str, int], *, cut: int = 0) -> bytes:
    """Return a file of tensors of so many bytes, `cut` bytes of it missing at the end."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + bytes(at)
    return whole[: len(whole) - cut]


@pytest.fixture
def target(tmp_path):
    """Return a function that writes a target directory: config.json, two weight files with their index, a tokenizer."""

    def make(config: Any = CONFIG, **files: bytes | None) -> Path:
        folder = tmp_path / "target"
        folder.mkdir(exist_ok=True)
        index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}}
        everything: dict[str, bytes | None] = {
            "config.json": config if isinstance(config, bytes) else json.dumps(config).encode(),
            "one.safetensors": safetensors({"a": 100, "b": 50}),
            "two.safetensors": safetensors({"c": 10}),
            INDEX: json.dumps(index).encode(),
            "tokenizer.json": b"{}",
            **{name.replace("__", "."): content for name, content in files.items()},
        }
        for name, content in everything.items():
            if content is not None:
                (folder / name).write_bytes(content)
        return folder

    return make


def look(folder: Path | str, room: int = 0) -> modelfinding.Finding:
    return model_finding(str(folder), room, "GPU 0")


def test_the_architectures_are_those_that_the_trainer_takes():
    from trainer.target.facts import HYBRID, PLAIN

    assert set(SUPPORTED) == {*PLAIN, *HYBRID}


def test_a_whole_one(target):
    found = look(target())
    assert (found.state, found.hint) == ("ok", "")
    assert found.text.endswith("target: llama, 0 MiB")


def test_one_file_without_an_index(target):
    folder = target(two__safetensors=None)
    (folder / INDEX).unlink()
    assert look(folder).state == "ok"


def test_not_set():
    assert (look("").state, look("").hint) == ("failed", "name it with --target-model")


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/dev/shm/no-such-model", "a container start empties /dev/shm"),
        ("/nowhere/build/demo/target", "`make demo`"),
        ("/nowhere/model", "--target-model"),
    ],
)
def test_not_there(path, word):
    found = look(path)
    assert (found.state, found.code, word in found.hint) == ("failed", 7, True)
    assert found.text == f"no model directory at {path}"


def test_in_shared_memory_it_is_said_that_it_will_go(target, monkeypatch, tmp_path):
    folder = target()
    monkeypatch.setattr(modelfinding, "SHARED_MEMORY", str(tmp_path))
    # Three parts are compared, as /dev/shm has them.
    monkeypatch.setattr(modelfinding, "_in_shared_memory", lambda directory: directory.is_relative_to(tmp_path))
    assert look(folder).text.endswith("gone after a container restart")
    assert look(folder).state == "ok"


def test_shared_memory_is_told_by_its_path_alone(monkeypatch):
    assert modelfinding._in_shared_memory(Path("/dev/shm/Qwen3.6-27B"))
    assert not modelfinding._in_shared_memory(Path("/dev/shmx/Qwen3.6-27B"))
    assert not modelfinding._in_shared_memory(Path("dev/shm/x"))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config__json": None}, "has no config.json"),
        ({"config__json": b"{"}, "config.json is no JSON object"),
        ({"config__json": b"[]"}, "config.json is no JSON object"),
        ({"config__json": b'{"architectures": ["GPT2LMHeadModel"]}'}, "names 'GPT2LMHeadModel', which cannot be"),
        ({"config__json": b'{"architectures": []}'}, "names no architecture"),
        ({"two__safetensors": None}, "1 of 2 weight files of"),
        ({"two__safetensors": safetensors({"c": 10}, cut=1)}, "is cut off:"),
        ({"two__safetensors": safetensors({"c": 10}, cut=30)}, "damaged or cut off"),
        ({"two__safetensors": b"abc"}, "damaged or cut off"),
        ({"two__safetensors": struct.pack("<Q", 1 << 60) + b"x"}, "damaged or cut off"),
        ({"model__safetensors__index__json": b"{}"}, "has no usable weight_map"),
        ({"model__safetensors__index__json": b'{"weight_map": {"a": "../x.safetensors"}}'}, "no usable weight_map"),
        ({"model__safetensors__index__json": b'{"weight_map": {"a": 3}}'}, "no usable weight_map"),
    ],
)
def test_what_is_wrong_with_a_copy(target, files, words):
    found = look(target(**files))
    assert (found.state, found.code) == ("failed", 7)
    assert words in found.text
    assert found.hint


def test_no_weights_at_all(target):
    folder = target(one__safetensors=None, two__safetensors=None, model__safetensors__index__json=None)
    assert "has no *.safetensors" in look(folder).text


def test_too_large_for_what_loads_it(target):
    found = look(target(one__safetensors=safetensors({"a": 3 << 20})), room=1 << 20)
    assert (found.state, "GPU 0 has 1 MiB free" in found.text) == ("warning", True)
    assert look(target(), room=1 << 30).state == "ok"


def test_no_tokenizer_is_a_warning(target):
    found = look(target(tokenizer__json=None))
    assert (found.state, "no tokenizer" in found.text) == ("warning", True)


def test_what_may_not_be_read(target):
    folder = target()
    # A directory in its place cannot be read by anybody, root neither.
    (folder / "one.safetensors").unlink()
    (folder / "one.safetensors").mkdir()
    assert "1 of 2 weight files" in look(folder).text
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/proc/self/mem")
    assert "config.json" in look(folder).text
    assert look(folder).state == "failed"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(
    st.sampled_from(["architectures", "model_type", "weight_map", "data_offsets", "a", "__metadata__"]), json_values
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=objects | st.just(CONFIG), index=objects, raw=st.binary(max_size=30))
def test_any_config_and_any_index(target, config, index, raw):
    for content in (config, raw):
        found = look(target(content, **{INDEX: json.dumps(index).encode()}))
        assert found.state in ("ok", "warning", "failed")
        assert found.text


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=objects | st.dictionaries(st.text(max_size=3), objects, max_size=2), tail=st.binary(max_size=20))
def test_any_header_of_a_weight_file(target, header, tail):
    text = json.dumps(header).encode()
    found = look(target(two__safetensors=struct.pack("<Q", len(text)) + text + tail))
    assert found.state in ("ok", "failed")
