"""The drafter's shape: the published figures, the served config.json and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config

from remote.protocol.errors import DflashError, ExitCode
from trainer.drafter.config import FULL, SLIDING, DrafterConfig, default_target_layer_ids, derive, gamma_for
from trainer.drafter.model import Drafter

QWEN = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    "max_position_embeddings": 262144,
}


def qwen(**overrides) -> DrafterConfig:
    values = {
        "num_layers": 5,
        "block_size": 16,
        "mask_token_id": 248070,
        "layer_types": "mixed",
        "sliding_window": 2048,
    }
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    return derive(QWEN, **(values | heads | overrides))


def test_the_27b_drafter_has_the_published_size():
    config = qwen()
    with torch.device("meta"):
        state = Drafter(config).state_dict()
    assert sum(tensor.numel() for tensor in state.values()) == 1_730_213_120
    assert len(state) == 58
    assert config.target_layer_ids == (1, 16, 31, 46, 61)
    assert config.layer_types == (SLIDING,) * 4 + (FULL,)


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [(64, 5, (1, 16, 31, 46, 61)), (36, 5, (1, 9, 17, 25, 33)), (30, 1, (15,)), (8, 2, (1, 5))],
)
def test_default_layer_ids_follow_the_public_rule(layers, count, ids):
    assert default_target_layer_ids(layers, count) == ids


def test_a_shallow_target_has_no_five_layers_to_choose():
    with pytest.raises(DflashError, match="cannot choose"):
        default_target_layer_ids(6, 5)


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7), (10, 5), (8, 4), (2, 1)])
def test_gamma_of_the_published_block_sizes(block_size, gamma):
    assert gamma_for(block_size) == gamma


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        ({"mask_token_id": 248320}, "outside the vocabulary"),
        ({"mask_token_id": -1}, "outside the vocabulary"),
        ({"target_layer_ids": (1, 63)}, "target_layer_ids"),
        ({"target_layer_ids": (-1, 5)}, "target_layer_ids"),
        ({"target_layer_ids": (5, 5)}, "ascending"),
        ({"target_layer_ids": (9, 5)}, "ascending"),
        ({"block_size": 1}, "block_size"),
        ({"head_dim": 127}, "head_dim"),
        ({"num_key_value_heads": 5}, "evenly"),
        ({"layer_types": "mixed", "sliding_window": None}, "sliding"),
        ({"layer_types": ("full_attention",)}, "layer_types"),
        ({"layer_types": ("full_attention",) * 4 + ("global",)}, "layer_types"),
        ({"rope_theta": float("nan")}, "rope_theta"),
    ],
)
def test_what_cannot_be_trained_or_served_is_refused_with_its_cause(overrides, cause):
    with pytest.raises(DflashError) as caught:
        qwen(**overrides)
    assert caught.value.code is ExitCode.PREFLIGHT
    assert cause in caught.value.cause
    assert caught.value.hint


def test_an_unknown_kind_of_layers_names_the_known_ones():
    with pytest.raises(DflashError, match="unknown attention") as caught:
        qwen(layer_types="slide")
    assert "sliding" in caught.value.hint


@given(
    layer_types=st.sampled_from(["full", "sliding", "mixed"]),
    num_layers=st.integers(1, 6),
    block_size=st.integers(2, 32),
    ids=st.sets(st.integers(0, 62), min_size=1, max_size=6),
    window=st.integers(1, 4096),
    rope_theta=st.floats(1.0, 1e8),
)
def test_the_served_config_is_read_back_as_it_was(layer_types, num_layers, block_size, ids, window, rope_theta):
    config = qwen(
        layer_types=layer_types,
        num_layers=num_layers,
        block_size=block_size,
        target_layer_ids=tuple(sorted(ids)),
        sliding_window=window,
        rope_theta=rope_theta,
    )
    text = json.dumps(config.to_zlab("bfloat16"))
    assert DrafterConfig.from_zlab(json.loads(text)) == config
    assert "partial_rotary_factor" not in text
    assert "mrope" not in text


@pytest.mark.parametrize("layer_types", ["full", "sliding", "mixed"])
def test_transformers_reads_the_served_config_as_meant(layer_types):
    config = qwen(layer_types=layer_types)
    read = Qwen3Config(**config.to_zlab("bfloat16"))
    assert read.layer_types == list(config.layer_types)
    assert read.sliding_window == config.sliding_window
    assert read.rope_parameters["rope_theta"] == 1e7
    assert read.rope_parameters["rope_type"] == "default"
    assert read.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0
    assert read.head_dim == 128


@pytest.mark.parametrize("missing", ["dflash_config", "hidden_size", "num_target_layers"])
def test_a_config_without_what_is_needed_is_refused(missing):
    served = qwen().to_zlab("bfloat16")
    del served[missing]
    with pytest.raises(DflashError) as caught:
        DrafterConfig.from_zlab(served)
    assert caught.value.code is ExitCode.PREFLIGHT


def test_two_block_sizes_are_refused():
    served = qwen().to_zlab("bfloat16") | {"block_size": 8}
    with pytest.raises(DflashError, match="two block sizes"):
        DrafterConfig.from_zlab(served)


def test_an_older_config_without_rope_parameters_is_read():
    served = qwen().to_zlab("bfloat16")
    del served["rope_parameters"]
    assert DrafterConfig.from_zlab(served).rope_theta == 1e7


def test_older_public_configs_are_read_as_pypi_dflash_reads_them():
    """What the first releases left out, and where they said the rest: no layer_types, ids by the rule, top-level mask."""
    config = qwen(num_layers=5, layer_types="full", block_size=16)
    served = config.to_zlab("bfloat16")
    nested = served.pop("dflash_config")
    for key in ("layer_types", "num_key_value_heads", "head_dim", "rms_norm_eps", "use_sliding_window"):
        served.pop(key)
    read = DrafterConfig.from_zlab(served | {"mask_token_id": nested["mask_token_id"]})
    assert read.layer_types == ("full_attention",) * 5
    assert read.target_layer_ids == default_target_layer_ids(64, 5)
    assert (read.block_size, read.mask_token_id) == (16, config.mask_token_id)
    assert read.num_key_value_heads == read.num_attention_heads
    assert read.head_dim == read.hidden_size // read.num_attention_heads
    del served["num_target_layers"]
    assert DrafterConfig.from_zlab(served | nested, num_target_layers=64).num_target_layers == 64


@pytest.mark.parametrize(("first", "window", "types"), [(3, 128, "FFFSS"), (28, 128, "FFFFF"), (0, None, "FFFFF")])
def test_layer_types_of_before_the_key_are_those_of_transformers(first, window, types):
    served = qwen(num_layers=5, layer_types="full").to_zlab("bfloat16")
    del served["layer_types"]
    served |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": first}
    read = DrafterConfig.from_zlab(served)
    assert "".join(kind[0].upper() for kind in read.layer_types) == types
    assert list(read.layer_types) == Qwen3Config(**served).layer_types


def test_sliding_layers_without_the_older_flag_slide():
    config = qwen(layer_types="sliding")
    served = config.to_zlab("bfloat16")
    del served["use_sliding_window"]
    assert DrafterConfig.from_zlab(served) == config
    with pytest.raises(DflashError, match="invalid"):
        DrafterConfig.from_zlab(served | {"use_sliding_window": False})


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "architectures"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "rope_type"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e6}}, "partial_rotary_factor"),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, "rope_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"is_causal": True}, "is_causal"),
        ({"output_multiplier": 0.5}, "output_multiplier"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_a_drafter_that_computes_something_else_is_refused(changed, key):
    with pytest.raises(DflashError, match=key) as caught:
        DrafterConfig.from_zlab(qwen().to_zlab("bfloat16") | changed)
    assert caught.value.code is ExitCode.PREFLIGHT
