"""Reading single tensors out of a target's safetensors files, straight to where they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from safetensors import SafetensorError, safe_open

from remote.protocol.errors import preflight_error
from trainer.target.facts import TargetFacts, TensorEntry


def read_tensors(
    entries: Mapping[str, TensorEntry], names: Iterable[str], *, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) in `dtype` on `device`, file by file; files are mapped, so no second copy stays in memory.

    Raises:
        DflashError: a name is missing, or a file cannot be read (code 7).
    """
    wanted = sorted(names, key=lambda name: (str(entries[name].file) if name in entries else "", name))
    missing = [name for name in wanted if name not in entries]
    if missing:
        raise preflight_error(
            f"the model lacks {len(missing)} tensors", cause=f"for instance {missing[0]}", hint="copy the model again"
        )
    for file in dict.fromkeys(entries[name].file for name in wanted):
        try:
            with safe_open(file, framework="pt", device=str(device)) as opened:
                for name in wanted:
                    if entries[name].file == file:
                        yield name, opened.get_tensor(name).to(dtype)
        except (SafetensorError, OSError) as problem:
            raise preflight_error(f"cannot read {file}", cause=str(problem), hint="copy the model again") from problem


def last_layers(facts: TargetFacts, count: int) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
    """Return the target's last `count` decoder layers and its final norm f[H], float32 on the CPU.

    One dict a layer, keyed by the name inside it (`mlp.up_proj.weight`): what `start_from_target` takes.
    """
    starts = [f"{facts.prefix}layers.{layer}." for layer in range(facts.num_layers - count, facts.num_layers)]
    final_norm = f"{facts.prefix}norm.weight"
    names = [name for name in facts.tensors if name.startswith(tuple(starts))]
    cpu = torch.device("cpu")
    read = dict(read_tensors(facts.tensors, [*names, final_norm], dtype=torch.float32, device=cpu))
    layers = [
        {name.removeprefix(start): tensor for name, tensor in read.items() if name.startswith(start)}
        for start in starts
    ]
    return layers, read[final_norm]
