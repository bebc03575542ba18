"""Loading the frozen target: its text stack, strictly, tensor by tensor to the device it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from remote.protocol.errors import preflight_error
from trainer.target.capture import Target
from trainer.target.facts import TargetFacts, target_facts
from trainer.target.weights import Progress, read_tensors


def load_target(
    path: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    target_layer_ids: Sequence[int],
    whole: bool = False,
    last_output: bool = False,
    progress: Progress | None = None,
) -> Target:
    """Load the text stack of a target directory, frozen and in eval mode, to capture the outputs of some layers.

    Layers behind the last captured one are neither loaded nor run, unless `whole` (evaluation needs the head's input).
    With `last_output` the last layer's is captured as well, after the others: before the final norm, a teacher's and
    not the drafter's to see. `progress` as for `read_tensors`.

    Raises:
        DflashError: see `target_facts`; a layer id out of range or unordered; a tensor missing or misshapen (code 7).
    """
    facts = target_facts(path)
    ids = tuple(target_layer_ids)
    if not ids or list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] <= facts.num_layers - 2:
        raise preflight_error(
            f"target_layer_ids {list(ids)} do not fit {facts.path}",
            cause=f"its {facts.num_layers} layers allow ascending ids from 0 to {facts.num_layers - 2}",
            hint="the last layer's output is only seen behind the final norm",
        )
    captured = (*ids, facts.num_layers - 1) if last_output else ids
    stack = _load_stack(facts, facts.num_layers if whole else captured[-1] + 1, dtype, torch.device(device), progress)
    return Target(stack, facts, captured)


def load_final_norm(path: Path | str, *, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """Load the norm between the target's last layer and its head, frozen: f[..., H] to f[..., H].

    The module of its own architecture: Qwen3.5 scales by 1 + weight, others by weight.

    Raises:
        DflashError: see `target_facts`; the tensor is missing or misshapen (code 7).
    """
    facts = target_facts(path)
    with torch.device("meta"):
        stack = AutoModel.from_config(_text_config(facts, 1), dtype=dtype)
    names = [f"{facts.prefix}norm.weight"]
    for _, tensor in read_tensors(facts.tensors, names, dtype=dtype, device=torch.device(device)):
        _assign(stack, "norm.weight", tensor, facts)
    return stack.get_submodule("norm").eval().requires_grad_(False)


def _load_stack(
    facts: TargetFacts, num_layers: int, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> nn.Module:
    """Build the first layers of the text stack without memory for weights, then assign the files' tensors strictly.

    `from_pretrained` would fill a missing tensor with random numbers and only warn.
    """
    config = _text_config(facts, num_layers)
    with torch.device("meta"):
        stack = AutoModel.from_config(config, attn_implementation="sdpa", dtype=dtype)
    names = {f"{facts.prefix}{name}": name for name in stack.state_dict()}
    for full_name, tensor in read_tensors(facts.tensors, names, dtype=dtype, device=device, progress=progress):
        _assign(stack, names[full_name], tensor, facts)
    # Rotary tables are computed, not stored: built on the meta device they are empty.
    stack.rotary_emb = type(stack.rotary_emb)(config=config).to(device)
    # A tensor that no file fed would fail in the first forward with a message about the meta device.
    left = [name for name, each in [*stack.named_parameters(), *stack.named_buffers()] if each.is_meta]
    if left:
        raise RuntimeError(f"no source for {left} of {facts.architecture}")
    return stack.eval().requires_grad_(False)


def _text_config(facts: TargetFacts, num_layers: int) -> Any:
    config = AutoConfig.from_pretrained(facts.path).get_text_config()
    # 62 of 64 layers for the 27B target: what is behind the last captured one takes neither memory nor time.
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    # A training forward never continues; decoding asks for its cache in the call.
    config.use_cache = False
    return config


def _assign(stack: nn.Module, name: str, tensor: torch.Tensor, facts: TargetFacts) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = stack.get_submodule(owner_name)
    expected = getattr(owner, leaf).shape
    if tensor.shape != expected:
        raise preflight_error(
            f"{facts.path} does not match its config.json",
            cause=f"{name} is {list(tensor.shape)}, the configuration says {list(expected)}",
            hint="copy the model again",
        )
    if isinstance(getattr(owner, leaf), nn.Parameter):
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        owner.register_buffer(leaf, tensor)
