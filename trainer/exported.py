"""Reading a drafter as serving engines find it: a directory with `config.json` and `model.safetensors`, in either layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from remote.protocol.errors import preflight_error
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter
from trainer.exported_files import WEIGHTS_FILE, read_serving_config


def load_exported(directory: Path, dtype: torch.dtype = torch.float32, num_target_layers: int | None = None) -> Drafter:
    """Return the drafter of an exported directory, in either layout, on the CPU, in `dtype`, in eval mode.

    `num_target_layers` is the target's, for directories of others whose config.json does not name it.

    Raises:
        DflashError: files missing or damaged, names or shapes wrong, or tensors of another type than config.json says
            (code 7).
    """
    raw = read_serving_config(directory)
    config = DrafterConfig.from_zlab(raw, num_target_layers)
    state = read_state_file(directory / WEIGHTS_FILE)
    check_state(state, config)
    # vLLM casts to what config.json says; a file that lies there is a drafter with other weights.
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in state.values()}
    # transformers 4 called it torch_dtype; a file that says nothing is believed.
    said = raw.get("dtype") or raw.get("torch_dtype")
    if said is not None and types != {str(said).removeprefix("torch.")}:
        raise preflight_error(
            f"{directory} is inconsistent",
            cause=f"config.json says dtype {said}, the tensors are {', '.join(sorted(types))}",
            hint="export it again",
        )
    return _build(config, state, dtype)


def read_state_file(path: Path) -> dict[str, torch.Tensor]:
    """Return a drafter's tensors. Raises a preflight error when the file is missing or damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as problem:
        raise preflight_error(f"cannot read {path}", cause=str(problem), hint="the file is missing or cut off") from (
            problem
        )


def check_state(state: Mapping[str, torch.Tensor], config: DrafterConfig) -> None:
    """Raise a preflight error when names or shapes are not those of the configured drafter."""
    # Shapes only; the 27B drafter's 1.7 billion parameters are not allocated for the comparison.
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in Drafter(config).state_dict().items()}
    wrong = _first_difference(state, expected)
    if wrong:
        raise preflight_error(
            "the state is not that of the configured drafter",
            cause=wrong,
            hint="names carry no prefix; embedding and head are the target's",
        )


def _first_difference(state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size]) -> str:
    for name in sorted(state.keys() | expected.keys()):
        if name not in expected:
            return f"unexpected tensor {name}"
        if name not in state:
            return f"missing tensor {name}"
        if state[name].shape != expected[name]:
            return f"{name} is {list(state[name].shape)}, the configuration says {list(expected[name])}"
    return ""


def _build(config: DrafterConfig, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Drafter:
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()}, strict=True, assign=True)
    return drafter.eval().requires_grad_(False)
