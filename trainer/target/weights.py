"""Reading single tensors out of a target's safetensors files, straight to where they are needed.

For a CPU files are mapped, so that processes share the pages of what needs no conversion; for a GPU see staging.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from safetensors import SafetensorError, safe_open

from remote.protocol.errors import preflight_error
from trainer.pipeline.copier import make_copier
from trainer.target.facts import TargetFacts, TensorEntry
from trainer.target.staging import Load, staged_tensors

Progress = Callable[[int, int], None]


def read_tensors(
    entries: Mapping[str, TensorEntry],
    names: Iterable[str],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) in `dtype` on `device`, file by file. Beside what was yielded little host memory is taken.

    `progress` is called with (bytes read, bytes in all) after each tensor.

    Raises:
        DflashError: a name is missing, or a file cannot be read (code 7).
    """
    wanted = list(dict.fromkeys(names))
    missing = [name for name in wanted if name not in entries]
    if missing:
        raise preflight_error(
            f"the model lacks {len(missing)} tensors", cause=f"for instance {missing[0]}", hint="copy the model again"
        )
    wanted.sort(key=lambda name: (str(entries[name].file), entries[name].start))
    if device.type == "cuda":
        tensors = staged_tensors(Load(entries, wanted, dtype, device), make_copier(device))
    else:
        tensors = _mapped_tensors(entries, wanted, dtype, device)
    read, total = 0, sum(entries[name].bytes for name in wanted)
    for name, tensor in tensors:
        read += entries[name].bytes
        yield name, tensor
        if progress is not None:
            progress(read, total)


def _mapped_tensors(
    entries: Mapping[str, TensorEntry], wanted: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
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
