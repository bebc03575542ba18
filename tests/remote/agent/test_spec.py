"""The verb spec: what a run was started with, and where going on from it would begin."""

from __future__ import annotations

from pathlib import Path

from remote.protocol.codec import from_plain
from remote.protocol.records import RunSpec, read_record


def test_it_answers_what_the_run_was_started_with(far):
    far.running(spec={"config": {"max_steps": 40, "note": "é"}})
    answered = far.ok("spec")
    assert from_plain(RunSpec, answered["spec"]) == read_record(RunSpec, far.run.spec)
    assert far.ok("spec", run=far.run.run_id) == answered


def test_with_resume_it_names_the_checkpoint_that_start_would_take(far):
    far.running()
    saved = far.ok("stop")["status"]["last_checkpoint"]
    earlier = Path(saved).with_name("step-1")
    earlier.mkdir()
    first = far.run.run_id
    # A newer run without a checkpoint is not what `last` means.
    far.running("--ignore-stop")
    far.ok("stop", now=True)
    for resume, path in (("last", saved), (first, saved), (f"{first}@1", str(earlier))):
        answered = far.ok("spec", resume=resume)
        assert (answered["spec"]["run_id"], answered["checkpoint"]) == (first, path)
        # Whoever says `last` may mean the newer one; who names a run does not.
        newest = max(path.name for path in far.root.runs.iterdir())
        assert answered["passed_over"] == (newest if resume == "last" else "")
        assert far.start("--steps", "1", resume=f"{first}@{answered['step']}").result["status"]["resumed_from"] == path


def test_what_is_not_there_is_told_with_its_code(far):
    assert far.call("spec").error["code"] == 3
    assert far.call("spec", resume="last").error["code"] == 3
    far.running("--ignore-stop")
    far.ok("stop", now=True)
    run = far.run
    assert far.call("spec", resume=run.run_id).error["code"] == 7
    for damage in ("{", None):
        run.spec.unlink() if damage is None else run.spec.write_text(damage)
        error = far.call("spec", run=run.run_id).error
        assert (error["code"], "--config" in error["hint"]) == (7, True)
        assert "spec.json" in error["cause"]
