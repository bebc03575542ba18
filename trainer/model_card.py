"""The README.md beside an exported drafter: what it is, the exact lines that serve it, how it was trained."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint_files import TrainerState
from trainer.drafter.config import FULL, SLIDING, DrafterConfig

# How it was trained, as far as another run would have to say it again.
_RECIPE = (
    "data_dir", "max_length", "token_budget", "num_anchors", "objective", "gamma", "dpace_alpha", "kl_weight", "noise_std",
    "loss_vocab_extra", "init_from_target", "init_from_drafter", "lr", "warmup_ratio", "weight_decay", "beta1", "beta2",
    "max_grad_norm", "micro_batches_per_step", "epochs", "max_steps", "dtype", "seed",
)  # fmt: skip
HYBRID_FLAGS = "--mamba-scheduler-strategy extra_buffer"
"""What SGLang needs for a hybrid target: its recurrent state is kept in a second buffer, to be taken back."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Card:
    """What a card is made of; `target` and `drafter` are the names that the serve lines carry: hub id or directory.

    `hybrid_target`: None where it is not known.
    """

    config: DrafterConfig
    target: str
    drafter: str
    layout: str
    dtype: str
    parameters: int
    hybrid_target: bool | None = False
    state: TrainerState | None = None
    untrained: bool = False

    def render(self) -> str:
        """Return the Markdown text."""
        parts = [self._front_matter(), self._title(), self._shape(), "## Serve", *self._serve(), *self._training()]
        return "\n\n".join(parts) + "\n"

    def _front_matter(self) -> str:
        base = [f"base_model: {self.target}"] if _HUB_ID.fullmatch(self.target) else []
        return "\n".join(["---", *base, "tags:", "- dflash", "- speculative-decoding", "---"])

    def _title(self) -> str:
        guesses = self.config.block_size - 1
        return (
            f"# DFlash drafter for {self.target}\n\n"
            f"Guesses {guesses} tokens at once, which the target verifies in one forward "
            "([arXiv 2602.06036](https://arxiv.org/abs/2602.06036)). It has no embedding and no head of its own: it runs "
            "beside exactly this target, and what is written stays the target's."
        )

    def _shape(self) -> str:
        config = self.config
        window = f", window {config.sliding_window} tokens" if config.sliding_window else ""
        return _table(
            ("", ""),
            [
                ("parameters", f"{self.parameters:,} in {self.dtype}"),
                ("layers", f"{config.num_hidden_layers}: {_counted(config.layer_types)}{window}"),
                ("width", f"hidden {config.hidden_size}, ffn {config.intermediate_size}"),
                (
                    "heads",
                    f"{config.num_attention_heads}, {config.num_key_value_heads} for keys and values, of {config.head_dim}",
                ),
                ("block size", f"{config.block_size}: the anchor and {config.block_size - 1} masked rows"),
                ("mask token", str(config.mask_token_id)),
                (
                    "reads the outputs of target layers",
                    f"{', '.join(map(str, config.target_layer_ids))} of {config.num_target_layers}, counted from 0",
                ),
                ("layout", self.layout),
            ],
        )

    def _serve(self) -> list[str]:
        mixed = {FULL, SLIDING} <= set(self.config.layer_types)
        lines = ["vLLM:", _command(vllm_line(self.config, self.target, self.drafter))]
        if self.layout == "speculators":
            lines.insert(1, _command(f"vllm serve {shlex.quote(self.drafter)}"))
            lines.insert(2, "or, to name another copy of the target or fewer guesses:")
            return lines
        if mixed:
            lines.append("vLLM 0.32 refuses drafters that mix full and sliding layers; use a later one, or SGLang.")
        lines += ["SGLang:", _command(sglang_line(self.config, self.target, self.drafter, bool(self.hybrid_target)))]
        if self.hybrid_target is None:
            lines.append(f"If the target has recurrent layers (Qwen3.5, Qwen3.6), add `{HYBRID_FLAGS}`.")
        return lines

    def _training(self) -> list[str]:
        if self.untrained:
            return ["## Training", "None: these are the weights that a run started from, to compare with."]
        if self.state is None:
            return []
        state = self.state
        loss = "" if state.loss is None else f", loss {state.loss:.4f} in its last step"
        rows = [(key, _value(state.config[key])) for key in _RECIPE if key in state.config]
        return [
            "## Training",
            f"Step {state.step} of {state.total_steps}{loss}. Data {state.data_fingerprint[:16]} (SHA-256 of its tokens).",
            _table(("setting", "value"), rows),
            "Figures of training are teacher-forced and flatter. Measure acceptance by decoding:",
            "\n".join(map(_command, measuring_lines(self.target, self.drafter, state.config))),
        ]


def measuring_lines(target: str, drafter: str, trained_with: Mapping[str, Any]) -> list[str]:
    """Return the commands that measure acceptance, on the device and in the type that the run had.

    `evaluate` takes directories: what has a hub id is downloaded to a directory of that name first.
    """
    fetched = [name for name in (target, drafter) if _HUB_ID.fullmatch(name)]
    lines = [f"hf download {name} --local-dir {name}" for name in fetched]
    # `evaluate` by itself decodes on the CPU, in float32.
    where = (
        f" --device cuda --dtype {trained_with.get('dtype', 'bfloat16')}" if trained_with.get("device") != "cpu" else ""
    )
    measure = f"python -m trainer evaluate --target-model {shlex.quote(target)} --drafter {shlex.quote(drafter)}{where}"
    return [*lines, measure]


def vllm_line(config: DrafterConfig, target: str, drafter: str) -> str:
    """Return the command that serves with vLLM; it counts guesses, without the anchor (README of z-lab/dflash)."""
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": config.block_size - 1}
    # Full layers look in both directions inside a block, which not every attention backend of vLLM can.
    backend = " --attention-backend flash_attn" if FULL in config.layer_types else ""
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}{backend}"


def sglang_line(config: DrafterConfig, target: str, drafter: str, hybrid_target: bool) -> str:
    """Return the command that serves with SGLang; it counts the block's rows, anchor included (README of z-lab/dflash)."""
    state = f" {HYBRID_FLAGS}" if hybrid_target else ""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {shlex.quote(drafter)} "
        f"--speculative-num-draft-tokens {config.block_size}{state}"
    )


def _command(line: str) -> str:
    return f"    {line}"


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"| {first} | {second} |" for first, second in [head, ("---", "---"), *rows])


def _counted(layer_types: Iterable[str]) -> str:
    types = list(layer_types)
    names = {FULL: "full", SLIDING: "sliding"}
    return " + ".join(f"{types.count(kind)} {name}" for kind, name in names.items() if kind in types)


def _value(value: Any) -> str:
    return str(value).replace("|", "\\|")
