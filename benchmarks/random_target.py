"""`python -m benchmarks.random_target DIR --shape qwen3.6-27b`: a hybrid target with random weights, as a model directory.

Speed, memory and the path through the trainer depend on a target's shape, not on what it knows. The 27B one takes 54 GB
in bfloat16; /dev/shm is the place for it. Each decoder layer is drawn on the device, written as a shard and forgotten,
so that one layer (0.8 GB) or one end (2.5 GB) is all that exists at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen3_5TextConfig

from remote.protocol.errors import DflashError
from remote.protocol.files import write_json
from trainer.target.new_directory import new_directory

# Qwen3.6-27B as far as it is known: its number of value heads (48) is inferred from the size of the whole model.
# eos and pad token as published; the mask token of its drafters is 248070, inside the vocabulary.
QWEN36_27B: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "eos_token_id": 248044,
    "pad_token_id": 248044,
}
# Every proportion that code could trip over is kept: value heads are three times the key heads, the query gate is there.
TOY = QWEN36_27B | {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
SHAPES = {"qwen3.6-27b": QWEN36_27B, "toy": TOY}


def make_target(directory: Path, shape: str, *, layers: int = 0, device: str = "cuda", seed: int = 0) -> int:
    """Write the target to the new `directory`; returns the bytes of its tensors. `layers` 0: as many as the shape has.

    Raises:
        DflashError: the directory exists or cannot be written (code 7).
    """
    config = Qwen3_5TextConfig(**SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {}))
    config.architectures, config.dtype = ["Qwen3_5ForCausalLM"], torch.bfloat16
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(seed)
    with new_directory(directory) as place:
        weight_map: dict[str, str] = {}
        total = 0
        for number, (prefix, part) in enumerate(_parts(model)):
            tensors = {prefix + name: tensor for name, tensor in _drawn(model, part, device).items()}
            file = f"model-{number:05d}.safetensors"
            save_file(tensors, place / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
        write_json(
            place / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
        config.save_pretrained(place)
        GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id).save_pretrained(place)
    return total


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what makes one shard each, with the prefix of its tensors' names: decoder layers, the ends, the final norm."""
    for name, part in model.get_submodule("model.layers").named_children():
        yield f"model.layers.{name}.", part
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        yield f"{name}.", model.get_submodule(name)


def _drawn(model: PreTrainedModel, part: nn.Module, device: str) -> dict[str, torch.Tensor]:
    """Return the part's tensors on the host, drawn on `device` as transformers begins a training with; the part stays empty.

    Its rules know what a list of names does not: most norms of this architecture are stored minus one, the gated is not.
    """
    part.to_empty(device=device)
    for module in part.modules():
        model._init_weights(module)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in part.state_dict().items()}
    part.to(device="meta")
    return tensors


def main(argv: list[str] | None = None) -> int:
    """Make what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_target", description=__doc__)
    parser.add_argument("directory", type=Path, help="the model directory to make")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3.6-27b")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="fewer layers than the shape has")
    parser.add_argument("--device", default="cuda", help="where weights are drawn (default cuda)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    try:
        total = make_target(
            arguments.directory,
            arguments.shape,
            layers=arguments.layers,
            device=arguments.device,
            seed=arguments.seed,
        )
    except DflashError as error:
        print(error.render(), file=sys.stderr)
        return int(error.code)
    print(f"{arguments.directory}: {arguments.shape}, {total / 1e9:.1f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
