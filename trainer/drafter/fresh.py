"""The drafter as a run begins with it: a function of configuration and target alone, the same on every rank."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.config import TrainConfig
from trainer.drafter.model import Drafter
from trainer.drafter.start import start_from_target
from trainer.exported import load_exported
from trainer.preflight import drafter_config
from trainer.target.facts import target_facts
from trainer.target.weights import last_layers


def fresh_drafter(config: TrainConfig) -> Drafter:
    """Return a float32 drafter on the CPU: drawn from the run's seed, started from the target's last layers or from a drafter.

    Raises:
        DflashError: target, drafter or configuration do not fit (code 7).
    """
    facts = target_facts(Path(config.target_model))
    torch.manual_seed(config.seed)
    shape = drafter_config(config, facts)
    if config.init_from_drafter:
        # Nothing is drawn only to be replaced. The earlier one is frozen and may have other blocks: its tensors are taken alone.
        with torch.device("meta"):
            drafter = Drafter(shape)
        earlier = load_exported(Path(config.init_from_drafter), num_target_layers=facts.num_layers)
        drafter.load_state_dict(earlier.state_dict(), assign=True)
        return drafter
    drafter = Drafter(shape)
    if config.init_from_target == "on":
        start_from_target(drafter, *last_layers(facts, config.drafter_layers))
    return drafter


def empty_drafter(config: TrainConfig, dtype: torch.dtype, device: torch.device) -> Drafter:
    """Return the same drafter with whatever its memory holds, on its device, for a checkpoint to be restored into.

    Drawing 1.7 billion numbers on the CPU took 17 to 24 s of each resumed start. Raises as `fresh_drafter`.
    """
    with torch.device("meta"):
        drafter = Drafter(drafter_config(config, target_facts(Path(config.target_model))))
    # Parameters are all that a drafter has: no buffer is left for anybody else to fill.
    return drafter.to(dtype).to_empty(device=device)
