"""A run with listed layer types trains them and says so in its checkpoint."""

from __future__ import annotations

import json

from trainer.checkpoint_files import DRAFTER_CONFIG_FILE, read_state


def test_the_list_reaches_the_ranks_and_the_checkpoint(trained):
    shared = {"target_gpus": [0], "drafter_gpus": [0], "max_steps": 2, "sliding_window": 3}
    run = trained(**shared, layer_types=["full", "sliding"])
    saved = json.loads((run.checkpoints[-1] / DRAFTER_CONFIG_FILE).read_text())
    assert saved["layer_types"] == ["full_attention", "sliding_attention"]
    assert saved["sliding_window"] == 3
    assert read_state(run.checkpoints[-1]).config["layer_types"] == ["full", "sliding"]
    # Another order of the same layers computes something else.
    assert run.losses[2] != trained(**shared, attention="mixed").losses[2]
