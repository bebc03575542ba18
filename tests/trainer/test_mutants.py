"""Mutants of every off-by-one in docs/algorithm.md: one expression of our code is changed, and a check must notice.

The checks (tests/mutation) are the algorithm written out a second time, on fixed tensors; nothing is trained. Every mistake
under "Where others went wrong" in docs/algorithm.md has one mutant at least.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from mutation.code import Mutant, mutated
from mutation.drafter_checks import (
    check_blocks,
    check_dpace,
    check_drafter,
    check_drafting,
    check_draws,
    check_flex,
    check_flex_mask,
    check_mask,
    check_no_anchor,
    check_noise,
    check_objective,
    check_padding,
    check_teacher,
)
from mutation.run_checks import (
    check_acceptance,
    check_buckets,
    check_cache,
    check_capture,
    check_complete_checkpoints,
    check_empty_step,
    check_layer_ids,
    check_lengths,
    check_on_policy,
    check_optimizer,
    check_packing,
    check_rate,
    check_saving,
    check_schedule,
    check_served_layer_ids,
)

from trainer.checkpoint_files import list_checkpoints
from trainer.choice import _agree
from trainer.data.rows import _fill, padded_width
from trainer.data.scan import _scan_piece
from trainer.data.schedule import Schedule
from trainer.drafter.anchors import candidates, row_shares, sample_anchors
from trainer.drafter.attention import _attend, block_rows, visible
from trainer.drafter.blocks import _segments, build_blocks, lay_out, pad_blocks, padded_count
from trainer.drafter.config import _check_target, default_target_layer_ids, gamma_for
from trainer.drafter.dpace import dpace_weights
from trainer.drafter.flex import FlexAttention, mask_mod
from trainer.drafter.inference import DraftBatch, _blocks_behind
from trainer.drafter.model import Drafter, rotate, rotation
from trainer.drafter.noise import _noisy
from trainer.drafter.objective import _chunks, _metrics, block_objective
from trainer.drafter.teacher import part_states, teaching_rows
from trainer.export_speculators import speculators_config, zlab_of
from trainer.on_policy import on_policy_rate
from trainer.optimizer import StepOptimizer, learning_rate
from trainer.pipeline.held_out import checkpoint_due
from trainer.pipeline.packed import PackBuffer
from trainer.pipeline.reader import RowReader, packed_length
from trainer.speculate import _last, _Sequence
from trainer.target.batch import PlainBatch
from trainer.target.capture import Target

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithm.md"

MUTANTS = {
    "anchor not strictly excluded": [
        Mutant(visible, "< query.anchor", "<= query.anchor", check_mask),
        Mutant(visible, "< query.anchor", "< query.position", check_mask),
    ],
    "label shift by one": [
        Mutant(lay_out, "input_ids[inside], 0)", "input_ids[inside - 1], 0)", check_blocks),
        Mutant(lay_out, ".astype(bool)[inside]", ".astype(bool)[inside - 1]", check_blocks),
    ],
    "hidden_states[id] for [id+1]": [
        Mutant(Target.capturing, "str(i)", "str(i - 1)", check_capture),
        Mutant(Target.capturing, "str(i)", "str(i + 1)", check_capture),
        Mutant(_check_target, "num_target_layers - 2", "num_target_layers - 1", check_layer_ids),
    ],
    "layer ids and gamma by another rule": [
        Mutant(default_target_layer_ids, "1 + i * (", "i * (", check_layer_ids),
        Mutant(default_target_layer_ids, "(num_target_layers // 2,)", "(num_target_layers // 2 - 1,)", check_layer_ids),
        Mutant(gamma_for, "(10, 5.0)", "(10, 6.0)", check_layer_ids),
        Mutant(default_target_layer_ids, "num_target_layers - 4", "num_target_layers - 3", check_layer_ids),
    ],
    "mask token outside the vocabulary": [
        Mutant(_check_target, "< config.vocab_size", "<= config.vocab_size", check_layer_ids),
    ],
    "padding shifted against hidden states": [
        Mutant(PackBuffer.pack, "[document, :length]", "[document, -length:]", check_packing),
        Mutant(PackBuffer.pack, "[document, :length]", "[document].roll(1, 0)[:length]", check_packing),
        Mutant(PackBuffer.pack, "into[used:] = 0", "into[used + 1 :] = 0", check_packing),
        Mutant(RowReader.read, "[place, :length]", "[place, padded.shape[1] - length :]", check_packing),
    ],
    "visibility by block index": [
        Mutant(block_rows, "blocks.anchor_positions, ordinal)", "ordinal * blocks.block_size, ordinal)", check_mask),
        Mutant(visible, "key.block == query.block", "key.block <= query.block", check_mask),
    ],
    "rope position S+k for a+k": [
        Mutant(
            lay_out,
            "anchor_positions[:, None] + offsets",
            "anchor_positions[:, None] * 0 + rows + offsets",
            check_blocks,
        ),
        Mutant(lay_out, "position_ids[anchor_rows]", "anchor_rows", check_blocks),
        Mutant(Drafter.draft, "positions.flatten()", "positions.flatten() + 1", check_drafter),
        Mutant(RowReader.read, "np.arange(length)", "np.arange(offset, offset + length)", check_packing),
    ],
    "last anchor S-1": [
        Mutant(candidates, "supervised[:-1] & supervised[1:]", "supervised", check_blocks),
        Mutant(candidates, "supervised[:-1] & supervised[1:]", "supervised[:-1]", check_blocks),
        Mutant(_scan_piece, "np.maximum(ends - 1, 0)", "np.minimum(ends, len(pairs) - 1)", check_lengths),
    ],
    "sliding bound": [
        Mutant(visible, "distance < window", "distance <= window", check_mask),
        Mutant(visible, "distance < window", "query.anchor - key.position <= window", check_mask),
    ],
    "block order inside sliding layers": [
        Mutant(visible, "(distance >= 0) & ", "", check_mask),
        Mutant(visible, "return seen\n", "return seen & (query.position >= key.position)\n", check_mask),
    ],
    "last position without a label": [
        Mutant(lay_out, "< ends[:, None]", "< ends[:, None] - 1", check_blocks),
        Mutant(lay_out, "< ends[:, None]", "<= ends[:, None]", check_blocks),
    ],
    "document leak in packed rows": [
        Mutant(visible, " & (key.document == query.document)", "", check_mask),
        Mutant(lay_out, "< ends[:, None]", "< rows", check_blocks),
        Mutant(_segments, "int(offsets[-1])", "int(offsets[-1]) - 1", check_drafter),
    ],
    "learning rate restarted on resume": [
        Mutant(StepOptimizer.apply, "self.learning_rate(step)", "self.learning_rate(1)", check_optimizer),
        Mutant(learning_rate, "step - 1 - warmup", "step - warmup", check_rate),
        Mutant(learning_rate, "step / warmup", "(step - 1) / warmup", check_rate),
    ],
    "optimizer or data position not resumed": [
        Mutant(StepOptimizer.load_state_dict, "value.to(device)", "value.to(device) * 0", check_optimizer),
        Mutant(Schedule._from, "range(first_step, ", "range(first_step + 1, ", check_schedule),
        Mutant(Schedule._from, "range(first_step, ", "range(1, ", check_schedule),
        Mutant(Schedule.step, "(step - 1) * self._group", "step * self._group - 1", check_schedule),
        Mutant(Schedule.epoch_of, "self._ends, b)", "self._ends, b + 1)", check_schedule),
    ],
    "half-written checkpoint chosen on resume": [
        Mutant(list_checkpoints, " and (path / STATE_FILE).is_file()", "", check_complete_checkpoints),
        Mutant(list_checkpoints, "_NAME.fullmatch", "_NAME.search", check_complete_checkpoints),
    ],
    "NaN step applied to the weights": [
        Mutant(StepOptimizer.apply, "found_inf = skipped", "found_inf = skipped * 0", check_optimizer),
        Mutant(StepOptimizer.apply, "torch.isfinite(norm) & ", "", check_optimizer),
    ],
    "final checkpoint missing at the last step": [
        Mutant(checkpoint_due, "step == total_steps or ", "", check_saving),
        Mutant(checkpoint_due, "step == total_steps", "step == total_steps - 1", check_saving),
    ],
    "sequences of 1, 2 or fewer than B tokens": [
        Mutant(_scan_piece, "ends - 1, 0)", "ends - 2, 0)", check_lengths),
        Mutant(row_shares, "np.minimum(counts, 1)", "0 * counts", check_draws),
    ],
    "samples longer than the limit": [
        Mutant(_scan_piece, "max_length)", "max_length + 1)", check_lengths),
        Mutant(_fill, "(count + 1) * ", "count * ", check_lengths),
    ],
    "a batch with no anchor on one rank only": [
        Mutant(_segments, " or (Segment(0, 0, 0, 0),)", "", check_no_anchor),
        Mutant(StepOptimizer.apply, "scale = drafters", "scale = 1", check_optimizer),
        Mutant(StepOptimizer.apply, "(bad | empty)", "bad", check_empty_step),
    ],
    "retuning of kernels at every new length in mid-run": [
        Mutant(packed_length, " * bucket_tokens", " * bucket_tokens * 0 + tokens", check_buckets),
        Mutant(packed_length, "-(-tokens // bucket_tokens)", "(tokens // bucket_tokens)", check_buckets),
        Mutant(padded_width, "bit_length() - 1", "bit_length()", check_buckets),
        Mutant(RowReader.read, "padded_width(max(lengths), self._bucket)", "max(lengths)", check_buckets),
    ],
    "row 0 with a weight": [
        Mutant(lay_out, "(offsets > 0) & ", "", check_blocks),
    ],
    "weight exp(-k/gamma)": [
        Mutant(lay_out, "(offsets - 1) / gamma", "offsets / gamma", check_blocks),
    ],
    "the anchor is another token": [
        Mutant(lay_out, "input_ids[anchor_rows]", "input_ids[anchor_rows - 1]", check_blocks),
    ],
    "draws": [
        Mutant(build_blocks, "row_budget // block_size", "row_budget // block_size - 1", check_draws),
        Mutant(sample_anchors, 'kind="stable")[:count]', 'kind="stable")[: count - 1]', check_draws),
        Mutant(sample_anchors, "seed, epoch, document_id).random", "seed, 0, document_id).random", check_draws),
    ],
    "final norm left out": [
        Mutant(Drafter.draft, "self.norm(rows)", "rows", check_drafter),
    ],
    "context through the input norm of a layer": [
        Mutant(Drafter.context_keys_values, "(features, at)", "(layer.input_layernorm(features), at)", check_drafter),
    ],
    "hidden_norm again in every layer": [
        Mutant(Drafter.context_keys_values, "(features, at)", "(self.hidden_norm(features), at)", check_drafter),
    ],
    "fc slices": [
        Mutant(Drafter.context_features, "slices[1:]", "slices[:-1]", check_drafter),
    ],
    "order of grouped heads": [
        Mutant(
            _attend,
            "kv_heads, shared, width).permute(2, 0, 3, 1, 4)",
            "shared, kv_heads, width).permute(3, 0, 2, 1, 4)",
            check_drafter,
        ),
    ],
    "flex's own mask": [
        Mutant(mask_mod, "row.clamp(max=last)", "row", check_flex_mask),
        Mutant(mask_mod, "len(queries.position) - 1", "len(queries.position) - 2", check_flex_mask),
        Mutant(mask_mod, "keys.document[column]", "queries.document[inside]", check_flex_mask),
        Mutant(mask_mod, "keys.block[column]", "queries.block[inside]", check_flex_mask),
        Mutant(FlexAttention.__init__, "[outside, inside]", "[inside, outside]", check_flex_mask),
        Mutant(FlexAttention.__init__, "value=value", "value=0", check_flex_mask),
        Mutant(FlexAttention.__init__, "% KEY_BUCKET", "% 128", check_flex_mask),
        Mutant(FlexAttention.__call__, "[*pair, padding]", "[*reversed(pair), padding]", check_flex),
        Mutant(FlexAttention.__call__, "[*pair, padding]", "[padding, *pair]", check_flex),
        Mutant(FlexAttention.__call__, "transpose(0, 1).flatten(1)", "flatten(1).unflatten(0, (-1, 1))", check_flex),
    ],
    "padding to a bucket of block rows": [
        Mutant(padded_count, "max(1, ", "max(0, ", check_padding),
        Mutant(padded_count, "-(-count // bucket)", "count // bucket + 1", check_padding),
        Mutant(pad_blocks, "value=PADDING", "value=0", check_padding),
        Mutant(pad_blocks, "Segment(0, 0, blocks.count, ", "Segment(0, 0, blocks.count + 1, ", check_flex),
        Mutant(block_rows, "len(blocks.positions)", "len(blocks.positions) * 0 + blocks.count", check_flex),
    ],
    "rotation": [
        Mutant(rotate, "[-second, first]", "[second, -first]", check_drafter),
        Mutant(rotation, "wide) / config.head_dim", "wide) / (config.head_dim - 2)", check_drafter),
    ],
    "labels of a sub-vocabulary": [
        Mutant(block_objective, "vocab_subset, labels)", "vocab_subset, labels, right=True)", check_objective),
    ],
    "accept_len": [
        Mutant(_metrics, "(1 + right[:, 1:]", "(right[:, 1:]", check_objective),
        Mutant(_metrics, "right[:, 1:].cumprod", "right.cumprod", check_objective),
    ],
    "chunks": [
        Mutant(_chunks, "at_once, blocks.count)", "at_once, blocks.count - 1)", check_objective),
    ],
    "D-PACE": [
        Mutant(dpace_weights, ".cumprod(dim=-1)", ".cumprod(dim=-1).roll(1, dims=-1)", check_dpace),
        Mutant(dpace_weights, ".triu()", ".triu(1)", check_dpace),
    ],
    "KL to the state at the label": [
        Mutant(teaching_rows, "% blocks.block_size - 1", "% blocks.block_size", check_teacher),
        Mutant(teaching_rows, "% blocks.block_size - 1", "% blocks.block_size - 2", check_teacher),
        Mutant(part_states, "// (num_target_layer_ids + 1)", "// num_target_layer_ids", check_teacher),
        Mutant(part_states, "states[num_target_layer_ids]", "states[num_target_layer_ids - 1]", check_teacher),
    ],
    "drafting": [
        Mutant(DraftBatch.extend, "torch.arange(start, start", "torch.arange(start + 1, start + 1", check_drafting),
        Mutant(DraftBatch.extend, "state[:count]", "state[-count:]", check_drafting),
        Mutant(DraftBatch.draft, "[:, 1:]", "[:, :-1]", check_drafting),
        Mutant(_blocks_behind, "np.array([length])", "np.array([length - 1])", check_drafting),
    ],
    "verification": [
        Mutant(_agree, "== successors[accepted]", "== successors[accepted + 1]", check_acceptance),
        Mutant(
            _agree, "Verdict(accepted, successors[accepted])", "Verdict(accepted, successors[-1])", check_acceptance
        ),
        Mutant(_Sequence.commit, "verdict.accepted + 1", "verdict.accepted", check_acceptance),
        Mutant(_Sequence.commit, "- len(self.tokens))", "- len(self.tokens) + 1)", check_acceptance),
        Mutant(_Sequence.block_size, "len(self.tokens) + 1", "len(self.tokens)", check_acceptance),
        Mutant(_last, "torch.tensor(counts) - 1", "torch.tensor(counts) - 2", check_acceptance),
        Mutant(PlainBatch.keep, "columns < ", "columns <= ", check_cache),
        Mutant(PlainBatch.append, "before.sum(dim=1, keepdim=True)", "before.shape[1]", check_cache),
    ],
    "on-policy rate against the label's own state": [
        Mutant(on_policy_rate, "hidden[0, positions - 1]", "hidden[0, positions]", check_on_policy),
        Mutant(on_policy_rate, "document.loss_mask[1:]) + 1", "document.loss_mask[1:])", check_on_policy),
    ],
    "layer ids from zero or from one": [
        Mutant(speculators_config, "[i + 1 for", "[i for", check_served_layer_ids),
        Mutant(speculators_config, "config.block_size - 1", "config.block_size", check_served_layer_ids),
        Mutant(zlab_of, "[i - 1 for", "[i for", check_served_layer_ids),
    ],
    "noise": [
        Mutant(_noisy, "run.document_id, layer, ", "run.document_id, 0, ", check_noise),
        Mutant(_noisy, "noise.epoch, ", "0, ", check_noise),
        Mutant(_noisy, "state.clone()", "state", check_noise),
        Mutant(_noisy, "noisy[run.start : run.end] +=", "noisy[run.start + 1 : run.end + 1] +=", check_noise),
    ],
}
# Every mistake in who sees what is one of the flex backend's mask as well.
MUTANTS["masks, in flex"] = [
    dataclasses.replace(each, check=check_flex_mask)
    for mutants in [*MUTANTS.values()]
    for each in mutants
    if each.check is check_mask
]
TABLE = [(mistake, mutant) for mistake, mutants in MUTANTS.items() for mutant in mutants]
CHECKS = list({mutant.check: None for _, mutant in TABLE})


def survives(mutant: Mutant) -> bool:
    with mutated(mutant):
        try:
            mutant.check()
        # Whatever stops a mutant catches it: most end in a wrong number, some in a shape that does not fit.
        except Exception:
            return False
    return True


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_code_as_it_is_passes(check):
    check()


def test_every_mutant_is_caught(capsys):
    survivors = [f"{mistake}: {each.text!r} -> {each.instead!r}" for mistake, each in TABLE if survives(each)]
    with capsys.disabled():
        print(f" mutants caught: {len(TABLE) - len(survivors)} of {len(TABLE)} ", end="")
    assert survivors == []


def test_nothing_stays_changed_behind_a_mutant():
    mutant = MUTANTS["rotation"][0]
    with mutated(mutant), pytest.raises(AssertionError):
        mutant.check()
    mutant.check()


def test_a_text_that_is_not_there_once_is_an_error_not_a_caught_mutant():
    with pytest.raises(AssertionError, match="mend the table"), mutated(Mutant(rotate, "nowhere", "", check_mask)):
        pass


def test_every_mistake_of_the_document_has_a_mutant():
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Where others went wrong")[2].partition("\n## ")[0]
    listed = re.findall(r"^\* \*\*(.+?)\*\*", section, flags=re.MULTILINE)
    assert len(listed) == 20
    assert set(listed) <= set(MUTANTS)
