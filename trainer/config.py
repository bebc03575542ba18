"""The training configuration: every key once, with its unit, bound and message. Torch-free, so `dflashctl` validates it too.

Keys are flat and equal to the flags (`--target-gpus` is `target_gpus`), to `--set key=value` and to the lines of a TOML file.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote.protocol.codec import plain
from remote.protocol.errors import usage_error


def _key(
    default: Any,
    help: str,
    *,
    group: str,
    unit: str = "",
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
) -> Any:
    metadata = {"help": help, "group": group, "unit": unit, "choices": choices, "low": low, "high": high}
    return dataclasses.field(default=default, metadata=metadata)


ON_OFF = ("off", "on")


TRACE_STEPS = 3
"""What `--trace` means."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. `validate` holds the rules between keys; `describe_keys` is the reference table's source."""

    # fmt: off
    target_model: str = _key("", "directory of the frozen target", group="model")
    mask_token_id: int = _key(-1, "token that fills rows 1.. of a block; inside the vocabulary, and never a label of the data", group="model", low=-1)
    block_size: int = _key(16, "rows of a block, the anchor included", group="model", unit="tokens", low=2, high=64)
    drafter_layers: int = _key(5, "decoder layers of the drafter", group="model", low=1, high=64)
    captured_layers: int = _key(5, "target layers whose output the drafter sees", group="model", low=1, high=32)
    target_layer_ids: tuple[int, ...] = _key((), "which target layers; empty: spread evenly", group="model", low=0)
    attention: str = _key("mixed", "drafter attention: mixed is sliding in all layers but the last; vLLM 0.32 and the speculators layout take only full or sliding", group="model", choices=("full", "sliding", "mixed"))
    layer_types: tuple[str, ...] = _key((), "attention of each drafter layer by name, such as sliding,full,sliding; empty: what attention says", group="model", choices=("full", "sliding"))
    sliding_window: int = _key(2048, "window of sliding layers", group="model", unit="tokens", low=1)
    drafter_heads: int = _key(0, "query heads; 0: the target's", group="model", low=0)
    drafter_kv_heads: int = _key(0, "key/value heads; 0: the target's", group="model", low=0)
    drafter_head_dim: int = _key(0, "width of a head; 0: the target's", group="model", low=0)
    drafter_ffn: int = _key(0, "width of the SwiGLU; 0: the target's", group="model", low=0)
    drafter_rope_theta: float = _key(0.0, "RoPE base; 0: the target's", group="model", low=0)
    init_from_target: str = _key("off", "start the drafter's layers from the target's last ones", group="model", choices=ON_OFF)
    init_from_drafter: str = _key("", "start from an exported drafter for the same target, such as a published one", group="model")

    data_dir: str = _key("", "tokenised directory, parquet, arrow or JSONL", group="data")
    held_out_dir: str = _key("", "tokenised data to measure before each checkpoint, never trained on; the checkpoint with its lowest loss stays as best", group="data")
    max_length: int = _key(4096, "documents are cut here", group="data", unit="tokens", low=2)
    token_budget: int = _key(4096, "tokens of one micro-batch (a packed row), padding of the target included", group="data", unit="tokens", low=2)
    bucket_tokens: int = _key(128, "packed rows are padded to a multiple of this", group="data", unit="tokens", low=1)
    num_anchors: int = _key(512, "most anchors of one document", group="data", low=1)
    row_anchors: int = _key(512, "most anchors of one micro-batch", group="data", low=1)
    noise_std: float = _key(0.0, "Gaussian noise on the target's states, drawn per layer, of one size for all though their own sizes differ", group="data", low=0)
    seed: int = _key(42, "seed of order, anchors, noise and initial weights", group="data", low=0, high=2**62)
    epochs: int = _key(6, "passes over the data", group="data", low=1, high=10_000)
    max_steps: int = _key(0, "end after this many steps; 0: after the epochs", group="data", low=0)

    lr: float = _key(6e-4, "peak learning rate", group="optimisation", low=0)
    warmup_ratio: float = _key(0.04, "share of the steps that warm up", group="optimisation", low=0, high=1)
    weight_decay: float = _key(0.01, "AdamW weight decay, matrices only", group="optimisation", low=0)
    beta1: float = _key(0.9, "AdamW beta 1", group="optimisation", low=0, high=1)
    beta2: float = _key(0.95, "AdamW beta 2", group="optimisation", low=0, high=1)
    max_grad_norm: float = _key(1.0, "clip the global gradient norm here", group="optimisation", low=0)
    micro_batches_per_step: int = _key(12, "micro-batches of one optimizer step over all drafters (accumulation 4 on 3 drafters: 12)", group="optimisation", low=1)
    gamma: float = _key(0.0, "objective decay: its length within a block; 0: by block size (7 for 16, 5 for 10, 4 for 8)", group="optimisation", low=0)
    objective: str = _key("decay", "what a block's rows weigh: decay with gamma, or dpace, by the drafter's own confidence (arXiv 2605.18810)", group="optimisation", choices=("decay", "dpace"))
    dpace_alpha: float = _key(0.5, "dpace: confidence p counts as (1 - alpha) * p + alpha; 1: by position alone", group="optimisation", low=0, high=1)
    kl_weight: float = _key(0.0, "share of the KL to the target's own distribution in the loss, beside cross-entropy; above 0 all of the target runs, and its last state travels too", group="optimisation", low=0, high=1)
    loss_vocab_extra: int = _key(-1, "softmax over the data's tokens and this many others, and accuracy and accept_len among them alone; -1: the whole vocabulary", group="optimisation", low=-1)
    objective_rows: int = _key(2048, "block rows whose logits exist at once (with KL three times), but always a whole block", group="optimisation", low=1)
    on_nan: str = _key("stop", "after a non-finite loss or gradient, whose step is never applied", group="optimisation", choices=("stop", "continue"))

    device: str = _key("cuda", "what the GPU lists count; cpu never happens silently", group="layout", choices=("cuda", "cpu"))
    target_gpus: tuple[int, ...] = _key((0,), "devices that run the target", group="layout", low=0)
    drafter_gpus: tuple[int, ...] = _key((1,), "devices that train the drafter; equal to target_gpus: shared roles", group="layout", low=0)
    gpu_memory_gib: float = _key(0.0, "most that each rank's tensors may take of its GPU, to try a smaller one; 0: all of it. CUDA's own share, about 0.5 GiB, and NCCL's come on top", group="layout", unit="GiB", low=0)
    dtype: str = _key("bfloat16", "type of weights and states in computation; masters are float32 at least", group="layout", choices=("bfloat16", "float32", "float64"))
    threads: int = _key(0, "CPU threads of each rank; 0: cores divided by ranks", group="layout", low=0)

    attention_backend: str = _key("auto", "auto: flex_attention on a GPU where it compiles and agrees with dense, else dense", group="pipeline", choices=("auto", "dense", "flex"))
    transfer: str = _key("async", "hand states over asynchronously; sync is the reference", group="pipeline", choices=("async", "sync"))
    split_fc: str = _key("off", "keep the captured layers separate instead of one packed tensor", group="pipeline", choices=ON_OFF)
    ring_mib: int = _key(4096, "bound on states in flight on this machine", group="pipeline", unit="MiB", low=1)
    verify_copies: str = _key("sample", "compare checksums of handed-over states: sample is one batch in 64; a difference is an alarm, and the run goes on", group="pipeline", choices=("sample", "all", "off"))
    profile_interval: float = _key(60.0, "print where the time goes and who waits this often; 0: never", group="pipeline", unit="s", low=0)
    trace_steps: int = _key(0, "trace so many steps, from the run's third on, into trace/ of its directory (--trace: 3); 0: none", group="pipeline", unit="steps", low=0, high=20)
    collective_timeout: float = _key(600.0, "last resort: collectives give up on a silent peer after this long, never before 2.5 times stall_timeout", group="pipeline", unit="s", low=10)
    stall_timeout: float = _key(300.0, "a rank that does not get on for this long in training, three times as long elsewhere, ends the run and is named; no step for this long is an alarm", group="pipeline", unit="s", low=1)

    output_dir: str = _key("", "where checkpoints go; empty: the run's directory", group="output")
    checkpoint_every: int = _key(500, "steps between checkpoints; 0: only the last", group="output", unit="steps", low=0)
    keep_checkpoints: int = _key(3, "how many checkpoints stay", group="output", low=1)
    resume: str = _key("", "checkpoint directory to go on from", group="output")
    # fmt: on

    @property
    def shared_roles(self) -> bool:
        """Whether every rank is target and drafter at once."""
        return self.target_gpus == self.drafter_gpus

    @property
    def splits_fc(self) -> bool:
        return self.split_fc == "on"

    @property
    def distils(self) -> bool:
        """Whether the output of the target's last layer travels to the drafters as well."""
        return self.kl_weight > 0

    def to_dict(self) -> dict[str, Any]:
        """Return all keys as JSON types."""
        return plain(self)

    def with_absolute_paths(self) -> TrainConfig:
        """Return the same configuration with its relative paths resolved from the current directory.

        What is written down is read elsewhere: an export, `--only-batch`, a resumed run.
        """
        places = {key: str(Path(value).absolute()) for key in PATH_KEYS if (value := getattr(self, key))}
        return dataclasses.replace(self, **places)

    def changed(self) -> dict[str, Any]:
        """Return the keys that differ from their defaults."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], origin: str = "configuration") -> TrainConfig:
        """Build and validate a configuration. Raises a usage error naming key, value, rule and, for an unknown key, its neighbour."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        checked: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                raise unknown_key(key, origin)
            checked[key] = _checked(known[key], value, origin)
        config = cls(**checked)
        config.validate()
        return config

    @classmethod
    def from_record(cls, values: Mapping[str, Any], origin: str) -> TrainConfig:
        """Build a configuration that a run wrote down, perhaps of a newer version: keys that are not known here are left out.

        Raises a usage error for a value that is not possible.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        return cls.from_mapping({key: value for key, value in values.items() if key in known}, origin)

    def validate(self) -> None:
        """Check the rules between keys. Raises a usage error for the first that is broken."""
        for broken, key, cause, hint in _rules(self):
            if broken:
                raise usage_error(f"{key} = {getattr(self, key)!r} is not possible", cause=cause, hint=hint)


def _rules(c: TrainConfig) -> list[tuple[bool, str, str, str]]:
    overlap = sorted(set(c.target_gpus) & set(c.drafter_gpus))
    partly = bool(overlap) and not c.shared_roles
    return [
        (not c.target_gpus, "target_gpus", "no device runs the target", "name at least one, e.g. --target-gpus 0"),
        (not c.drafter_gpus, "drafter_gpus", "no device trains the drafter", "name at least one, e.g. --drafter-gpus 1"),
        (len(set(c.target_gpus)) < len(c.target_gpus), "target_gpus", "a device is named twice", "name each device once"),
        (len(set(c.drafter_gpus)) < len(c.drafter_gpus), "drafter_gpus", "a device is named twice", "name each device once"),
        (partly, "drafter_gpus", f"devices {overlap} are in target_gpus too",
         "make the two lists disjoint, or identical for shared roles"),
        (c.micro_batches_per_step < len(c.drafter_gpus), "micro_batches_per_step",
         f"{len(c.drafter_gpus)} drafters need at least one micro-batch each in a step", "raise it, or use fewer drafters"),
        (c.max_length > c.token_budget, "max_length", f"a document must fit the token budget of {c.token_budget}",
         "raise token_budget or lower max_length"),
        (c.num_anchors > c.row_anchors, "num_anchors", f"a document must fit the row's {c.row_anchors} anchors",
         "raise row_anchors or lower num_anchors"),
        (bool(c.target_layer_ids) and list(c.target_layer_ids) != sorted(set(c.target_layer_ids)), "target_layer_ids",
         "layer ids must ascend", "sort them and name each once"),
        (bool(c.layer_types) and len(c.layer_types) != c.drafter_layers, "layer_types",
         f"drafter_layers is {c.drafter_layers}", "name one kind for each layer, or none"),
        (bool(c.init_from_drafter) and c.init_from_target == "on", "init_from_drafter", "init_from_target is on: it has one start",
         "leave one of the two out"),
        (c.attention_backend == "flex" and c.device == "cpu", "attention_backend",
         "flex_attention has no backward on a CPU", "leave it at auto, or set dense"),
        (c.gpu_memory_gib > 0 and c.device == "cpu", "gpu_memory_gib", "a CPU's memory has no cap here", "leave it at 0"),
        (c.beta1 == 1, "beta1", "AdamW's mean of gradients would never move from 0", "0.9 is usual"),
        (c.beta2 == 1, "beta2", "AdamW's mean of squares would never move from 0", "0.95 is usual"),
        (c.max_grad_norm == 0, "max_grad_norm", "every gradient would become zero", "use a large value to switch clipping off"),
    ]  # fmt: skip


def unknown_key(key: str, origin: str) -> Exception:
    """Return the usage error for a key that does not exist, with the nearest one that does."""
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    near = difflib.get_close_matches(key.replace("-", "_"), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "`dflashctl config show` lists every key"
    return usage_error(f"unknown key {key!r}", cause=f"{origin} sets it, but no such setting exists", hint=hint)


_EXPECTED = {
    "int": "a whole number",
    "float": "a finite number",
    "str": "text",
    "tuple[int, ...]": "a list of whole numbers",
    "tuple[str, ...]": "a list of names",
}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _typed(kind: str, value: Any, choices: tuple[str, ...]) -> Any:
    """Return `value` as the declared type; raises ValueError with what was expected."""
    if isinstance(value, bool) and choices == ON_OFF:
        return "on" if value else "off"
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "int" and _is_int(value):
        return value
    if kind == "float" and (_is_int(value) or isinstance(value, float)) and math.isfinite(value):
        return float(value)
    if kind == "tuple[int, ...]" and isinstance(value, list | tuple) and all(_is_int(item) for item in value):
        return tuple(value)
    if kind == "tuple[str, ...]" and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError(f"expected {_EXPECTED[kind]}")


def _checked(field: dataclasses.Field[Any], value: Any, origin: str) -> Any:
    rule = field.metadata
    try:
        typed = _typed(str(field.type), value, rule["choices"])
        for item in typed if isinstance(typed, tuple) else (typed,):
            if rule["choices"] and item not in rule["choices"]:
                raise ValueError(f"expected one of {', '.join(rule['choices'])}")
            if rule["low"] is not None and item < rule["low"]:
                raise ValueError(f"must be at least {rule['low']:g}")
            if rule["high"] is not None and item > rule["high"]:
                raise ValueError(f"must be at most {rule['high']:g}")
    except ValueError as error:
        unit = f" ({rule['unit']})" if rule["unit"] else ""
        raise usage_error(
            f"{field.name} = {value!r} is not possible",
            cause=f"{error}, in {origin}",
            hint=f"{field.name}: {rule['help']}{unit}",
        ) from None
    return typed


@dataclass(frozen=True)
class Flag:
    """A key as a command-line flag: `--name METAVAR`."""

    key: str
    name: str
    metavar: str
    help: str
    group: str
    choices: tuple[str, ...]
    default: Any


def _flag_help(field: dataclasses.Field[Any]) -> str:
    unit = f" [{field.metadata['unit']}]" if field.metadata["unit"] else ""
    default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
    return field.metadata["help"] + unit + (f" (default {default})" if default else "")


def _metavar(field: dataclasses.Field[Any]) -> str:
    if choices := "|".join(field.metadata["choices"]):
        return choices + (",..." if isinstance(field.default, tuple) else "")
    return {"int": "N", "float": "X", "str": "TEXT"}.get(str(field.type), "N,N,...")


def config_flags() -> list[Flag]:
    """Return every key as a flag, in order of declaration."""
    return [
        Flag(
            key=field.name,
            name="--" + field.name.replace("_", "-"),
            metavar=_metavar(field),
            help=_flag_help(field),
            group=field.metadata["group"],
            choices=field.metadata["choices"],
            default=field.default,
        )
        for field in dataclasses.fields(TrainConfig)
    ]


def coerce(key: str, text: str, origin: str = "command line") -> Any:
    """Turn the text of a flag into the key's type ('0,1' is a list). Raises a usage error."""
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    if key not in fields:
        raise unknown_key(key, origin)
    field = fields[key]
    kind = str(field.type)
    value: Any = text
    try:
        if kind == "int":
            value = int(text)
        elif kind == "float":
            value = float(text)
        elif kind.startswith("tuple"):
            items = [item.strip() for item in text.split(",") if item.strip()]
            value = items if "str" in kind else [int(item) for item in items]
    except ValueError:
        value = text
    return _checked(field, value, origin)


def parse_set(assignment: str) -> tuple[str, Any]:
    """Parse `key=value` of `--set`. Raises a usage error."""
    key, separator, text = assignment.partition("=")
    if not separator:
        raise usage_error(
            f"--set {assignment!r} is no assignment", cause="there is no '=' in it", hint="write --set key=value"
        )
    return key.strip().replace("-", "_"), coerce(key.strip().replace("-", "_"), text.strip(), "--set")


# A configuration has fifty lines; a device file or a model given by mistake would be read until memory ends.
_LARGEST_FILE = 1 << 20

PATH_KEYS = ("target_model", "data_dir", "held_out_dir", "init_from_drafter", "output_dir", "resume")
"""Keys that name a place on a disk."""


def base_of_paths(file: Path) -> Path:
    """Return what relative paths in a configuration file are relative to: its folder, or for a template its tree.

    Not the shell's directory: a file must mean the same wherever the command is typed.
    """
    tree = file.absolute().parent.parent
    return (
        tree if file.absolute().parent == tree / "templates" and (tree / "trainer").is_dir() else file.absolute().parent
    )


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file of flat keys. Raises a usage error when it is missing, no file of sane size, or no TOML."""
    try:
        if not path.exists():
            raise usage_error(
                f"no configuration {path}", cause="there is no such file", hint="check the path given with --config"
            )
        if not path.is_file() or path.stat().st_size > _LARGEST_FILE:
            cause = f"it is no regular file of at most {_LARGEST_FILE >> 20} MiB"
            raise usage_error(f"{path} is no configuration", cause=cause, hint="check the path given with --config")
        # Some editors put a byte order mark in front, which TOML has no place for.
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise usage_error(
            f"cannot read the configuration {path}", cause=str(error), hint="it must be TOML, one `key = value` a line"
        ) from error
