"""`layer_types` names the attention of each drafter layer, where full, sliding and mixed do not say it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from remote.protocol.errors import DflashError
from trainer.checkpoint_files import TrainerState, check_resumable
from trainer.config import TrainConfig, coerce, config_flags
from trainer.drafter.config import FULL, SLIDING, DrafterConfig
from trainer.preflight import drafter_config
from trainer.target.facts import target_facts


@pytest.fixture(scope="module")
def facts(make_target):
    return target_facts(make_target())


def config_of(**changes):
    values = {"mask_token_id": 3, "block_size": 4, "drafter_layers": 3, "captured_layers": 2, "sliding_window": 8}
    return TrainConfig.from_mapping(values | changes)


def test_a_list_shapes_the_drafter_layer_by_layer(facts):
    shape = drafter_config(config_of(layer_types=["sliding", "full", "sliding"], attention="full"), facts)
    assert shape.layer_types == (SLIDING, FULL, SLIDING)
    assert [shape.window(layer) for layer in range(3)] == [8, None, 8]
    # As it is served: the list survives the exported config.json.
    assert DrafterConfig.from_zlab(shape.to_zlab("bfloat16")) == shape


@pytest.mark.parametrize(
    ("attention", "types"),
    [("full", (FULL,) * 3), ("sliding", (SLIDING,) * 3), ("mixed", (SLIDING, SLIDING, FULL))],
)
def test_without_a_list_attention_says_it(facts, attention, types):
    assert drafter_config(config_of(attention=attention), facts).layer_types == types


def test_a_list_without_a_sliding_layer_has_no_window(facts):
    assert drafter_config(config_of(layer_types=["full"] * 3), facts).sliding_window is None


def test_the_flag_takes_a_list():
    assert coerce("layer_types", "sliding, full,sliding") == ("sliding", "full", "sliding")
    assert coerce("layer_types", "") == ()
    (flag,) = [flag for flag in config_flags() if flag.key == "layer_types"]
    assert flag.metavar == "full|sliding,..."
    with pytest.raises(DflashError) as caught:
        coerce("layer_types", "sliding,half")
    assert "expected one of full, sliding" in caught.value.cause


def test_a_list_of_another_length_is_refused_with_both_numbers():
    with pytest.raises(DflashError) as caught:
        config_of(layer_types=["full", "sliding"])
    assert caught.value.error == "layer_types = ('full', 'sliding') is not possible"
    assert caught.value.cause == "drafter_layers is 3"


def test_another_list_is_another_run_and_a_checkpoint_from_before_the_key_goes_on():
    config = config_of()
    before = config.to_dict()
    del before["layer_types"]
    state = TrainerState(step=3, total_steps=9, data_fingerprint="a", config=before)
    data: dict[str, Any] = {"fingerprint": "a", "target": "", "held_out": "", "total_steps": 9}
    check_resumable(state, config, **data)
    listed = dataclasses.replace(config, layer_types=("full", "sliding", "full"))
    with pytest.raises(DflashError, match="another configuration") as caught:
        check_resumable(state, listed, **data)
    assert "layer_types" in caught.value.cause
    # Records are JSON: the list comes back as a list.
    check_resumable(dataclasses.replace(state, config=listed.to_dict()), listed, **data)
