"""What ended a run, out of the records that its ranks left: one error for a person to read. Torch-free."""

from __future__ import annotations

from pathlib import Path

from remote.protocol.errors import DflashError, ExitCode
from remote.protocol.layout import RunLayout
from remote.protocol.records import RankError, read_record
from trainer.checkpoint_files import list_checkpoints
from trainer.pipeline.plan import RunPlan

_SENTENCES = ("DflashError", "Stalled")


def records(run: RunLayout) -> list[RankError]:
    """Return the records of a run's ranks and leader, the first cause first.

    What tells of another rank's loss comes behind all that does not. One that cannot be read counts as none.
    """
    found: list[RankError] = []
    for path in sorted(run.error(0).parent.glob("rank-*.json")):
        try:
            record = read_record(RankError, path)
        except ValueError:  # Cut short by a full disk: the rank said on stderr that it could not be written.
            continue
        if record is not None:
            found.append(record)
    return sorted(found, key=lambda record: (record.consequence, record.time))


def first_cause(plan: RunPlan, returncode: int) -> DflashError:
    """Return what ended a run whose leader ended with `returncode` (negative for a signal)."""
    found = records(plan.run)
    resume = _resume_hint(plan)
    if not found:
        how = f"was killed by signal {-returncode}" if returncode < 0 else f"ended with code {returncode}"
        return DflashError(f"the launcher {how}", cause="no rank left a record", hint=resume)
    first = found[0]
    path = plan.run.error(first.rank)
    known = first.kind in _SENTENCES or first.cause or first.hint
    place = f"rank {first.rank} ({first.role}, {first.device})" if first.rank >= 0 else ""
    causes = [first.cause, "" if known else _last_frame(first.traceback), f"{place} in {first.phase}" if place else ""]
    hints = [first.hint, f"the whole traceback is in {path}" if first.rank >= 0 else "", resume]
    return DflashError(
        first.message if known else f"{first.kind}: {first.message}",
        cause="; ".join(filter(None, causes)),
        hint="; ".join(filter(None, hints)),
        code=ExitCode(first.code) if first.code in set(ExitCode) else ExitCode.FAILED,
    )


def _last_frame(traceback: str) -> str:
    """Return where a traceback ends: 'target_side.py:88 in produce'."""
    frames = [line for line in traceback.splitlines() if line.startswith('  File "') and ", line " in line]
    if not frames:
        return ""
    file, line, *function = frames[-1].strip().removeprefix('File "').replace('"', "").split(", ")
    return f"{Path(file).name}:{line.removeprefix('line ')} {' '.join(function)}".strip()


def _resume_hint(plan: RunPlan) -> str:
    kept = list_checkpoints(Path(plan.output_dir))
    return f"--resume {kept[-1]} goes on from the last checkpoint" if kept else ""
