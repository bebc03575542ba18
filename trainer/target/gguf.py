"""`python -m trainer.target.gguf SOURCE.gguf DESTINATION`: a GGUF file becomes a plain transformers directory.

transformers reads a GGUF by dequantising it, but such a model refuses `save_pretrained`. So its state is loaded
strictly into a model built anew from its configuration, and that one is saved as float32.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from remote.protocol.errors import DflashError, preflight_error
from trainer.target.new_directory import new_directory, refuse_existing


def convert(source: Path, destination: Path) -> None:
    """Write model (float32), tokenizer, chat template and generation config of `source` to the new `destination`.

    Raises:
        DflashError: `source` is not a readable GGUF file, or `destination` exists (code 7).
    """
    refuse_existing(destination)
    if not source.is_file():
        raise preflight_error(f"no GGUF file at {source}", hint="give the path of a .gguf file")
    with source.open("rb") as file:
        # transformers reports a foreign file as an unpacking error of the gguf package.
        if file.read(4) != b"GGUF":
            raise preflight_error(f"{source} is not a GGUF file", cause="it does not begin with the bytes GGUF")
    with new_directory(destination) as directory:
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        # With this key left in, a loader would look for quantised tensors in the float32 file.
        config = read.config
        config.__dict__.pop("quantization_config", None)
        config.dtype = torch.float32
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(read.state_dict(), strict=True)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def main(argv: list[str] | None = None) -> int:
    """Convert as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.target.gguf", description=__doc__)
    parser.add_argument("source", type=Path, help="the .gguf file")
    parser.add_argument("destination", type=Path, help="the directory to make")
    arguments = parser.parse_args(argv)
    try:
        convert(arguments.source, arguments.destination)
    except DflashError as error:
        print(error.render(), file=sys.stderr)
        return int(error.code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
