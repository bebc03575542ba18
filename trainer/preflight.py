"""Everything about a run that can be judged before anything is launched: model, data, mask token, layers, space. Torch-free."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from remote.protocol.errors import DflashError, preflight_error, together, usage_error
from trainer.config import TrainConfig
from trainer.data.documents import Dataset, open_dataset
from trainer.data.schedule import Packing, Schedule
from trainer.drafter.config import DrafterConfig, derive
from trainer.exported_files import check_start_from
from trainer.gpus import GIB, check_cap, drafter_bytes, gpu_sizes, target_bytes
from trainer.pipeline.layout import Layout
from trainer.pipeline.slots import ITEM_BYTES, slot_bytes
from trainer.target.facts import TargetFacts, target_facts

SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")
_MIB = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """What the preflight found, so that the leader need not look again."""

    config: TrainConfig
    facts: TargetFacts
    drafter: DrafterConfig
    dataset: Dataset
    schedule: Schedule
    total_steps: int
    held_out: Dataset | None


def drafter_config(config: TrainConfig, facts: TargetFacts) -> DrafterConfig:
    """Return the drafter that the configuration and the target give. Raises a preflight error for impossible ids."""
    if config.mask_token_id < 0:
        raise usage_error(
            "mask_token_id is not set",
            cause="a drafter needs a token of the target's vocabulary that never occurs in text",
            hint="name an unused special token with --mask-token-id (Qwen3.6: 248070)",
        )
    return derive(
        dict(facts.text_config),
        num_layers=config.drafter_layers,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.target_layer_ids or None,
        num_target_layer_ids=config.captured_layers,
        sliding_window=config.sliding_window,
        layer_types=[f"{kind}_attention" for kind in config.layer_types] or config.attention,
        num_attention_heads=config.drafter_heads or None,
        num_key_value_heads=config.drafter_kv_heads or None,
        head_dim=config.drafter_head_dim or None,
        intermediate_size=config.drafter_ffn or None,
        rope_theta=config.drafter_rope_theta or None,
    )


def check_mask_token(token: int, data_dir: str, dataset: Dataset) -> None:
    """Raise a preflight error when the mask token is a label: a drafter cannot tell that row 0 from the rows it has to fill."""
    if labels := dataset.count_labels(token):
        raise preflight_error(
            f"mask_token_id {token} occurs in the data",
            cause=f"{labels} labels of {data_dir} are this token",
            hint="name a token that never occurs in text with --mask-token-id, an unused special one",
        )


def visible_gpus() -> int:
    """Return how many GPUs CUDA's driver shows to this process (CUDA_VISIBLE_DEVICES counts), without importing torch."""
    return len(gpu_sizes())


def check_devices(config: TrainConfig) -> None:
    """Raise a preflight error when a GPU of the configuration is not there."""
    if config.device != "cuda":
        return
    there = visible_gpus()
    missing = sorted({gpu for gpu in (*config.target_gpus, *config.drafter_gpus) if gpu >= there})
    if missing:
        raise preflight_error(
            f"there is no GPU {', '.join(map(str, missing))}",
            cause=f"CUDA's driver shows {there or 'no'} GPU{'' if there == 1 else 's'} here",
            hint="name others with --target-gpus and --drafter-gpus, or train on the CPU with --device cpu",
        )


def check_memory(config: TrainConfig, facts: TargetFacts, drafter: DrafterConfig, sizes: Sequence[int]) -> None:
    """Raise a preflight error when a GPU, or its cap, cannot hold what its role needs at rest: before any shape is run.

    `sizes`: bytes by GPU; what is not known of one is not judged.
    """
    if config.device != "cuda":
        return
    item = ITEM_BYTES[config.dtype]
    last_layer = facts.num_layers - 1 if config.distils else max(drafter.target_layer_ids)
    whole_head = config.loss_vocab_extra < 0
    states = row_states_bytes(config, drafter) * (1 if config.shared_roles or config.transfer == "sync" else 2)
    needs = {
        "target": (config.target_gpus, target_bytes(facts, last_layer, item)),
        "drafter": (config.drafter_gpus, drafter_bytes(parameter_count(drafter), facts, item, whole_head=whole_head)),
    }
    for gpu in sorted({*config.target_gpus, *config.drafter_gpus}):
        size = sizes[gpu] if gpu < len(sizes) else 0
        if not size:
            continue
        check_cap(config.gpu_memory_gib, size, gpu)
        roles = {role: need for role, (gpus, need) in needs.items() if gpu in gpus}
        room = config.gpu_memory_gib * GIB or size
        if sum(roles.values()) + states > room:
            raise _too_small(gpu, roles, states, room, "gpu_memory_gib allows" if config.gpu_memory_gib else "it has")


def _too_small(gpu: int, roles: Mapping[str, int], states: int, room: float, whose: str) -> DflashError:
    parts = [f"{need / GIB:.1f} GiB for the {role}" for role, need in roles.items()]
    ways = {
        "target": "capture earlier layers with --target-layer-ids: those behind the last captured one are not loaded",
        "drafter": "lower --drafter-layers",
    }
    way = ways[next(iter(roles))] if len(roles) == 1 else "give target and drafter GPUs of their own"
    flag = "--target-gpus" if "target" in roles else "--drafter-gpus"
    return preflight_error(
        f"GPU {gpu} is too small for the {' and the '.join(roles)}",
        cause=f"{', '.join(parts)} and {states / GIB:.1f} GiB for states are needed before the first step; "
        f"{whose} {room / GIB:.1f} GiB",
        hint=f"name a larger one with {flag}, or {way}",
    )


def row_states_bytes(config: TrainConfig, drafter: DrafterConfig) -> int:
    """Return the bytes of a packed row of states, header and tokens included: those of a slot of the ring."""
    tokens = -(-config.token_budget // config.bucket_tokens) * config.bucket_tokens
    width = (len(drafter.target_layer_ids) + config.distils) * drafter.hidden_size
    return slot_bytes(tokens, width, ITEM_BYTES[config.dtype])


def make_schedule(config: TrainConfig, packing: Packing, machines: int = 1) -> Schedule:
    """Return the run's schedule; ranks compute the same one from the same lengths."""
    layout = Layout.of(config).counts(machines)
    return Schedule(packing, layout, epochs=config.epochs, micro_batches_per_step=config.micro_batches_per_step)


def ring_size(config: TrainConfig, drafter: DrafterConfig) -> tuple[int, int]:
    """Return (bytes of a slot, slots of each pair). Raises a preflight error when the bound holds fewer than two slots a pair.

    A pair with one slot would make the target wait for every copy in.
    """
    size = row_states_bytes(config, drafter)
    pairs = len(Layout.of(config).pairs)
    if pairs == 0:
        return size, 0
    slots = config.ring_mib * _MIB // (size * pairs)
    if slots < 2:
        need = -(-2 * pairs * size // _MIB)
        raise preflight_error(
            f"ring_mib = {config.ring_mib} is too small",
            cause=f"{pairs} pairs need two slots of {size / _MIB:.1f} MiB each, {need} MiB together",
            hint=f"set ring_mib to {need} or more, or lower token_budget",
        )
    # More than a step's micro-batches in flight serve nothing: they only make a stop throw more work away.
    return size, min(slots, max(2, config.micro_batches_per_step))


def _existing(path: Path) -> Path:
    """Return the nearest place on the way up that exists: what will be made lies in it."""
    while not path.exists():
        path = path.parent
    return path


def _free(path: Path) -> int:
    return shutil.disk_usage(_existing(path)).free


def check_writable(output_dir: Path) -> None:
    """Raise a preflight error when no directory can be made at `output_dir`, or nothing in it."""
    place = _existing(output_dir)
    # Not the mode bits: root may write everywhere but on what is mounted read-only.
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise preflight_error(
            f"checkpoints cannot be written to {output_dir}",
            cause=f"{place} {'cannot be written' if place.is_dir() else 'is no directory'}",
            hint="name a directory that can be written with --output-dir",
        )


def _need_space(path: Path, need: int, what: str, hint: str) -> None:
    free = _free(path)
    if need > free:
        raise preflight_error(
            f"no space left for {what}",
            cause=f"{path} has {free / _MIB:.1f} MiB free, {need / _MIB:.1f} MiB are needed",
            hint=hint,
        )


def memory_limit() -> int | None:
    """Return this container's memory limit in bytes (cgroup v2 memory.max), None where there is none."""
    try:
        text = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def layer_shapes(drafter: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of one drafter layer by its name inside the layer."""
    hidden, head_dim, ffn = drafter.hidden_size, drafter.head_dim, drafter.intermediate_size
    queries, keys = head_dim * drafter.num_attention_heads, head_dim * drafter.num_key_value_heads
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }


def check_start(config: TrainConfig, facts: TargetFacts, drafter: DrafterConfig) -> None:
    """Raise a preflight error when the drafter is to start from the target's last layers and these have other shapes.

    Else every drafter rank would find out by itself, after the target's weights were read.
    """
    if config.init_from_target == "off":
        return
    for layer in range(facts.num_layers - drafter.num_hidden_layers, facts.num_layers):
        for name, shape in layer_shapes(drafter).items():
            entry = facts.tensors.get(f"{facts.prefix}layers.{layer}.{name}")
            # Llama has no norms of queries and keys; the start has a rule for these.
            if entry is None and name.endswith(("q_norm.weight", "k_norm.weight")):
                continue
            if entry is None or entry.shape != shape:
                found = "missing" if entry is None else list(entry.shape)
                hint = "leave heads, head width and ffn at the target's, or turn init_from_target off"
                if facts.hybrid:
                    hint = "a hybrid's last layers are recurrent; init_from_target needs a plain target: turn it off"
                raise preflight_error(
                    "the drafter cannot start from this target's layers",
                    cause=f"{name} is {list(shape)} in the drafter, {found} in the target's layer {layer}",
                    hint=hint,
                )


def parameter_count(drafter: DrafterConfig) -> int:
    """Return the number of the drafter's parameters; Qwen3.6-27B's has 1,730,213,120."""
    hidden, head_dim = drafter.hidden_size, drafter.head_dim
    attention = 2 * hidden * head_dim * (drafter.num_attention_heads + drafter.num_key_value_heads) + 2 * head_dim
    layer = attention + 3 * hidden * drafter.intermediate_size + 2 * hidden
    return drafter.num_hidden_layers * layer + len(drafter.target_layer_ids) * hidden * hidden + 2 * hidden


def check_space(config: TrainConfig, drafter: DrafterConfig, output_dir: Path, freed_shm: int = 0) -> None:
    """Raise a preflight error when the ring or the checkpoints do not fit; `freed_shm` as for `preflight`."""
    size, slots = ring_size(config, drafter)
    pairs = len(Layout.of(config).pairs)
    ring = size * slots * pairs
    _need_space(SHARED_MEMORY, ring - freed_shm, "the ring", "lower ring_mib, or free shared memory")
    # Pages of /dev/shm count as the container's memory: a ring beyond its limit ends in the OOM killer, not in ENOSPC.
    if (limit := memory_limit()) is not None and ring > limit:
        raise preflight_error(
            "no space left for the ring",
            cause=f"the container's memory limit is {limit / _MIB:.0f} MiB, {ring / _MIB:.0f} MiB are needed",
            hint="lower ring_mib, or give the container more memory",
        )
    # Master weights and two moments; one more than is kept exists while the newest is written, and the best stays.
    masters = parameter_count(drafter) * max(4, ITEM_BYTES[config.dtype])
    need = 3 * masters * (min(config.keep_checkpoints, 2) + 1 + bool(config.held_out_dir))
    _need_space(output_dir, need, "checkpoints", "free space there, lower keep_checkpoints, or name another output_dir")


def preflight(config: TrainConfig, output_dir: Path | None, *, devices: bool = True, freed_shm: int = 0) -> Prepared:
    """Check everything and return what was found. Raises one DflashError (2 or 7) for all that is wrong.

    `output_dir`: where checkpoints will need space, None for nowhere; `devices`: whether GPUs are looked at, which whoever
    asks may have done; `freed_shm`: bytes of /dev/shm that a run gives back which ends before this one begins.
    """
    if not config.target_model or not config.data_dir:
        key = "target_model" if not config.target_model else "data_dir"
        raise usage_error(
            f"{key} is not set", cause="there is nothing to train on", hint=f"name it with --{key.replace('_', '-')}"
        )
    wrong = Wrong()
    if devices:
        wrong.note(lambda: check_devices(config))
    facts = wrong.note(lambda: target_facts(Path(config.target_model)))
    vocabulary = None if facts is None else facts.vocab_size
    dataset = wrong.note(
        lambda: open_dataset(Path(config.data_dir), max_length=config.max_length, vocab_size=vocabulary)
    )
    held_out = None
    if config.held_out_dir:
        held_out = wrong.note(
            lambda: open_dataset(Path(config.held_out_dir), max_length=config.max_length, vocab_size=vocabulary)
        )
    drafter = None if facts is None else wrong.note(lambda: drafter_config(config, facts))
    for place, each in ((config.data_dir, dataset), (config.held_out_dir, held_out)):
        if each is not None:
            wrong.note(functools.partial(check_mask_token, config.mask_token_id, place, each))
    if facts is not None and drafter is not None:
        wrong.note(lambda: check_start(config, facts, drafter))
        if devices:
            wrong.note(lambda: check_memory(config, facts, drafter, gpu_sizes()))
    if drafter is not None and config.init_from_drafter and not config.resume:
        wrong.note(lambda: check_start_from(Path(config.init_from_drafter), drafter))
    if drafter is not None and output_dir is not None:
        wrong.note(lambda: check_writable(output_dir))
        wrong.note(lambda: check_space(config, drafter, output_dir, freed_shm))
    wrong.raise_all()
    assert facts is not None
    assert dataset is not None
    assert drafter is not None
    schedule = make_schedule(config, packing_of(config, dataset.lengths, dataset.candidates))
    total = min(schedule.total_steps, config.max_steps) if config.max_steps else schedule.total_steps
    return Prepared(config, facts, drafter, dataset, schedule, total, held_out)


class Wrong:
    """What several looks found wrong: a model that is missing must not hide that the data is missing too."""

    def __init__(self) -> None:
        self._errors: list[DflashError] = []

    def note(self, look: Callable[[], T]) -> T | None:
        """Return what `look` does, None when it raised a DflashError, which is kept."""
        try:
            return look()
        except DflashError as error:
            self._errors.append(error)
            return None

    def raise_all(self) -> None:
        """Raise what was kept, as one error."""
        if self._errors:
            raise together(self._errors)


def packing_of(config: TrainConfig, lengths: NDArray[np.int32], candidates: NDArray[np.int32]) -> Packing:
    """Return what rows are packed from: int32[n] lengths and anchor candidates of the documents."""
    return Packing(
        lengths=lengths,
        candidates=candidates,
        seed=config.seed,
        token_budget=config.token_budget,
        bucket_tokens=config.bucket_tokens,
        # Every document of a row gets one anchor at least.
        max_documents=config.row_anchors,
    )
